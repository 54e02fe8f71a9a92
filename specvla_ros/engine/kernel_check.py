# SPDX-License-Identifier: Apache-2.0
"""Compares the Triton kernels with their references on the GPU that runs them, before anything is captured.

A compiler may miscompile a kernel for one architecture alone. Captured forwards are compared with eager ones, which run
the same kernels, so only the references can show it.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from specvla_kernels.accept_tree import NO_NODE
from specvla_kernels.accept_within import Deferral, Within, accept_within
from specvla_kernels.commit_kv import commit_kv
from specvla_kernels.compare_drafts import Nodes, PackedTrees
from specvla_kernels.device import has_kernels, lacks_memory, references, to_device
from specvla_kernels.graph_capture import check_rows, randomize
from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.layout import Ancestry
from specvla_kernels.repetition_penalty import EarlierIds, penalised_choice
from specvla_kernels.uncertainty import uncertainty
from specvla_ros.engine.batch import Segment, pack
from specvla_ros.engine.cuda_graphs import ForwardSizes, check_segments
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.models.target import Decoder

_log = logging.getLogger(__name__)

_NODES = 16
_TOKENS = 40
_PENALTY = 4.0  # large enough to change choices
_PATH = (0, 2, 3, 7, NO_NODE)  # rows that are destination and source

# Sources of Triton's known faults, by architecture. test/kernels/test_miscompiles.py asserts that no kernel contains
# the first one's pattern.
#
# triton#10821: two products added to one accumulator in one iteration of a loop, in tiles of 64 rows or more, give
# wrong results, the same in every run; Triton 3.6 to 3.8.
# triton#8695: a matrix product added to an accumulator, in loops with several products, fails to compile ("operand #2
# does not dominate this use"); Triton 3.5 and later.
_TWO_PRODUCTS = "triton-lang/triton#10821, linkedin/Liger-Kernel#1435"
MISCOMPILES = {"sm_100": f"{_TWO_PRODUCTS}; triton-lang/triton#8695", "sm_103": _TWO_PRODUCTS}


@torch.inference_mode()
def kernel_fault(decoder: Decoder, cache: KVCache, sizes: ForwardSizes) -> str:
    """Compares the kernels with their references and describes the first difference; empty if there is none.

    Runs the first layer, the acceptance and the commit on random inputs, with trees of every size and with a prompt.
    Overwrites the KV cache. Where the references are in use, as on a CPU, nothing runs.
    """
    if not has_kernels(cache.keys):
        return ""
    randomize(cache.keys, cache.values)
    try:
        for segments in _segments(decoder, cache, sizes):
            with references():
                expected = _first_layer(decoder, segments, cache)
            found = _first_layer(decoder, segments, cache)
            check_rows(found, expected, what=f"the first layer on {len(expected)} rows")
        _check_acceptance(decoder.device)
        _check_commit(cache)
    except RuntimeError as error:
        if lacks_memory(error):  # says nothing of the kernels
            _log.warning("the kernels were not compared with their references: no memory is left for it")
            return ""
        return f"a kernel differs from its reference: {(str(error).splitlines() or [''])[0]}{_known(decoder.device)}"
    except Exception as error:  # Triton's own, of a kernel that does not compile or needs more than the GPU has
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return f"a kernel cannot run on this GPU: {reason}{_known(decoder.device)}"
    return ""


def _known(device: torch.device) -> str:
    """Names the faults of the compiler that are known for a GPU."""
    if device.type != "cuda":
        return ""
    known = MISCOMPILES.get("sm_{}{}".format(*torch.cuda.get_device_capability(device)))
    return f" (known for this GPU: {known})" if known else ""


def _segments(decoder: Decoder, cache: KVCache, sizes: ForwardSizes) -> Iterator[list[Segment]]:
    """Trees of every size, each of which may have tiles of its own, and the smallest prompt."""
    buckets = sizes.buckets()
    chosen = [bucket for bucket in buckets if bucket.longest <= sizes.nodes]
    prompts = [bucket for bucket in buckets if bucket.longest > sizes.nodes]
    for bucket in chosen + prompts[:1]:
        yield check_segments(bucket, sizes, decoder, cache)


def _first_layer(decoder: Decoder, segments: list[Segment], cache: KVCache) -> Tensor:
    batch = pack(segments, cache.slot_rows, decoder.embed_tokens)
    return decoder.hidden_states(batch.embeddings, batch.layout, cache.keys, cache.values, layers=1)


def _check_acceptance(device: torch.device) -> None:
    """Greedy choices and accepted paths must be equal, since they are integers; entropies up to rounding."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_NODES, _TOKENS, generator=generator).to(device)
    ancestry = Ancestry.from_parents([(node - 1) // 2 for node in range(_NODES)], device)
    tokens = torch.randint(4, (_NODES,), generator=generator).to(device)
    yes = torch.ones_like(tokens, dtype=torch.bool)
    log_probs = torch.randn(_NODES, generator=generator).to(device)
    nodes = Nodes(tokens, ancestry.parents, ancestry.depths, ancestry.ancestors, log_probs, yes, yes)
    trees = PackedTrees(nodes, (tokens + 1) % 4, torch.zeros_like(tokens[:1]))
    deferral = Deferral(0.5, 1, 1, terms=0)
    for within in (Within(None, 1, 2), Within(torch.ones_like(tokens[:3]), 1, 2), Within(None, 1, 3, deferral)):
        with references():
            expected = greedy_choice(logits), accept_within(trees, within, (0, 4, 4), 4, logits)
        found = greedy_choice(logits), accept_within(trees, within, (0, 4, 4), 4, logits)
        if not all(mine.equal(other) for mine, other in zip(found, expected, strict=True)):
            raise RuntimeError("choices or accepted paths are not equal")
    flat, of_nodes = EarlierIds.numbers([(5, 7, 9)], [_NODES])
    earlier = EarlierIds(to_device(flat, device), to_device(of_nodes, device).view(3, -1))
    penalised = []
    for how in (references(), nullcontext()):
        changed = logits.clone()
        with how:
            penalised.append(penalised_choice(changed, _PENALTY, tokens, ancestry.ancestors, earlier))
    if not penalised[0].equal(penalised[1]):
        raise RuntimeError("choices under a repetition penalty are not equal")
    for terms in (0, 3):
        with references():
            wanted = uncertainty(logits, terms)
        check_rows(uncertainty(logits, terms)[:, None], wanted[:, None], what="the target's uncertainty")


def _check_commit(cache: KVCache) -> None:
    """Moved keys and values must be equal, as nothing is computed; those of one layer, with the store's strides."""
    slots = torch.arange(cache.slots, device=cache.keys.device)
    paths = torch.tensor([_PATH], device=slots.device).repeat(cache.slots, 1)
    moved = []
    for how in (references(), nullcontext()):
        stores = cache.keys[:1].clone(), cache.values[:1].clone()
        with how:
            commit_kv(*stores, slots, slots % 2, paths)
        moved.append(stores)
    if not all(mine.equal(other) for mine, other in zip(*moved, strict=True)):
        raise RuntimeError("committed keys or values are not equal")
