"""Records what the caches of the cluster hold: which worker holds which prefix of KV blocks, and which member holds
which features.

`block_hashing` computes the identity of KV blocks, in the same way on the worker that fills them and on the router that
looks them up. `holder_index` keeps the two indexes, which the members' own events fill, in the tables of
`holder_table`, of which one is C code (`holder_table.c`). Routers ask the indexes when they plan a route. The package
is pure: it knows nothing of any policy, of models, or of how events and snapshots travel.
"""

from kv_index.block_hashing import is_known_scheme, keys_of_blocks, prompt_block_hashes
from kv_index.holder_index import ApplyResult, FeatureIndex, IndexStats, PrefixIndex
from kv_index.holder_table import PlainTable

__all__ = [
    "ApplyResult",
    "FeatureIndex",
    "IndexStats",
    "PlainTable",
    "PrefixIndex",
    "is_known_scheme",
    "keys_of_blocks",
    "prompt_block_hashes",
]
