"""Lists the attacks that servers of models have suffered, and for each the naive implementation that lets it succeed.

A variant takes one guard of Weft away. The test that it names must then fail, which `test_naive_variants` asserts: a
test that also passes without the guard would show nothing. `docs/threats.md` has a row for each variant.
"""

import naive_media
import naive_network
import naive_requests
from naive_variant import DECLARED, NaiveVariant

DECLARING = (naive_media, naive_requests, naive_network)
VARIANTS: list[NaiveVariant] = sorted(
    DECLARED, key=lambda variant: [module.__name__ for module in DECLARING].index(variant.apply.__module__)
)
"""Holds the variants in the order of the documentation."""
