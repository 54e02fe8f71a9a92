# SPDX-License-Identifier: Apache-2.0
"""Compaction of an accepted path, in every layer, and of nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES
from support.nightly import examples

from specvla_kernels.commit_kv import commit_kv, commit_kv_reference, commit_kv_triton
from specvla_kernels.device import HAS_TRITON


@st.composite
def paths(draw: st.DrawFn) -> list[int]:
    """Ascending nodes, the root first."""
    return [0, *sorted(draw(st.sets(st.integers(1, 12), max_size=6)))]


def move(keys: torch.Tensor, values: torch.Tensor, slot: int, first_row: int, nodes: list[int]) -> None:
    """One request's path."""
    commit_kv(keys, values, torch.tensor([slot]), torch.tensor([first_row]), torch.tensor([nodes]))


@given(paths(), st.integers(0, 5), st.integers(0, 2))
def test_the_path_lies_after_the_prefix_and_the_rest_is_as_it_was(nodes: list[int], first_row: int, slot: int) -> None:
    keys, values = torch.randn(2, 4, 3, 20, 2, 3)
    before_keys, before_values = keys.clone(), values.clone()

    move(keys, values, slot, first_row, nodes)

    for after, before in ((keys, before_keys), (values, before_values)):
        for i, node in enumerate(nodes):
            assert after[:, slot, first_row + i].equal(before[:, slot, first_row + node])
        assert after[:, slot, :first_row].equal(before[:, slot, :first_row])
        assert after[:, slot, first_row + len(nodes) :].equal(before[:, slot, first_row + len(nodes) :])
        others = [each for each in range(3) if each != slot]
        assert after[:, others].equal(before[:, others])


def test_a_row_that_is_a_destination_and_a_source_is_read_first() -> None:
    keys = torch.arange(6.0).reshape(1, 1, 6, 1, 1)
    values = keys.clone()
    move(keys, values, 0, 0, [0, 2, 3, 5])
    assert keys.flatten().tolist() == [0, 2, 3, 5, 4, 5]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.one_of(st.just([]), paths(), st.just([*range(7)])), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 3), (1, 80), (3, 128)]),
    st.sampled_from([torch.float64, *DTYPES]),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_batch_moves_as_its_requests_do_alone(
    requests: list[list[int]], heads: tuple[int, int], dtype: torch.dtype, padding: int, kernel: bool
) -> None:
    slots = torch.randperm(5)[: len(requests)]
    first_rows = torch.arange(len(requests)) * 2  # the last slot's last row is the last path's last: 6 + 12 + 1 = 19
    expected = torch.randn(2, 2, 5, 19, *heads).to(DEVICE, dtype)
    expected[:, :, slots[0], 14:] = float("nan")
    keys, values = expected.clone()
    places = max(1, *(len(nodes) for nodes in requests)) + padding
    nodes = torch.tensor([[*each, *[-1] * (places - len(each))] for each in requests], device=DEVICE)
    run = commit_kv_triton if kernel and HAS_TRITON else commit_kv_reference

    places_of = torch.stack((slots, first_rows), dim=1).to(DEVICE)  # a column of a table is strided

    run(keys, values, places_of[:, 0], places_of[:, 1], nodes)

    for slot, first_row, each in zip(slots.tolist(), first_rows.tolist(), requests, strict=True):
        if each:
            sources = [first_row + node for node in each]
            expected[:, :, slot, first_row : first_row + len(each)] = expected[:, :, slot, sources]
    torch.testing.assert_close(keys, expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, expected[1], rtol=0, atol=0, equal_nan=True)


def test_a_batch_needs_contiguous_rows() -> None:
    keys = torch.zeros(2, 1, 8, 4, 2)
    with pytest.raises(ValueError, match="contiguous rows"):
        commit_kv_triton(keys[..., ::2], keys[..., ::2], torch.tensor([0]), torch.tensor([0]), torch.tensor([[0]]))
