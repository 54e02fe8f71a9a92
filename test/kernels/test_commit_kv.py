"""Compaction of an accepted path, in every layer, and of nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specvla_kernels.commit_kv import commit_kv


@st.composite
def paths(draw: st.DrawFn) -> list[int]:
    """Ascending nodes, the root first."""
    return [0, *sorted(draw(st.sets(st.integers(1, 12), max_size=6)))]


@given(paths(), st.integers(0, 5), st.integers(0, 2))
def test_the_path_lies_behind_the_prefix_and_the_rest_is_as_it_was(nodes: list[int], first_row: int, slot: int) -> None:
    keys, values = torch.randn(2, 4, 3, 20, 2, 3)
    before_keys, before_values = keys.clone(), values.clone()

    commit_kv(keys, values, slot, first_row, nodes)

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
    commit_kv(keys, values, 0, 0, [0, 2, 3, 5])
    assert keys.flatten().tolist() == [0, 2, 3, 5, 4, 5]
