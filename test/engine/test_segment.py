# SPDX-License-Identifier: Apache-2.0
"""What cannot be packed is refused."""

import pytest
import torch

from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, pack
from specvla_ros.engine.kv_cache import KVCache


def tokens(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(inputs=tokens(0)), "at least one node"),
        (dict(inputs=tokens(2), wanted=3), "wanted must be 0 to 2"),
        (dict(inputs=tokens(2), ancestry=Ancestry.from_parents((-1,))), "2 nodes have an ancestry of 1"),
    ],
)
def test_a_segment_that_fits_nothing_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment(slot=0, prefix_len=0, **arguments)


@pytest.mark.parametrize(
    ("parents", "message"), [((), "1 to 64 nodes"), ((-1, 1), "before itself"), ((-1, *range(64)), "1 to 64 nodes")]
)
def test_an_ancestry_that_is_none_is_refused(parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ancestry.from_parents(parents)


def embed(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids), 4)


def test_two_segments_of_a_slot_must_follow_each_other() -> None:
    root = Segment(0, 5, tokens(1), ancestry=Ancestry.from_parents((-1,)))
    for first in (Segment(0, 0, tokens(1)), Segment(0, 4, tokens(1), ancestry=Ancestry.from_parents((-1,)))):
        with pytest.raises(ValueError, match="are not contiguous"):
            pack([first, root], 16, embed)
    assert pack([Segment(0, 4, tokens(1)), root], 16, embed).layout.positions.tolist() == [4, 5]


def test_a_segment_beyond_its_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit a slot of 16 rows"):
        pack([Segment(0, 10, tokens(7))], 16, embed)


def test_rows_positions_and_ancestors_of_a_tree() -> None:
    tree = Segment(2, 10, tokens(4), ancestry=Ancestry.from_parents((-1, 0, 0, 2)), wanted=4)
    chain = Segment(0, 3, tokens(2))

    batch = pack([chain, tree], 32, embed)

    assert batch.layout.positions.tolist() == [3, 4, 10, 11, 11, 12]
    assert batch.layout.kv_rows.tolist() == [3, 4, 74, 75, 76, 77]
    assert batch.layout.ancestors.tolist() == [0, 0, 0b1, 0b11, 0b101, 0b1101]
    assert batch.wanted_rows.tolist() == [1, 2, 3, 4, 5]


def test_the_64th_node_keeps_its_own_bit() -> None:
    chain_tree = Segment(0, 0, tokens(64), ancestry=Ancestry.from_parents((-1, *range(63))))
    layout = pack([chain_tree], 64, embed).layout
    assert layout.masks[0] is not None
    assert layout.masks[0].equal(torch.ones(64, 64, dtype=torch.bool).tril())


def test_a_slot_is_given_back_once() -> None:
    cache = KVCache((1, 2, 4, 1, 2), dtype=torch.float32, device=torch.device("cpu"))
    slots = [cache.take(), cache.take()]
    assert sorted(slots) == [0, 1]  # type: ignore[type-var]
    assert cache.take() is None
    cache.give_back(0)
    with pytest.raises(ValueError, match="not held"):
        cache.give_back(0)
    assert cache.take() == 0
