# SPDX-License-Identifier: Apache-2.0
"""The packed int8 product of a CPU is the plain one, bit for bit, and whatever loses a sum is not taken."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_kernels import int8_linear as int8_packed
from specvla_kernels.int8_linear import PackedInt8, Sums, int8_linear, pack_int8, packed_product

needs_product = pytest.mark.skipif(packed_product() is None, reason="this processor has no exact packed product")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packed(shape: tuple[int, int], seed: int) -> tuple[PackedInt8, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    weight[0] = -128 if seed % 2 else 127
    scales = torch.rand(shape[0], generator=generator) * 0.02 + 1e-3
    found = pack_int8(weight.clone(), scales)
    assert found is not None
    return found, weight, scales


def activations(n_rows: int, in_features: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of very different sizes; some are as large as they can be in every column, some are zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, in_features, generator=generator)
    x *= 10.0 ** torch.randint(-3, 3, (n_rows, 1), generator=generator)
    kinds = torch.randint(4, (n_rows,), generator=generator)
    x[kinds == 0] = x[kinds == 0, :1].sign()
    x[kinds == 1] = 0
    return x.to(dtype)


@needs_product
@settings(max_examples=examples(60), deadline=None)
@given(
    n_rows=st.sampled_from([1, 2, 5, 16, 17, 33, 70]),
    shape=st.sampled_from([(8, 8), (24, 64), (289, 96), (64, 1000), (7, 13)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_it_is_the_plain_product_to_the_bit(n_rows: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    """Up to a thousand columns: float32 holds all sums that they have."""
    product, weight, scales = packed(shape, seed)
    x = activations(n_rows, shape[1], dtype, seed)
    result = product(x)
    assert result.dtype == dtype and torch.equal(result, int8_linear(x, weight, scales))


@needs_product
@settings(max_examples=examples(20), deadline=None)
@given(
    rows=st.lists(st.integers(0, 299), min_size=1, max_size=20, unique=True),
    shape=st.sampled_from([(64, 96), (96, 5632), (40, 2048)]),
    seed=st.integers(0, 1000),
)
def test_a_row_does_not_depend_on_those_beside_it(rows: list[int], shape: tuple[int, int], seed: int) -> None:
    product, weight, scales = packed(shape, seed)
    x = activations(300, shape[1], torch.float32, seed)
    together = product(x)
    assert torch.equal(product(x[rows]), together[rows])
    torch.testing.assert_close(together, int8_linear(x, weight, scales), rtol=1e-6, atol=0)


@needs_product
def test_a_row_with_nan_gives_nothing_finite_and_the_others_stay() -> None:
    product, _, _ = packed((64, 96), 3)
    x = activations(5, 96, torch.float32, 3)
    expected = product(x)
    x[2, 7] = torch.nan
    result = product(x)
    others = [0, 1, 3, 4]
    assert not result[2].isfinite().any() and torch.equal(result[others], expected[others])


@pytest.mark.parametrize("name", ["_by_onednn", "_by_fbgemm", "_by_fbgemm_in_halves"])
@pytest.mark.parametrize("n_rows", [1, 2, 33])
def test_each_product_is_exact_of_small_numbers_on_any_processor(name: str, n_rows: int) -> None:
    if name != "_by_onednn" and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no FBGEMM")
    generator = torch.Generator().manual_seed(n_rows)
    weight, rows = (torch.randint(-8, 9, (n, 96), generator=generator, dtype=torch.int8) for n in (24, n_rows))
    sums = getattr(int8_packed, name)(weight)
    assert torch.equal(sums(rows.float()), (rows.int() @ weight.int().T).float())


def test_a_product_that_loses_a_sum_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturated(weight: torch.Tensor) -> Sums:
        """As products of bytes that are added in pairs, in 16 bits."""

        def sums(rows: torch.Tensor) -> torch.Tensor:
            pairs = ((rows[:, None].int() + 128) * weight.int()).unflatten(2, (-1, 2)).sum(3).clamp(-32768, 32767)
            return (pairs.sum(2) - 128 * weight.int().sum(1)).float()

        return sums

    def missing(weight: torch.Tensor) -> Sums:
        raise RuntimeError("could not create a primitive")

    for name in ("_by_onednn", "_by_fbgemm"):
        monkeypatch.setattr(int8_packed, name, saturated)
    monkeypatch.setattr(int8_packed, "_by_fbgemm_in_halves", missing)
    packed_product.cache_clear()
    try:
        assert packed_product() is None and pack_int8(torch.ones(8, 8, dtype=torch.int8), torch.ones(8)) is None
    finally:
        packed_product.cache_clear()
