"""A device's limits: bandwidth, matrix rates and memory, from a file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError

_DEVICES = Path(__file__).parent / "devices"
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_KINDS = ("assumed", "measured")
_NEEDED = ("name", "kind", "dtype", "bandwidth_gb_s", "dense_tflops", "memory_gb", "sources")
_MOST = 1e7  # of any figure: a slip of units is larger


class Arithmetic(str, Enum):
    """Number formats that a device multiplies matrices in."""

    DENSE = "dense"
    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True)
class DeviceLimits:
    """A device, or what is left of it at some efficiency.

    Args:
        name: for the tables.
        kind: `assumed` (data sheets) or `measured` (`specvla bench --measure`).
        dtype: of weights, keys and values that are not quantised: bfloat16, float16 or float32.
        bandwidth_gb_s: bytes read from memory [1e9/s].
        dense_tflops: matrix products in `dtype` [1e12 operations/s], structured sparsity not counted.
        int8_tops: the same of 8-bit integers; None: the device has no such units.
        fp8_tflops: the same of 8-bit floats; None: the device has no such units.
        memory_gb: for weights, keys and values [1e9 bytes].
        tflops_by_rows: measured rate in `dtype` by rows of the left matrix; it takes the place of dense_tflops.
        sources: where each figure comes from, by its name.
    """

    name: str
    kind: str
    dtype: str
    bandwidth_gb_s: float
    dense_tflops: float
    memory_gb: float
    int8_tops: float | None = None
    fp8_tflops: float | None = None
    tflops_by_rows: Mapping[int, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in `dtype`."""
        return _BYTES[self.dtype]

    def bytes_per_s(self) -> float:
        """Bandwidth [bytes/s]."""
        return self.bandwidth_gb_s * 1e9

    def operations_per_s(self, arithmetic: Arithmetic, rows: int) -> float:
        """Matrix rate [operations/s] with so many rows in the left matrix.

        Raises:
            UserError: the device has no units for this arithmetic.
        """
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

    def at(self, *, bandwidth: float, compute: float) -> "DeviceLimits":
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
        """What `read_limits` reads."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype,
            "bandwidth_gb_s": self.bandwidth_gb_s,
            "dense_tflops": self.dense_tflops,
            "int8_tops": self.int8_tops,
            "fp8_tflops": self.fp8_tflops,
            "memory_gb": self.memory_gb,
            "tflops_by_rows": {str(rows): rate for rows, rate in self.tflops_by_rows.items()},
            "sources": dict(self.sources),
        }


def known_devices() -> list[str]:
    """Names of the package's own devices."""
    return sorted(path.stem for path in _DEVICES.glob("*.json"))


def read_limits(device: str) -> DeviceLimits:
    """One of the package's devices, or a JSON file such as `specvla bench --measure` writes.

    Raises:
        UserError: no such device or file, a field that is missing, a figure that is not positive.
    """
    known = known_devices()
    path = _DEVICES / f"{device}.json" if device in known else Path(device)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--device {device} is none of {', '.join(known)}, and no file that can be read ({error.strerror}); "
            "`specvla bench --measure --out FILE` writes one for the machine at hand"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); compare it with one of `specvla bench --measure`") from None
    return _parse(raw, path)


def _parse(raw: Any, path: Path) -> DeviceLimits:
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a JSON {type(raw).__name__}, but an object with {', '.join(_NEEDED)} is needed")
    missing = [name for name in _NEEDED if name not in raw]
    if missing:
        raise UserError(f"{path} lacks the field '{missing[0]}'; it needs {', '.join(_NEEDED)}")
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
    return DeviceLimits(
        name=str(raw["name"]),
        kind=raw["kind"],
        dtype=raw["dtype"],
        **{name: _figure(raw[name], name, path) for name in ("bandwidth_gb_s", "dense_tflops", "memory_gb")},
        **{name: _figure(value, name, path) for name, value in optional.items()},
        tflops_by_rows={int(rows): _figure(rate, f"tflops_by_rows[{rows}]", path) for rows, rate in by_rows.items()},
        sources={str(name): str(source) for name, source in sources.items()},
    )


def _figure(value: Any, name: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{path}: {name} must be a number, got {value!r}")
    if not 0 < value <= _MOST:
        raise UserError(f"{path}: {name} must be above 0 and at most {_MOST:g}, got {value:g}; check its unit")
    return float(value)
