"""A soak of the real engine: frames, new instructions and mode switches at random, over many ticks of every mode.

Every action must be the plain decoder's for its frame, every frame must end once, no slot may leak, and memory must not
grow. Where rounding decides a tie otherwise, the two best logits must be nearer than a stated bound.

    python benchmarks/soak.py                                  # this CPU
    python benchmarks/soak.py --device cuda --dtype float32    # a GPU

Exit code 1: a check failed; the JSON file says which.
"""

import tempfile
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from soak_policy import soak_policy
from soak_run import PICTURES, Phase, Soak
from speed_benchmark import Device, Out, result_head, write_result

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import DTYPES, Target
from specvla_ros.speculation.settings import DraftSettings, adjusted

# Logits of the soak's policy spread over about ±5; a rounding in its two layers moves them by less than this.
MARGINS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.4}
# By the slope over the second half of the ticks. 5000 ticks that each kept one frame of the soak's would be 45 MiB.
RESIDENT_GROWTH, GPU_GROWTH = 8 << 20, 4 << 20
_TREE = adjusted(DraftSettings(nodes=16, top_k=4, depth=4), temporal=True)


def phases() -> dict[str, list[EngineSettings]]:
    """Each mode by itself, then all of them in turn as chance has it."""
    every = [EngineSettings(mode, draft=_TREE) for mode in ("ar", "spec")]
    every += [
        EngineSettings(mode, prefill_chunks=chunks, in_order=in_order, draft=_TREE)
        for mode, chunks, in_order in product(("pipeline", "specpipe"), (1, 2, 3), (False, True))
    ]
    alone = {
        "ar": every[0],
        "spec": every[1],
        "pipeline": EngineSettings("pipeline"),
        "specpipe": EngineSettings("specpipe", prefill_chunks=2, draft=_TREE),
    }
    return {name: [settings] for name, settings in alone.items()} | {"switching": every}


def main(
    ticks: Annotated[int, typer.Option(help="Of each mode, and of switching between them.", min=10)] = 10000,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of everything that happens.")] = 0,
    out: Out = None,
) -> None:
    """Runs every phase and checks it."""
    with tempfile.TemporaryDirectory() as directory:
        policy = soak_policy(Path(directory), dtype=dtype, device=device)
        soak = Soak(policy, seed)
        found = {name: _as_json(soak.run(ticks, choices), dtype) for name, choices in phases().items()}
    passed = not any(phase["failures"] for phase in found.values())
    options = {"ticks": ticks, "device": device, "dtype": dtype, "seed": seed}
    result = result_head("soak", DTYPES[dtype], options) | {
        "ticks": ticks,
        "shapes": _shapes(policy),
        "different_answers": len(set(soak.plain.values())),
        "pictures": PICTURES,
        "bounds": {"margin": MARGINS[dtype], "resident_growth": RESIDENT_GROWTH, "gpu_growth": GPU_GROWTH},
        "passed": passed,
        "phases": found,
    }
    _print(result)
    write_result(result, out)
    raise typer.Exit(0 if passed else 1)


def _as_json(phase: Phase, dtype: str) -> dict[str, Any]:
    """A phase's figures; checks what only its end can tell."""
    ticks, resident, on_gpu = (np.array(column, dtype=np.float64) for column in zip(*phase.memory, strict=True))
    grown, grown_on_gpu = _growth(ticks, resident), _growth(ticks, on_gpu)
    widest = max(phase.margins, default=0.0)
    if not phase.actions:
        phase.fail("there was no action")
    if widest > MARGINS[dtype]:
        phase.fail(f"an action differs where the two best logits are {widest:g} apart")
    if grown > RESIDENT_GROWTH:
        phase.fail(f"resident memory grew by {grown / 2**20:.1f} MiB")
    if grown_on_gpu > GPU_GROWTH:
        phase.fail(f"memory on the GPU grew by {grown_on_gpu / 2**20:.1f} MiB")
    return {
        "cuda_graphs": phase.cuda_graphs,
        "submitted": phase.submitted,
        "actions": phase.actions,
        "forwards_per_action": phase.forwards / phase.actions if phase.actions else 0.0,
        "epochs": phase.epochs,
        "switches": phase.switches,
        "drops": {name: count for name, count in phase.drops.by_name().items() if count},
        "different_actions": len(phase.margins),
        "difference_rate": len(phase.margins) / phase.actions if phase.actions else 0.0,
        "widest_margin": widest,
        "resident_growth": grown,
        "gpu_growth": grown_on_gpu,
        "resident_bytes": int(resident[-1]),
        "failures": phase.failures,
    }


def _growth(ticks: np.ndarray, memory: np.ndarray) -> float:
    """Bytes over the second half, by a line through it."""
    ticks, memory = (each[len(each) // 2 :] for each in (ticks, memory))
    slope = np.polyfit(ticks - ticks[0], memory - memory[0], 1)[0]
    return float(slope * (ticks[-1] - ticks[0]))


def _shapes(policy: Target) -> dict[str, int]:
    llama = policy.decoder.config
    return {
        "hidden_size": llama.hidden_size,
        "layers": llama.num_hidden_layers,
        "heads": llama.num_attention_heads,
        "vocab_size": llama.vocab_size,
        "image_tokens": policy.image_tokens,
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['ticks']} ticks each, {result['hardware']}, {result['dtype']}")
    for head in ("", "frames", "actions", "forwards", "different", "grown, MiB", "failures"):
        table.add_column(head, justify="right" if head else "left")
    for name, phase in result["phases"].items():
        counts = [str(phase["submitted"]), str(phase["actions"]), f"{phase['forwards_per_action']:.2f}"]
        grown = f"{max(phase['resident_growth'], phase['gpu_growth']) / 2**20:.2f}"
        table.add_row(name, *counts, str(phase["different_actions"]), grown, "; ".join(phase["failures"]) or "none")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
