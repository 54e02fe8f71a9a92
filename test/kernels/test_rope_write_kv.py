# SPDX-License-Identifier: Apache-2.0
"""The kernel against the reference in float64: every shape, strided inputs, and nothing written beside the rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, TOLERANCES, poisoned
from support.nightly import examples

from specvla_kernels.rope_write_kv import rope_write_kv_reference, rope_write_kv_triton

pytest.importorskip("triton")


@settings(max_examples=examples(25), deadline=None)
@given(
    n_rows=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 3, 5]),
    group=st.sampled_from([1, 4, 8]),
    head_dim=st.sampled_from([2, 32, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_kernel_is_the_reference(
    n_rows: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    qkv = torch.randn(n_rows, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype).to(DEVICE)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)  # strided, as the model's
    angles = (torch.rand(n_rows, head_dim // 2, generator=generator) * 6).to(DEVICE)
    # The last row of the last slot, and others in any order.
    kv_rows = torch.cat((torch.tensor([13]), torch.randperm(13, generator=generator)[: n_rows - 1])).to(DEVICE)
    caches = [poisoned(2, 7, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    expected_caches = [poisoned(2, 7, kv_heads, head_dim, dtype=torch.float64) for _ in range(2)]

    out = rope_write_kv_triton(q, k, v, angles.cos(), angles.sin(), kv_rows, *caches)

    q, k, v, cos, sin = (x.double() for x in (q, k, v, angles.cos(), angles.sin()))
    expected = rope_write_kv_reference(q, k, v, cos, sin, kv_rows, *expected_caches)
    torch.testing.assert_close(out.double(), expected, **TOLERANCES[dtype])
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache.double(), expected_cache, **TOLERANCES[dtype], equal_nan=True)
