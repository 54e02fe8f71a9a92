# SPDX-License-Identifier: Apache-2.0
"""Times forwards and ticks on a CPU with the layers compiled and as they are, in turns.

python -m benchmarks.speed.compiled_layers

Forwards are of one tree in one slot; ticks are the engine's after an answer's first. The time of compiling is that of
an empty cache.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated

import torch
import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Out, finish, of_weights, result_head, take_turns
from benchmarks.results_page import RESULTS
from specvla_kernels.layout import MAX_TREE_NODES, Ancestry
from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.compiled_layers import CompiledLayers
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.target import Target

ROWS = (1, 2, 4, 8, 16, 32, MAX_TREE_NODES)
SLOT_ROWS, PREFIX = 200, 120
MODES = ("ar", "spec")
_ANSWERS = 40
_PERIOD_NS = 200_000_000  # between the images, in their stamps
_MAX_TEXT_TOKENS = 128  # as in config/common.yaml


def main(
    context: typer.Context,
    policy: Annotated[str, typer.Option(help="Bundled policy.")] = "nano",
    repeats: Annotated[int, typer.Option(help="Turns.", min=3)] = 200,
    out: Out = RESULTS / "compiled_layers_cpu.json",
) -> None:
    """Measures every number of rows and every mode."""
    directory = bundled_policy(policy)
    target = load_target(directory, device="cpu")
    decoder = target.decoder
    assert isinstance(decoder, PackedDecoder)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        decoder.compile_layers()
    compiled = decoder.compiled
    if compiled is None:
        raise UserError(f"the layers of {policy} cannot be compiled")
    images = list(islice(simulation_source(target, FRAMES_FIRST_SEED), _ANSWERS))
    found = {
        "most_rows": compiled.most_rows,
        "compile_s": compiled.compile_s,
        "forwards": [{"rows": rows, "seconds": forward_s(decoder, compiled, rows, repeats)} for rows in ROWS],
        "ticks": {mode: tick_s(target, mode, images, decoder, compiled) for mode in MODES},
    }
    finish(result_head(context, decoder.dtype) | of_weights(directory) | {"policy": policy} | found, out)


@torch.inference_mode()
def forward_s(decoder: PackedDecoder, compiled: CompiledLayers, rows: int, repeats: int) -> dict[str, float]:
    """Median seconds of a tree whose nodes, but the root, are all the root's children."""
    cache = new_cache(decoder, slots=3, slot_rows=SLOT_ROWS)
    for store in (cache.keys, cache.values):
        store.normal_(generator=torch.Generator().manual_seed(0))
    tree = Segment(0, PREFIX, torch.arange(rows) + 5, Ancestry.from_parents([-1] + [0] * (rows - 1)), wanted=rows)

    def run(layers: CompiledLayers | None) -> None:
        decoder.compiled = layers
        packed_forward(decoder, [tree], cache)

    ways = {"eager": lambda: run(None), "compiled": lambda: run(compiled)}
    return take_turns(ways, repeats, "cpu")


def tick_s(
    target: Target, mode: str, images: Sequence[Observation], decoder: PackedDecoder, compiled: CompiledLayers
) -> dict[str, float]:
    """Median seconds of an engine's ticks after an answer's first."""
    engine = Engine(target, EngineSettings(mode, max_text_tokens=_MAX_TEXT_TOKENS))
    engine.warm_up()
    times: dict[str, list[float]] = {"eager": [], "compiled": []}
    for turn in range(2 * _ANSWERS):
        name, decoder.compiled = ("eager", None) if turn % 2 else ("compiled", compiled)
        engine.submit(replace(images[turn // 2], stamp_ns=(turn + 1) * _PERIOD_NS))
        ticks: list[float] = []
        outcomes: Sequence[object] = ()
        while not outcomes:
            started = time.perf_counter()
            outcomes = engine.tick()
            ticks.append(time.perf_counter() - started)
        times[name] += ticks[1:] if turn > _ANSWERS // 2 else []
    return {name: statistics.median(each) for name, each in times.items()}


if __name__ == "__main__":
    typer.run(main)
