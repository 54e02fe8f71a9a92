# SPDX-License-Identifier: Apache-2.0
"""Reads a device from a file: bandwidth, matrix rates and memory, and the shares that software reaches."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import load_json, shown

_DEVICES = Path(__file__).parent / "devices"
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_KINDS = ("assumed", "measured")
_REQUIRED = ("name", "kind", "dtype", "bandwidth_gb_s", "dense_tflops", "memory_gb", "sources")
_MAX_FIGURE = 1e7  # larger values are unit errors
_MAX_LAYER_US = 1e5
_EFFICIENCY_FORM = '{"bandwidth": 0.83, "compute_by_rows": {"296": 0.5}, "layer_us": 130}'


class Arithmetic(str, Enum):
    """Number formats of a device's matrix products."""

    DENSE = "dense"
    INT8 = "int8"
    FP8 = "fp8"


class Software(str, Enum):
    """Kinds of software whose times a device's file expects."""

    EAGER = "eager"  # launches every kernel from the host, as ActionFlow does
    CAPTURED = "captured"  # replays CUDA graphs, as this package, gpt-fast and FlashRT do


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's figures that software reaches; each can be compared with published measurements."""

    bandwidth: float  # share of the bandwidth at which weights stream
    # Share of the matrix rate by rows of the left matrix; it grows because more rows fill tiles and units better.
    compute_by_rows: Mapping[int, float]  # linear in between, constant beyond the ends
    layer_s: float  # time of every transformer layer in every forward [s]: launches, norms, small kernels

    def compute(self, rows: int) -> float:
        """Share of the matrix rate at a number of rows."""
        known = sorted(self.compute_by_rows.items())
        return float(np.interp(rows, [size for size, _ in known], [share for _, share in known]))

    def as_json(self) -> dict[str, Any]:
        return {
            "bandwidth": self.bandwidth,
            "compute_by_rows": {str(rows): share for rows, share in self.compute_by_rows.items()},
            "layer_us": round(self.layer_s * 1e6, 6),
        }


LIMIT = Efficiency(1.0, {1: 1.0}, 0.0)
# Default for files of `specvla bench --measure`: their rates include losses; the layer time is assumed as the 5090's.
MEASURED = Efficiency(1.0, {1: 1.0}, 130e-6)
MEASURED_CAPTURED = replace(MEASURED, layer_s=35e-6)  # on a CUDA GPU; the layer time is assumed as the H100's


@dataclass(frozen=True)
class Device:
    """A device's figures, and the shares that software reaches."""

    name: str
    kind: str  # `assumed` (data sheets) or `measured` (`specvla bench --measure`)
    dtype: str  # dtype of unquantised weights, keys and values: bfloat16, float16 or float32
    bandwidth_gb_s: float  # memory read bandwidth [1e9 bytes/s]
    dense_tflops: float  # matrix products in `dtype` [1e12 operations/s], without structured sparsity
    memory_gb: float  # memory for weights, keys and values [1e9 bytes]
    int8_tops: float | None = None  # matrix products of 8-bit integers; None: the device has no such units
    fp8_tflops: float | None = None  # matrix products of 8-bit floats; None: the device has no such units
    # Measured rate in `dtype` by rows of the left matrix; it replaces dense_tflops.
    tflops_by_rows: Mapping[int, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # origin of each figure by name
    capability: str = ""  # CUDA compute capability, such as 8.7; empty: no CUDA GPU, or unknown
    efficiency: Efficiency = LIMIT  # used for expected and emulated times
    captured: Efficiency = LIMIT  # the same of software that replays captured graphs; nowhere less than `efficiency`

    def running(self, software: Software) -> "Device":
        """The device whose expected and emulated times are those of a kind of software."""
        return replace(self, efficiency=self.captured) if software is Software.CAPTURED else self

    @property
    def value_bytes(self) -> int:
        return _BYTES[self.dtype]

    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    def computes(self, arithmetic: Arithmetic) -> bool:
        """True if the device has a rate for a number format."""
        rates = {Arithmetic.INT8: self.int8_tops, Arithmetic.FP8: self.fp8_tflops}
        return rates.get(arithmetic, self.dense_tflops) is not None

    def operations_per_s(self, arithmetic: Arithmetic, rows: int) -> float:
        """Matrix rate [operations/s] with `rows` rows in the left matrix."""
        if arithmetic is Arithmetic.DENSE:
            # The rate of the next larger measured size: sizes in between are padded to it or slower.
            fitting = [measured for measured in self.tflops_by_rows if measured >= rows]
            size = min(fitting) if fitting else max(self.tflops_by_rows, default=None)
            return 1e12 * (self.dense_tflops if size is None else self.tflops_by_rows[size])
        rate = self.int8_tops if arithmetic is Arithmetic.INT8 else self.fp8_tflops
        if rate is None:
            others = "none, int4, fp8" if arithmetic is Arithmetic.INT8 else "none, int4, w8a8"
            raise UserError(f"{self.name} has no {arithmetic.value} rate: choose another weight format: {others}")
        return rate * 1e12

    def as_json(self) -> dict[str, Any]:
        """The content of the JSON file that `read_device` reads."""
        by_rows = {str(rows): rate for rows, rate in self.tflops_by_rows.items()}
        reached = {"efficiency": self.efficiency.as_json(), "captured": self.captured.as_json()}
        return asdict(self) | {"tflops_by_rows": by_rows} | reached


def known_devices() -> list[str]:
    """Names of the package's devices."""
    return sorted(path.stem for path in _DEVICES.glob("*.json"))


def read_device(device: str, option: str = "--device") -> Device:
    """Reads one of the package's devices, or a JSON file such as `specvla bench --measure` writes."""
    known = known_devices()
    path = _DEVICES / f"{device}.json" if device in known else Path(device)
    try:
        return _parse(load_json(path), path)
    except FileNotFoundError:
        raise UserError(
            f"{option} {shown(device)} is neither an existing file nor one of {', '.join(known)}; "
            "`specvla bench --measure --out FILE` writes a file for this machine"
        ) from None


def _parse(raw: Any, path: Path) -> Device:
    if not isinstance(raw, dict):
        raise UserError(
            f"{path} holds a JSON {type(raw).__name__}, but an object with {', '.join(_REQUIRED)} is expected"
        )
    missing = [name for name in _REQUIRED if name not in raw]
    if missing:
        raise UserError(f"{path} lacks the field '{missing[0]}'; it needs {', '.join(_REQUIRED)}")
    for field_name, known in (("kind", _KINDS), ("dtype", tuple(_BYTES))):
        if raw[field_name] not in known:
            raise UserError(f"{path}: {field_name} is '{raw[field_name]}', but it must be one of: {', '.join(known)}")
    by_rows, sources = raw.get("tflops_by_rows") or {}, raw["sources"]
    if not _is_by_rows(by_rows):
        raise UserError(f"{path}: tflops_by_rows must be an object of rates by rows, such as {{'256': 40.0}}")
    if not isinstance(sources, dict):
        raise UserError(f"{path}: sources must be an object with the origin of each figure")
    if "stage_times" in raw:
        raise UserError(
            f"{path}: stage_times are no longer read; they follow from the device's figures and its efficiency: "
            f"{_EFFICIENCY_FORM}"
        )
    efficiency = _efficiency(raw, path)
    figures = ["bandwidth_gb_s", "dense_tflops", "memory_gb"]
    figures += [name for name in ("int8_tops", "fp8_tflops") if raw.get(name) is not None]
    return Device(
        name=str(raw["name"]),
        kind=raw["kind"],
        dtype=raw["dtype"],
        **{name: _figure(raw[name], name, path) for name in figures},
        tflops_by_rows={int(rows): _figure(rate, f"tflops_by_rows[{rows}]", path) for rows, rate in by_rows.items()},
        sources={str(name): str(source) for name, source in sources.items()},
        capability=str(raw.get("capability", "")),
        efficiency=efficiency,
        captured=_captured(raw, efficiency, path),
    )


def _is_by_rows(value: Any) -> bool:
    return isinstance(value, dict) and all(str(rows).isdigit() and int(rows) > 0 for rows in value)


def _efficiency(raw: Mapping[str, Any], path: Path) -> Efficiency:
    found = raw.get("efficiency", MEASURED.as_json() if raw["kind"] == "measured" else None)
    if isinstance(found, str) and found in known_devices():
        return read_device(found).efficiency
    return _shares(found, "efficiency", path)


def _captured(raw: Mapping[str, Any], eager: Efficiency, path: Path) -> Efficiency:
    """Shares of captured software; those of `efficiency` without the field."""
    if "captured" not in raw:
        return eager
    found = raw["captured"]
    named = isinstance(found, str) and found in known_devices()
    captured = read_device(found).captured if named else _shares(found, "captured", path)
    rows = {*eager.compute_by_rows, *captured.compute_by_rows}
    slower = captured.bandwidth < eager.bandwidth or captured.layer_s > eager.layer_s
    if slower or any(captured.compute(size) < eager.compute(size) for size in rows):
        raise UserError(
            f"{path}: captured must not be slower than efficiency: raise its bandwidth and compute_by_rows, or lower "
            "its layer_us; without the field, both kinds of software get the same times"
        )
    return captured


def _shares(found: Any, name: str, path: Path) -> Efficiency:
    if not isinstance(found, dict) or set(found) != {"bandwidth", "compute_by_rows", "layer_us"}:
        raise UserError(f"{path}: {name} must be {_EFFICIENCY_FORM}, or the name of one of the package's devices")
    shares = found["compute_by_rows"]
    if not shares or not _is_by_rows(shares):
        raise UserError(f"{path}: {name}.compute_by_rows must be an object of shares by rows")
    by_rows = {int(rows): _share(share, f"{name}.compute_by_rows[{rows}]", path) for rows, share in shares.items()}
    if any(share * few > before * many for (few, before), (many, share) in pairwise(sorted(by_rows.items()))):
        raise UserError(
            f"{path}: {name}.compute_by_rows grows faster than the number of rows, so that more rows would take "
            "less time; measure the shares again, or lower those of more rows"
        )
    layer_us = found["layer_us"]
    if not isinstance(layer_us, (int, float)) or not 0 <= layer_us < _MAX_LAYER_US:
        raise UserError(f"{path}: {name}.layer_us must be between 0 and {_MAX_LAYER_US:g}, got {layer_us!r}")
    return Efficiency(_share(found["bandwidth"], f"{name}.bandwidth", path), by_rows, layer_us * 1e-6)


def _share(value: Any, name: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise UserError(f"{path}: {name} must be above 0 and at most 1, got {value!r}")
    return float(value)


def _figure(value: Any, name: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{path}: {name} must be a number, got {value!r}")
    if not 0 < value <= _MAX_FIGURE:
        raise UserError(f"{path}: {name} must be above 0 and at most {_MAX_FIGURE:g}, got {value:g}; check its unit")
    return float(value)
