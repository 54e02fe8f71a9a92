# SPDX-License-Identifier: Apache-2.0
"""Cost of each part of a speculative tick: forward, acceptance, commit and drafting.

Acceptance includes a commit that moves nothing, as random weights accept nothing.

The parts follow a prompt of 290 rows, like OpenVLA's, with random weights: time does not depend on their values. An
image is resized and normalised once per frame, in parallel with the ticks.

An overwritten file is kept in the new one as `before`, once: run an earlier revision and this one in turns.

    python -m benchmarks.speed.tick_cost                                  # this CPU: tiny and 1B
    python -m benchmarks.speed.tick_cost --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness import Device, Dtype, Out, Sizes, dtype_on, finish, kept_before, result_head, take_turns
from benchmarks.random_policy import PICTURE, PROMPT, SIZES, random_decoder, random_draft_head, tree_parents
from specvla_kernels.accept_tree import NO_NODE
from specvla_kernels.commit_kv import commit_kv
from specvla_kernels.device import to_device
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.verifier import Verifier, VerifyInput
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.openvla.image_processor import dinosiglip_processor
from specvla_ros.models.target import ForwardResult
from specvla_ros.speculation.accept import AcceptanceRule
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.composite import Composite
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.lvspec import LVSpec
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tree import Tree

NODES = (1, 8, 16, 32, 50, 64)
TREE = 16
DEPTH = 7
COMMITTED = 3  # tokens per forward, about as many as a relaxed tree commits
IMAGE_TOKENS = 256
_BEAM = 8


def main(
    context: typer.Context,
    sizes: Sizes = "tiny,1b",
    device: Device = "cpu",
    dtype: Dtype = "",
    repeats: Annotated[int, typer.Option(help="Turns of each part.", min=3)] = 15,
    out: Out = None,
) -> None:
    """Times the parts of a tick, taking turns."""
    chosen = dtype_on(device, dtype)
    result = result_head(context, chosen) | {"tree_nodes": TREE, "sizes": {}}
    for name in sizes.split(","):
        with torch.inference_mode():
            decoder = random_decoder(SIZES[name].llama, dtype=chosen, device=device)
            result["sizes"][name] = _measure(decoder, device, repeats)
    finish(result | {"before": kept_before(out, "sizes")}, out)


def _measure(decoder: PackedDecoder, device: str, repeats: int) -> dict[str, Any]:
    cache = new_cache(decoder, slots=1, slot_rows=PROMPT + 80)
    prompt = torch.randn(PROMPT, decoder.config.hidden_size, device=device, dtype=decoder.dtype)
    packed_forward(decoder, [Segment(0, 0, prompt)], cache)
    trees = {nodes: _tree(nodes, device) for nodes in NODES}

    def forward(tree: Tree) -> Any:
        return packed_forward(decoder, [Segment(0, PROMPT, tree.tokens, tree.ancestry, wanted=len(tree))], cache)

    verified = forward(trees[TREE])
    vocab = decoder.config.vocab_size
    actions = ActionIds(vocab - 320, vocab - 64, bins=255)
    visual = torch.randn(IMAGE_TOKENS, decoder.config.hidden_size, device=device, dtype=decoder.dtype)
    parts: dict[str, Callable[[], Any]] = {
        f"forward, {nodes} nodes": partial(forward, tree) for nodes, tree in trees.items()
    }
    for name, rule in _rules(vocab, device).items():
        part = VerifyInput(trees[TREE], 1, 0, PROMPT, rule, [visual])
        verifier = Verifier(rule, actions, cache, max_nodes=TREE, max_depth=DEPTH)
        parts[f"accept and commit, {name}"] = partial(_verify, verifier, verified, part)
    path = [*range(0, 2 * COMMITTED, 2), *[NO_NODE] * (DEPTH + 1 - COMMITTED)]
    slots, rows, nodes = (to_device(numbers, cache.keys.device) for numbers in ([0], [PROMPT], [path]))
    parts["commit"] = lambda: commit_kv(cache.keys, cache.values, slots, rows, nodes)
    for size in (TREE, 50):
        parts[f"draft, {size} nodes"] = _drafting(decoder, size, prompt, actions)
        parts[f"draft, {size} nodes, any ids"] = _drafting(decoder, size, prompt)
    parts["image of 640 x 480, once per frame"] = partial(dinosiglip_processor([224, 224]), PICTURE)
    seconds = take_turns(parts, repeats, device)
    tick = [f"forward, {TREE} nodes", "accept and commit, bin_distance", f"draft, {TREE} nodes"]
    total = sum(seconds[part] for part in tick)
    return {
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "seconds": seconds,
        "tick_s": total,
        "share_of_tick": {part: seconds[part] / total for part in tick},
    }


def _verify(verifier: Verifier, verified: ForwardResult, tree: VerifyInput) -> object:
    return verifier.verify(verified, [verified.hidden], [tree], verifier.prepare([tree]))


def _rules(vocab: int, device: str) -> dict[str, AcceptanceRule]:
    near, numbers = BinDistance((5,) * 6), torch.zeros(vocab, dtype=torch.bool, device=device)
    fly = Fly()
    return {
        "strict": Strict(),
        "bin_distance": near,
        "fly": fly,
        "lvspec": LVSpec(),
        "composite": Composite(near, fly, numbers),
    }


def _tree(nodes: int, device: str) -> Tree:
    tokens = torch.randint(0, 32000, (nodes,), device=device)
    ancestry = Ancestry.from_parents(tree_parents(nodes), device)
    there = torch.ones(nodes, dtype=torch.bool, device=device)
    return Tree(tokens, ancestry, torch.zeros(nodes, device=device), there, there, depth=DEPTH)


def _drafting(
    decoder: PackedDecoder, nodes: int, prompt: torch.Tensor, actions: ActionIds | None = None
) -> Callable[[], Any]:
    """A draft among the actions' ids or, by default, the whole vocabulary."""
    ids = None if actions is None else range(actions.first, actions.stop)
    settings = DraftSettings(nodes=nodes, top_k=_BEAM)
    drafter = EagleDrafter(random_draft_head(decoder), decoder, settings, slots=1, slot_rows=PROMPT + 16, ids=ids)
    root = torch.tensor(5, device=prompt.device)

    def told(rows: torch.Tensor, prefix_len: int) -> DraftInput:
        return DraftInput(0, prefix_len, NewRows(rows, rows), root, max_depth=5, position=1)

    drafter.draft([told(prompt, PROMPT)])
    return lambda: drafter.draft([told(prompt[:COMMITTED], PROMPT + COMMITTED)])


if __name__ == "__main__":
    typer.run(main)
