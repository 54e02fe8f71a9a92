# SPDX-License-Identifier: Apache-2.0
"""A device from a file: bandwidth, matrix rates and memory, and the stage times to emulate it with."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import load_json, shown

if TYPE_CHECKING:  # the engine imports torch, which a plan does without
    from specvla_ros.engine.tally import TickWork

_DEVICES = Path(__file__).parent / "devices"
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_KINDS = ("assumed", "measured")
_REQUIRED = ("name", "kind", "dtype", "bandwidth_gb_s", "dense_tflops", "memory_gb", "sources")
_MAX_FIGURE = 1e7  # a slip of units is larger
_MAX_STAGE_S = 60.0


class Arithmetic(str, Enum):
    """Number formats that a device multiplies matrices in."""

    DENSE = "dense"
    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True)
class StageTimes:
    """Stage times of OpenVLA-7B on a device that is not here. Results with them are emulation, and are named so."""

    name: str
    source: str  # where the numbers come from
    vision_s: float  # vision tower, projector and prompt embeddings of one image
    prefill_s: float  # the forward that carries a prompt
    decode_s: float  # a forward with few rows: it reads the weights, and no forward is faster
    node_s: float  # each tree node where computing is the bound, as beside a prompt
    head_s: float  # a forward of the draft head over tree nodes
    head_prompt_s: float  # what the draft head's forward over a prompt takes beyond that
    overhead_s: float  # between an image and its admission, and between the last token and the action

    def tick_s(self, work: "TickWork") -> float:
        computed_s = work.prompts * self.prefill_s + work.nodes * self.node_s
        forward_s = max(self.decode_s, computed_s) if work.prompts or work.nodes else 0.0
        return work.images * self.vision_s + forward_s + self._drafting_s(work) + work.finished * self.overhead_s

    def _drafting_s(self, work: "TickWork") -> float:
        drafting = work.drafting
        if drafting.model_forwards:
            raise UserError(f"{self.name} has no stage times of a draft model: leave draft.model out of an emulation")
        seconds = drafting.head_forwards * self.head_s + work.head_prompts * self.head_prompt_s
        if drafting.self_forwards:
            # Each reads all weights; the first also reads prompts, which is bound by computing where they are long.
            first_s = max(self.decode_s, drafting.self_rows * self.node_s)
            seconds += first_s + (drafting.self_forwards - 1) * self.decode_s
        return seconds


STAGES = tuple(stage.name for stage in fields(StageTimes) if stage.name.endswith("_s"))


@dataclass(frozen=True)
class Device:
    """A device, or what is left of it at some efficiency."""

    name: str
    kind: str  # `assumed` (data sheets) or `measured` (`specvla bench --measure`)
    dtype: str  # of weights, keys and values that are not quantised: bfloat16, float16 or float32
    bandwidth_gb_s: float  # bytes read from memory [1e9/s]
    dense_tflops: float  # matrix products in `dtype` [1e12 operations/s], structured sparsity not counted
    memory_gb: float  # for weights, keys and values [1e9 bytes]
    int8_tops: float | None = None  # the same of 8-bit integers; None: the device has no such units
    fp8_tflops: float | None = None  # the same of 8-bit floats; None: the device has no such units
    # Measured rate in `dtype` by rows of the left matrix; it replaces dense_tflops.
    tflops_by_rows: Mapping[int, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # origin of each figure, by the figure's name
    capability: str = ""  # CUDA compute capability, such as 8.7; empty: no CUDA GPU, or unknown
    stages: StageTimes | None = None  # stage times to emulate the device with; None: they are derived from the limits

    @property
    def value_bytes(self) -> int:
        return _BYTES[self.dtype]

    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    def operations_per_s(self, arithmetic: Arithmetic, rows: int) -> float:
        """Matrix rate [operations/s] with so many rows in the left matrix."""
        if arithmetic is Arithmetic.DENSE:
            return self._dense_tflops(rows) * 1e12
        rate = self.int8_tops if arithmetic is Arithmetic.INT8 else self.fp8_tflops
        if rate is None:
            others = "none, int4, fp8" if arithmetic is Arithmetic.INT8 else "none, int4, w8a8"
            raise UserError(f"{self.name} has no {arithmetic.value} rate: choose another of --weights {others}")
        return rate * 1e12

    def _dense_tflops(self, rows: int) -> float:
        # The rate at the next larger measured size: a size in between is padded to it, or is slower.
        fitting = [measured for measured in self.tflops_by_rows if measured >= rows]
        size = min(fitting) if fitting else max(self.tflops_by_rows, default=None)
        return self.dense_tflops if size is None else self.tflops_by_rows[size]

    def at(self, *, bandwidth: float, compute: float) -> "Device":
        """The same device when only a share of its bandwidth and of its matrix rate is reached."""
        return replace(
            self,
            bandwidth_gb_s=self.bandwidth_gb_s * bandwidth,
            dense_tflops=self.dense_tflops * compute,
            int8_tops=None if self.int8_tops is None else self.int8_tops * compute,
            fp8_tflops=None if self.fp8_tflops is None else self.fp8_tflops * compute,
            tflops_by_rows={rows: rate * compute for rows, rate in self.tflops_by_rows.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """What `read_device` reads."""
        figures = asdict(self)
        stages = figures.pop("stages")
        figures["tflops_by_rows"] = {str(rows): rate for rows, rate in self.tflops_by_rows.items()}
        if stages is not None:
            figures["stage_times"] = {stage: stages[stage] for stage in STAGES}
        return figures


@dataclass(frozen=True)
class Efficiency:
    """What is reached of a device."""

    bandwidth: float  # shares of 1
    compute: float  # shares of 1
    forward_s: float  # of every tick beside its reading and computing: launches, and the one readback


LIMIT = Efficiency(1.0, 1.0, 0.0)
_DERATED = Efficiency(0.8, 0.6, 0.0003)
_MEASURED = Efficiency(1.0, 1.0, 0.0003)  # a measured rate holds its losses


def derated(device: Device) -> Efficiency:
    """What to expect of a device."""
    return _MEASURED if device.kind == "measured" else _DERATED


def known_devices() -> list[str]:
    """Names of the package's own devices."""
    return sorted(path.stem for path in _DEVICES.glob("*.json"))


def read_device(device: str, option: str = "--device") -> Device:
    """One of the package's devices, or a JSON file such as `specvla bench --measure` writes."""
    known = known_devices()
    path = _DEVICES / f"{device}.json" if device in known else Path(device)
    try:
        return _parse(load_json(path), path)
    except FileNotFoundError:
        raise UserError(
            f"{option} {shown(device)} is none of {', '.join(known)}, and there is no such file; "
            "`specvla bench --measure --out FILE` writes one for the machine at hand"
        ) from None


def _parse(raw: Any, path: Path) -> Device:
    if not isinstance(raw, dict):
        raise UserError(
            f"{path} holds a JSON {type(raw).__name__}, but an object with {', '.join(_REQUIRED)} is needed"
        )
    missing = [name for name in _REQUIRED if name not in raw]
    if missing:
        raise UserError(f"{path} lacks the field '{missing[0]}'; it needs {', '.join(_REQUIRED)}")
    if raw["kind"] not in _KINDS:
        raise UserError(f"{path}: kind is '{raw['kind']}', but it must be one of: {', '.join(_KINDS)}")
    if raw["dtype"] not in _BYTES:
        raise UserError(f"{path}: dtype is '{raw['dtype']}', but it must be one of: {', '.join(_BYTES)}")
    by_rows, sources = raw.get("tflops_by_rows") or {}, raw["sources"]
    if not isinstance(by_rows, dict) or not all(str(rows).isdigit() and int(rows) > 0 for rows in by_rows):
        raise UserError(f"{path}: tflops_by_rows must be an object of rates by rows, such as {{'256': 40.0}}")
    if not isinstance(sources, dict):
        raise UserError(f"{path}: sources must be an object that says where each figure comes from")
    optional = {name: raw[name] for name in ("int8_tops", "fp8_tflops") if raw.get(name) is not None}
    return Device(
        name=str(raw["name"]),
        kind=raw["kind"],
        dtype=raw["dtype"],
        **{name: _figure(raw[name], name, path) for name in ("bandwidth_gb_s", "dense_tflops", "memory_gb")},
        **{name: _figure(value, name, path) for name, value in optional.items()},
        tflops_by_rows={int(rows): _figure(rate, f"tflops_by_rows[{rows}]", path) for rows, rate in by_rows.items()},
        sources={str(name): str(source) for name, source in sources.items()},
        capability=str(raw.get("capability", "")),
        stages=_stages(raw, path),
    )


def _stages(raw: Mapping[str, Any], path: Path) -> StageTimes | None:
    stages = raw.get("stage_times")
    if stages is None:
        return None
    if not isinstance(stages, dict) or set(stages) != set(STAGES) or "stage_times" not in raw["sources"]:
        raise UserError(f"{path}: stage_times needs the seconds {', '.join(STAGES)}, and their origin in sources")
    if not all(type(value) in (int, float) and 0 <= value < _MAX_STAGE_S for value in stages.values()):
        raise UserError(f"{path}: stage times must lie between 0 and {_MAX_STAGE_S:g} seconds, got {stages}")
    return StageTimes(str(raw["name"]), str(raw["sources"]["stage_times"]), **stages)


def _figure(value: Any, name: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{path}: {name} must be a number, got {value!r}")
    if not 0 < value <= _MAX_FIGURE:
        raise UserError(f"{path}: {name} must be above 0 and at most {_MAX_FIGURE:g}, got {value:g}; check its unit")
    return float(value)
