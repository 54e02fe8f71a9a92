# SPDX-License-Identifier: Apache-2.0
"""Compares published measurements with the emulated devices' tables for the same work.

python -m benchmarks.papers.emulation

Nothing runs here: each published figure (benchmarks/papers/published.json) is compared with the time from the device's
table (specvla_ros/lab/planning/devices), and the time error is given.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from benchmarks.decoder_shapes import DECODERS
from benchmarks.harness import Out, finish, result_head
from benchmarks.results_page import RESULTS
from specvla_ros.lab.planning.cost import (
    OPENVLA_7B,
    Forward,
    ModelCost,
    Part,
    forward_parts,
    model_cost,
    roofline_seconds,
    vision_part,
)
from specvla_ros.lab.planning.device import Device, Software, known_devices, read_device
from specvla_ros.models.config import VisionTowerConfig
from specvla_ros.models.settings import WeightFormat

_TABLE = Path(__file__).with_name("published.json")
_FLOW_STEPS, _FLOW_ROWS = 10, 64  # of pi0 as timed by realtime-vla: a chunk of 63, and the state


def main(context: typer.Context, out: Out = RESULTS / "emulation.json") -> None:
    """Emulates every published figure."""
    figures = [figure.as_json() for figure in published()]
    devices = {name: read_device(name) for name in known_devices()}
    reached = {
        name: {
            "name": device.name,
            "efficiency": device.efficiency.as_json(),
            "captured": device.captured.as_json(),
            "sources": {
                key: text for key, text in device.sources.items() if key.startswith(("efficiency", "captured"))
            },
        }
        for name, device in devices.items()
    }
    finish(result_head(context) | {"devices": reached, "figures": figures}, out)


@dataclass(frozen=True)
class Figure:
    """A published measurement and the work that it covers."""

    system: str  # the software that ran
    software: str  # its kind: eager or captured
    device: str  # name in the package's device tables
    model: str
    weights: str  # one of this package's weight formats, which also determines the activations
    work: str  # one of _WORK: answer, pipeline, gathered, packed, token, prompt or flow
    value: float
    unit: str  # ms, frames/s or tokens/s
    source: str
    use: str  # fitted: used to set a device's efficiency; predicted: not used, and met; compared: not claimed
    rows: int  # of the prompt, or before the token
    tokens: int = 1  # of an answer
    beside_ms: float = 0.0  # published time of parts that are not emulated
    band_percent: float | None = None  # maximum time error claimed of a table's eager shares; None: no claim
    captured_band_percent: float | None = None  # the same of its captured shares

    @property
    def published_s(self) -> float:
        """The published seconds of one answer, tick, token or prompt."""
        return self.value / 1e3 if self.unit == "ms" else 1.0 / self.value

    def emulated_s(self, software: Software = Software.EAGER) -> float:
        """The emulated seconds of the same work with a kind of software."""
        return _WORK[self.work](self, read_device(self.device).running(software)) + self.beside_ms / 1e3

    def as_json(self) -> dict[str, Any]:
        """Returns the figure, its emulations in the same unit, and the time errors [%]; positive: too slow."""
        eager_s, captured_s = self.emulated_s(), self.emulated_s(Software.CAPTURED)
        return asdict(self) | {
            "emulated": eager_s * 1e3 if self.unit == "ms" else 1.0 / eager_s,
            "error_percent": (eager_s / self.published_s - 1.0) * 100,
            "emulated_captured": captured_s * 1e3 if self.unit == "ms" else 1.0 / captured_s,
            "captured_error_percent": (captured_s / self.published_s - 1.0) * 100,
        }


def full_pipeline(prompt_rows: int, tokens: int) -> Forward:
    """Returns ActionFlow's tick: the newest frame's prompt and a token of each of the `tokens` - 1 older frames."""
    others = tokens - 1
    prefix_rows = others * prompt_rows + sum(range(others))
    return Forward(prompt_rows, image=True, trees=others, nodes=others, prefix_rows=prefix_rows)


def published() -> tuple[Figure, ...]:
    """Returns all published figures."""
    return tuple(Figure(**row) for row in json.loads(_TABLE.read_text(encoding="utf-8")))


# Gemma 2B and its action expert, 300M, with 2048 rows of the output head (openpi, models/gemma.py).
_GEMMA_2B = replace(DECODERS["pi0-fast"], vocab_size=2048)
_GEMMA_300M = replace(_GEMMA_2B, hidden_size=1024, intermediate_size=4096)
_LLAMA_8B = replace(OPENVLA_7B.llama, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256)
_SIGLIP = VisionTowerConfig(1152, 28, 16, 4304, 14, False, 0, layer_scale=False, image_size=224)  # all but the 28th
_GEMMA = model_cost(replace(OPENVLA_7B, towers=(_SIGLIP,), llama=_GEMMA_2B))
_EXPERT = replace(model_cost(replace(OPENVLA_7B, llama=_GEMMA_300M)), head_values=0)
_MODELS: dict[str, ModelCost] = {
    "openvla-7b": model_cost(OPENVLA_7B),
    "llama-2-7b": model_cost(replace(OPENVLA_7B, llama=replace(OPENVLA_7B.llama, vocab_size=32000))),
    "llama-3.1-8b": model_cost(replace(OPENVLA_7B, llama=_LLAMA_8B)),
    "chameleon-7b": model_cost(replace(OPENVLA_7B, llama=replace(OPENVLA_7B.llama, vocab_size=65536))),
    "qwen3-vl-2b": model_cost(replace(OPENVLA_7B, llama=DECODERS["qwen3-vl-2b"])),
    "pi0-fast": _GEMMA,
    "pi0": _GEMMA,
}


def _forward_s(figure: Figure, device: Device, forward: Forward) -> float:
    parts = forward_parts(forward, _MODELS[figure.model], WeightFormat(figure.weights), device.value_bytes)
    return roofline_seconds(parts, device, device.efficiency)


def _answer_s(figure: Figure, device: Device) -> float:
    """Image and prompt, then a forward per further token."""
    return _forward_s(figure, device, Forward(figure.rows, image=True)) + sum(
        _forward_s(figure, device, Forward(trees=1, nodes=1, prefix_rows=figure.rows + token))
        for token in range(figure.tokens - 1)
    )


def _pipeline_s(figure: Figure, device: Device) -> float:
    """A tick with as many frames in flight as an answer has tokens: one prompt, and a token of each other frame.

    ActionFlow then copies the keys and values of the other frames in memory (its section 3.3). Our engine does not, but
    the copy is counted here because the published measurement includes it.
    """
    return _full_tick_s(figure, device) + _copy_s(figure, device, _prefix_rows(figure))


def _gathered_s(figure: Figure, device: Device) -> float:
    """The same tick with the frames' keys and values gathered before the forward, and new rows copied back after it.

    "Naive Pipe" of ActionFlow's table 1; its CPU coordination and waits are unknown and not counted.
    """
    written = figure.rows + figure.tokens - 1
    return _full_tick_s(figure, device) + _copy_s(figure, device, _prefix_rows(figure) + written)


def _full_tick_s(figure: Figure, device: Device) -> float:
    """The same tick without copies, as in our engine; there is no published figure."""
    return _forward_s(figure, device, full_pipeline(figure.rows, figure.tokens))


def _prefix_rows(figure: Figure) -> int:
    """Committed rows of all frames but the newest."""
    return full_pipeline(figure.rows, figure.tokens).prefix_rows


def _copy_s(figure: Figure, device: Device, rows: int) -> float:
    """Seconds of reading and writing the keys and values of `rows` rows once."""
    moved = 2.0 * rows * _MODELS[figure.model].kv_values * device.value_bytes
    return Part("copy", moved, 0.0, 1).seconds(device, device.efficiency)


def _token_s(figure: Figure, device: Device) -> float:
    return _forward_s(figure, device, Forward(trees=1, nodes=1, prefix_rows=figure.rows))


def _prompt_s(figure: Figure, device: Device) -> float:
    return _forward_s(figure, device, Forward(figure.rows))


def _flow_s(figure: Figure, device: Device) -> float:
    """pi0: the images, their rows through the language model, then the action expert once per flow step."""
    images = figure.rows / _SIGLIP.patches
    image_s = vision_part(_GEMMA, device.value_bytes).seconds(device, device.efficiency)
    prompt_s = _forward_s(figure, device, Forward(figure.rows, prompt_ends=False))
    step = Forward(trees=1, nodes=_FLOW_ROWS, prefix_rows=figure.rows)
    parts = forward_parts(step, _EXPERT, WeightFormat.NONE, device.value_bytes)
    return images * image_s + prompt_s + _FLOW_STEPS * roofline_seconds(parts, device, device.efficiency)


_WORK: dict[str, Callable[[Figure, Device], float]] = {
    "answer": _answer_s,
    "pipeline": _pipeline_s,
    "gathered": _gathered_s,
    "packed": _full_tick_s,
    "token": _token_s,
    "prompt": _prompt_s,
    "flow": _flow_s,
}


if __name__ == "__main__":
    typer.run(main)
