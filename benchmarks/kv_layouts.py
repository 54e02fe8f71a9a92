"""What not moving keys and values saves: a pipeline's tick with them gathered, shifted, or left where they are.

`naive` gathers the frames' keys and values into one contiguous buffer in front of every forward; `shift` is
ActionFlow's and copies each stage's to the next one's place; in `slots`, ours, nothing moves. The same packed forward,
random weights, a prompt of 290 rows; what finishes is asserted to be the same. Every pipeline is full when it is timed.

    python benchmarks/kv_layouts.py                                  # this CPU: tiny
    python benchmarks/kv_layouts.py --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from kv_pipelines import LAYOUTS, Slots, moved_bytes
from random_decoder import random_decoder
from rich.console import Console
from rich.table import Table
from shapes import PROMPT, SIZES, TOKENS
from speed_benchmark import Device, Dtype, Out, Sizes, dtype_on, result_head, write_result
from timing import take_turns

from specvla_ros.models.llama import LlamaDecoder


def main(
    sizes: Sizes = "tiny",
    device: Device = "cpu",
    dtype: Dtype = "",
    stages: Annotated[int, typer.Option(help="Frames in flight, and tokens of an action.", min=2)] = TOKENS,
    repeats: Annotated[int, typer.Option(help="Turns of each layout.", min=1)] = 15,
    out: Out = None,
) -> None:
    """Times the moving of keys and values, and the whole tick with it."""
    chosen = dtype_on(device, dtype)
    options = {"sizes": sizes, "device": device, "dtype": dtype, "stages": stages, "repeats": repeats}
    result = result_head("kv_layouts", chosen, options) | {"prompt_rows": PROMPT, "stages": stages, "sizes": {}}
    for name in sizes.split(","):
        with torch.inference_mode():
            decoder = random_decoder(SIZES[name].llama, dtype=chosen, device=device)
            result["sizes"][name] = _measure(decoder, device, stages, repeats)
    _print(result)
    write_result(result, out)


def _measure(decoder: LlamaDecoder, device: str, stages: int, repeats: int) -> dict[str, Any]:
    shape = (2 * stages, PROMPT, decoder.config.hidden_size)
    generator = torch.Generator(device).manual_seed(0)
    prompts = torch.randn(shape, generator=generator, device=device, dtype=decoder.dtype)
    pipelines = {name: layout(decoder, PROMPT, stages) for name, layout in LAYOUTS.items()}
    finished = {name: [each.tick(prompt) for prompt in prompts] for name, each in pipelines.items()}
    same = all(each == finished["slots"] for each in finished.values())
    if not same:
        raise SystemExit("the layouts do not give the same tokens")
    ticks = {name: lambda each=each: each.tick(prompts[0]) for name, each in pipelines.items()}
    tick_s = take_turns(ticks, repeats, device)
    moves: dict[str, Callable[[], None]] = {name: lambda each=each: _move(each) for name, each in pipelines.items()}
    move_s = take_turns(moves, repeats, device)
    rows = {
        name: {
            "moved_bytes": moved_bytes(name, each),
            "move_s": move_s[name],
            "tick_s": tick_s[name],
            "tick_over_slots": tick_s[name] / tick_s["slots"],
        }
        for name, each in pipelines.items()
    }
    return {
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "same_tokens": same,
        "actions_compared": sum(bool(each) for each in finished["slots"]),
        "layouts": rows,
    }


def _move(pipeline: Slots) -> None:
    """What one tick moves, without its forward; what then lies in the store is not read any more."""
    pipeline.before()
    pipeline.after()


def _print(result: dict[str, Any]) -> None:
    for name, size in result["sizes"].items():
        title = f"{name}, {result['hardware']}, {result['dtype']}, {result['stages']} stages"
        table = Table("", "MB moved", "move, ms", "tick, ms", "tick / slots'", title=title)
        for layout, row in size["layouts"].items():
            moved, seconds = f"{row['moved_bytes'] / 1e6:.1f}", [f"{row[k] * 1e3:.2f}" for k in ("move_s", "tick_s")]
            table.add_row(layout, moved, *seconds, f"{row['tick_over_slots']:.2f}")
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
