"""Acceptance and commit are compiled before the first tick, for whatever tree may come."""

import pytest
import torch
from support.static_forwards import recorded

from specvla_kernels.accept_tree import LEAST_NODES, LEAST_PLACES, accept_tree_reference
from specvla_kernels.commit_kv import commit_kv_reference
from specvla_kernels.device import blocks, power_of_two
from specvla_ros.engine import verifier as verify_on_device
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.verifier import VerificationKernels
from specvla_ros.speculation.accept import ActionIds


@pytest.mark.parametrize(("nodes", "levels"), [(1, 7), (16, 7), (50, 7), (50, 14), (48, 200), (64, 63)])
def test_every_size_that_a_tree_may_have_is_compiled_and_nothing_moves(
    nodes: int, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: set[tuple[int, int]] = set()
    moved: set[int] = set()

    def accept(trees, tolerance, levels):  # type: ignore[no-untyped-def]
        accepted.add((trees.tokens.shape[1], levels + 1))
        return accept_tree_reference(trees, tolerance, levels)

    def commit(keys, values, slots, first_rows, path):  # type: ignore[no-untyped-def]
        moved.add(path.shape[1])
        commit_kv_reference(keys, values, slots, first_rows, path)

    monkeypatch.setattr(verify_on_device, "accept_tree", accept)
    monkeypatch.setattr(verify_on_device, "commit_kv_batch", commit)
    cache = KVCache(
        layers=2, slots=2, slot_rows=80, kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu")
    )
    for store in (cache.keys, cache.values):
        store.normal_()
    before = cache.keys.clone(), cache.values.clone()

    assert VerificationKernels(ActionIds(10, 26, 15), cache, nodes, levels).capture(recorded) == 0

    assert cache.keys.equal(before[0]) and cache.values.equal(before[1])
    places = {max(LEAST_PLACES, power_of_two(each + 1)) for each in range(levels + 1)}
    assert accepted == {(max(LEAST_NODES, power_of_two(n)), each) for n in range(1, nodes + 1) for each in places}
    assert moved == places


def test_blocks_reach_from_the_least_to_what_holds_the_most() -> None:
    assert blocks(16, 1) == blocks(16, 16) == [16]
    assert blocks(16, 17) == [16, 32]
    assert blocks(8, 64) == [8, 16, 32, 64]
