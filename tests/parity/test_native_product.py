"""Tests that the products in C equal those of float64, in every layout and for every kind of processor that the source
supports."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import silu

from fabric import c_library
from modalities.families.causal_lm import projection as native_product
from modalities.families.causal_lm.projection import NativeWeights, is_native

NATIVE = "-march=native"
PROCESSORS = [NATIVE, *(["-march=x86-64-v3", "-march=x86-64"] if platform.machine() == "x86_64" else [])]
pytestmark = pytest.mark.skipif(native_product._library() is None, reason="no C compiler")
WIDTH = 96
"""The width is a multiple of every processor's panel."""


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes the library compile its code for such a processor."""
    options = tuple(request.param if option == NATIVE else option for option in c_library.COMPILE_OPTIONS)
    monkeypatch.setattr(c_library, "COMPILE_OPTIONS", options)
    native_product._library.cache_clear()
    yield request.param
    native_product._library.cache_clear()


def drawn(*shape: int, is_narrow: bool = False) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.bfloat16().float() if is_narrow else values


@pytest.mark.parametrize("is_narrow", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("num_in", [1, 37, 1024, 1025, 2500])
def test_products_are_those_of_float64(processor: str, num_in: int, is_narrow: bool) -> None:
    weight, bias = drawn(WIDTH, num_in, is_narrow=is_narrow), drawn(WIDTH)
    without, weights = NativeWeights(weight), NativeWeights(weight, bias)
    assert weights.is_narrow == is_narrow
    for num_rows in (*range(1, 15), 240, 241, 500):
        x, other = drawn(num_rows, num_in), drawn(num_rows, WIDTH)
        exact = x.double() @ weight.double().T
        tolerance = {"atol": 1e-5 * num_in**0.5, "rtol": 1e-5}
        torch.testing.assert_close(without.multiply(x).double(), exact, **tolerance)
        exact += bias.double()
        torch.testing.assert_close(weights.multiply(x).double(), exact, **tolerance)
        found = weights.multiply(x, has_silu=True, factor=other, addend=other)
        expected = silu(exact) * other.double() + other.double()
        torch.testing.assert_close(found.double(), expected, atol=3 * tolerance["atol"], rtol=1e-5)


def test_silu_of_any_size(processor: str) -> None:
    values = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([float("inf"), 1e30, -1e30, 1e-30, -0.0])])
    weight = torch.zeros(WIDTH, 1)
    weight[0] = 1
    found = NativeWeights(weight).multiply(values[:, None], has_silu=True)[:, 0]
    torch.testing.assert_close(found, silu(values), atol=1e-36, rtol=1e-5)
    assert NativeWeights(weight).multiply(torch.tensor([[float("nan")]]), has_silu=True).isnan().all()


def test_a_rows_result_is_the_same_in_any_company(processor: str) -> None:
    """The result is the same to the last bit, even if other rows are not finite."""
    x = drawn(301, 1100)
    for is_narrow in (True, False):
        weights = NativeWeights(drawn(WIDTH, 1100, is_narrow=is_narrow))
        together, others = weights.multiply(x), [row for row in range(len(x)) if row not in (5, 6)]
        for first, last in ((0, 1), (7, 8), (3, 17), (100, 300), (296, 301)):
            assert torch.equal(weights.multiply(x[first:last]), together[first:last])
        spoilt = x.clone()
        spoilt[5] = float("nan")
        spoilt[6, 0] = float("inf")
        found = weights.multiply(spoilt)
        assert torch.equal(found[others], together[others])
        assert found[5].isnan().all()
        assert not found[6].isfinite().any()


def test_rows_that_lie_apart_and_no_rows_at_all() -> None:
    weights = NativeWeights(drawn(WIDTH, 40))
    apart = drawn(9, 80)[:, ::2]
    assert torch.equal(weights.multiply(apart), weights.multiply(apart.contiguous()))
    assert weights.multiply(torch.empty(0, 40)).shape == (0, WIDTH)


def test_only_weights_that_bfloat16_holds_are_kept_in_it() -> None:
    weight = drawn(WIDTH, 50, is_narrow=True)
    weight[0, 0], weight[1, 1], weight[2, 2] = -0.0, 1e-40, 3e38
    weight = weight.bfloat16().float()
    assert NativeWeights(weight).is_narrow
    for value in (1 + 2**-8, 1e-45, float("nan")):
        spoilt = weight.clone()
        spoilt[WIDTH - 1, 49] = value
        assert not NativeWeights(spoilt).is_narrow


def test_which_weights_it_multiplies_by() -> None:
    library = native_product._library()
    assert library is not None
    panel = library.weft_panel_width()
    assert WIDTH % panel == 0
    assert is_native(torch.zeros(panel, 3))
    assert not is_native(torch.zeros(panel + 1, 3))
    assert not is_native(torch.zeros(panel, 3, dtype=torch.bfloat16))
    assert not is_native(torch.zeros(panel, 3, device="meta"))
