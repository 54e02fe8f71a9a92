# SPDX-License-Identifier: Apache-2.0
"""Tensors of several dtypes are copied in one launch, whatever their sizes and where they lie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE
from support.launches import Launches
from support.nightly import examples

from specvla_kernels.device import copy_together

DTYPES = [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 5), st.integers(0, 3)), max_size=6))
def test_every_place_gets_its_own_and_no_more(parts: list[tuple[torch.dtype, int, int]]) -> None:
    memory = [torch.zeros(n + 2 * before + 1, dtype=dtype, device=DEVICE) for dtype, n, before in parts]
    places = [each[before : before + n] for each, (_, n, before) in zip(memory, parts, strict=True)]
    values = [torch.randint(1, 2, (3, n), device=DEVICE).to(dtype)[1] for dtype, n, _ in parts]
    with Launches() as launches:
        copy_together(places, values)
    assert launches.counted.total() == bool(parts)
    for each, (_, n, before) in zip(memory, parts, strict=True):
        expected = torch.zeros_like(each)
        expected[before : before + n] = 1
        assert each.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_values_of_another_dtype_or_layout_are_converted(dtype: torch.dtype) -> None:
    place = torch.zeros(2, 3, device=DEVICE)
    value = torch.arange(6, dtype=dtype, device=DEVICE).view(3, 2).T
    copy_together([place], [value])
    assert place.equal(value.float())
