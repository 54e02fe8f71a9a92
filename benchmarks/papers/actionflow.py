# SPDX-License-Identifier: Apache-2.0
"""ActionFlow's tables and figures on emulated devices: breakdown, KV layouts, pipeline depth, lengths.

python -m benchmarks.papers.actionflow

OpenVLA-7B's shapes, plain decoding, a frame always waiting. The engine's own scheduler runs with the stage times of the
devices' tables (specvla_ros/lab/planning): derived, nothing is measured here. The measurements of the paper (Dai et
al., arXiv 2512.20276) are in benchmarks/papers/published.json.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from benchmarks.harness import Out, finish, of_devices, result_head
from benchmarks.papers.emulation import full_pipeline, published
from benchmarks.results_page import RESULTS
from specvla_ros.lab.planning.cost import OPENVLA_7B, Forward, ModelCost, Part, forward_parts, model_cost
from specvla_ros.lab.planning.device import Device, read_device
from specvla_ros.lab.planning.limits import AcceptanceLengths, Mode, ModeLimit, mode_limit
from specvla_ros.models.settings import WeightFormat

DEVICES = ("orin", "rtx5090")
_MODEL = model_cost(OPENVLA_7B)
_NONE = AcceptanceLengths("nothing is drafted", (1.0,))


def main(
    context: typer.Context,
    tokens: Annotated[str, typer.Option(help="Tokens per answer, comma-separated.")] = "7,16,24,32",
    prompts: Annotated[
        str, typer.Option(help="Prompt rows, comma-separated, including 256 of the image; the paper gives none.")
    ] = "272,290,320,384",
    out: Out = RESULTS / "actionflow.json",
) -> None:
    """Derives all figures."""
    answers, rows = (tuple(map(int, text.split(","))) for text in (tokens, prompts))
    devices = {name: _device(name, answers, rows) for name in DEVICES}
    finish(result_head(context) | of_devices(DEVICES) | {"devices": devices}, out)


def _device(name: str, answers: Sequence[int], prompts: Sequence[int]) -> dict[str, Any]:
    device = read_device(name)
    depths = {tokens: _depths(tokens) for tokens in (min(answers), max(answers))}
    return {
        "name": device.name,
        "breakdown": _breakdown(device),
        "layouts": _layouts(name),
        "depth": [_depth(tokens, depth, device) for tokens in depths for depth in depths[tokens]],
        "lengths": [_lengths(tokens, rows, device) for tokens in answers for rows in prompts],
    }


def _breakdown(device: Device) -> dict[str, dict[str, float]]:
    """Breakdown in seconds of one answer of plain decoding (figure 2a) and of one tick of a full pipeline.

    `layers` is the fixed time of every layer, including the paper's bubbles; the other parts exclude it.
    """
    others, rows = _MODEL.action_tokens - 1, _MODEL.prompt_rows
    first = forward_parts(Forward(rows, image=True), _MODEL, WeightFormat.NONE, device.value_bytes)
    steps = [
        forward_parts(
            Forward(trees=1, nodes=1, prefix_rows=rows + token), _MODEL, WeightFormat.NONE, device.value_bytes
        )
        for token in range(others)
    ]
    packed = full_pipeline(rows, _MODEL.action_tokens)
    tick = forward_parts(packed, _MODEL, WeightFormat.NONE, device.value_bytes)
    decoded = [part for step in steps for part in step]
    return {
        "ar": {
            "vision": _seconds(first, device, vision=True),
            "prefill": _seconds(first, device, vision=False),
            "decode": _seconds(decoded, device, vision=False),
            "layers": _of_layers([*first, *decoded], device),
        },
        "pipeline": {
            "vision": _seconds(tick, device, vision=True),
            "packed forward": _seconds(tick, device, vision=False),
            "layers": _of_layers(tick, device),
        },
    }


def _seconds(parts: Sequence[Part], device: Device, *, vision: bool) -> float:
    chosen = [replace(part, layers=0) for part in parts if (part.name == "vision") is vision]
    return sum(part.seconds(device, device.efficiency) for part in chosen)


def _of_layers(parts: Sequence[Part], device: Device) -> float:
    return sum(part.layers for part in parts) * device.efficiency.layer_s


def _layouts(device: str) -> list[dict[str, Any]]:
    """Frames per second with keys and values gathered, shifted and left in place, with the published figures."""
    printed = {each.work: each for each in published() if each.device == device and "table 1" in each.source}
    shift = printed["pipeline"]
    rows = [
        {"layout": name, "published": printed[work].value, "emulated": 1.0 / printed[work].emulated_s()}
        for name, work in (("naive", "gathered"), ("shift", "pipeline"))
    ]
    slots = 1.0 / replace(shift, work="packed").emulated_s()
    return [*rows, {"layout": "slots", "published": None, "emulated": slots}]


def _lengths(tokens: int, rows: int, device: Device) -> dict[str, Any]:
    plain, full = (_limit(mode, tokens, rows, device) for mode in (Mode("ar", "ar"), Mode("pipeline", "pipeline")))
    return {
        "tokens": tokens,
        "prompt_rows": rows,
        "ar_hz": plain.derated_rate_hz,
        "pipeline_hz": full.derated_rate_hz,
        "gain": full.derated_rate_hz / plain.derated_rate_hz,
    }


def _depths(tokens: int) -> list[int]:
    """Numbers of frames in flight: 1 is plain decoding, the number of tokens is ActionFlow."""
    return [*(depth for depth in (1, 2, 3, 4, 8, 16) if depth < tokens), tokens]


def _depth(tokens: int, depth: int, device: Device) -> dict[str, Any]:
    found = _limit(Mode("pipeline", "pipeline", max_in_flight=depth), tokens, _MODEL.prompt_rows, device)
    return {
        "tokens": tokens,
        "max_in_flight": depth,
        "actions_per_s": found.derated_rate_hz,
        "latency_s": found.derated_latency_s,
        "oldest_image_s": found.oldest_image_s,
    }


def _limit(mode: Mode, tokens: int, rows: int, device: Device) -> ModeLimit:
    model: ModelCost = replace(_MODEL, prompt_rows=rows, action_tokens=tokens)
    return mode_limit(mode, model, device, WeightFormat.NONE, _NONE)


if __name__ == "__main__":
    typer.run(main)
