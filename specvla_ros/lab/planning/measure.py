# SPDX-License-Identifier: Apache-2.0
"""Measures this device's bandwidth and its rate of matrix products in a checkpoint's shapes."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from specvla_ros.lab.planning.device import MEASURED, MEASURED_CAPTURED, Device
from specvla_ros.models.config import DecoderShape

ROWS = (1, 16, 64, 128, 192, 256, 320)
_WARM_UPS = 2
_TURNS = 7
_BUSY = 0.25  # share of a machine's CPU time above which other processes delay a policy


def measure_device(
    llama: DecoderShape,
    on_step: Callable[[str], None] = lambda _: None,
    *,
    device: str = "",
    dtype: torch.dtype | None = None,
    more_rows: Sequence[int] = (),
) -> Device:
    """Measures median bandwidth and matrix rates; 8-bit rates are not measured.

    Args:
        llama: shapes of the matrices; at most as many layers as fit the buffer of the bandwidth test.
        device, dtype: default as in the engine: the first GPU in bfloat16, or this CPU in float32.
        more_rows: numbers of rows of the left matrix in addition to `ROWS`.
    """
    cuda = device.startswith("cuda") if device else torch.cuda.is_available()
    target = torch.device(device or ("cuda" if cuda else "cpu"))
    dtype = dtype or (torch.bfloat16 if cuda else torch.float32)
    buffer_bytes = (4 if cuda else 1) << 28
    on_step("bandwidth")
    reading, copying = _bandwidths(target, dtype, buffer_bytes)
    layers = _layers(llama, target, dtype, buffer_bytes)
    by_rows = {}
    for rows in (*ROWS, *more_rows):
        on_step(f"matrix products of {rows} rows")
        by_rows[rows] = _tflops(layers, rows)
    name = torch.cuda.get_device_name() if cuda else f"{cpu_name()}, {torch.get_num_threads()} threads"
    where = f"{name}, torch {torch.__version__}, {date.today().isoformat()}"
    if cuda:
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    else:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        name=name,
        kind="measured",
        dtype=str(dtype).removeprefix("torch."),
        bandwidth_gb_s=max(reading, copying),
        dense_tflops=max(by_rows.values()),
        memory_gb=memory_bytes / 1e9,
        tflops_by_rows=by_rows,
        sources={
            "bandwidth_gb_s": f"measured: reading {reading:.4g}, copying {copying:.4g} (reads and writes), the larger "
            f"of the two; {buffer_bytes >> 20} MiB; {where}",
            "tflops_by_rows": f"measured: products with {len(layers)} x 4 matrices of a decoder layer, hidden size "
            f"{llama.hidden_size}, median of {_TURNS}; {where}",
            "dense_tflops": "the largest of tflops_by_rows",
            "int8_tops": "not measured",
            "fp8_tflops": "not measured",
            "memory_gb": "as reported by the system",
            "efficiency": "the measured rates include losses; assumed: a layer's time as the RTX 5090's",
            "captured": "the same; assumed: a layer's time as the H100's on a CUDA GPU, and no graphs on a CPU",
        },
        capability=".".join(map(str, torch.cuda.get_device_capability())) if cuda else "",
        efficiency=MEASURED,
        captured=MEASURED_CAPTURED if cuda else MEASURED,
    )


def _bandwidths(device: torch.device, dtype: torch.dtype, size: int) -> tuple[float, float]:
    source = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
    target = torch.zeros_like(source)
    reading_s = _median_s(source.sum, device)
    copying_s = _median_s(lambda: target.copy_(source), device)
    return size / reading_s / 1e9, 2 * size / copying_s / 1e9


def _layers(llama: DecoderShape, device: torch.device, dtype: torch.dtype, size: int) -> list[list[Tensor]]:
    """The four matrices of each layer, [out, in]: query, key and value; output; gate and up; down."""
    hidden, heads = llama.hidden_size, llama.num_attention_heads * llama.head_dim
    shapes = (
        (heads + 2 * llama.num_key_value_heads * llama.head_dim, hidden),
        (hidden, heads),
        (2 * llama.intermediate_size, hidden),
        (hidden, llama.intermediate_size),
    )
    layer_bytes = sum(rows * columns for rows, columns in shapes) * dtype.itemsize
    count = min(llama.num_hidden_layers, max(1, size // layer_bytes))
    generator = torch.Generator(device).manual_seed(0)
    return [
        [torch.rand(shape, dtype=dtype, device=device, generator=generator) for shape in shapes] for _ in range(count)
    ]


def _tflops(layers: list[list[Tensor]], rows: int) -> float:
    """Rate of all products [1e12 operations/s] with `rows` rows in the left matrix."""
    first = layers[0][0]
    widths = {matrix.shape[1] for matrix in layers[0]}
    inputs = {width: torch.rand((rows, width), dtype=first.dtype, device=first.device) for width in widths}

    def multiply() -> None:
        for layer in layers:
            for matrix in layer:
                torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)

    operations = 2.0 * rows * sum(matrix.numel() for layer in layers for matrix in layer)
    with torch.inference_mode():
        return operations / _median_s(multiply, first.device) / 1e12


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_WARM_UPS + _TURNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[_WARM_UPS:])


def cpu_name() -> str:
    """The processor's name; on ARM its architecture if Linux gives no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware"))]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of CPU time since this machine started, over all cores."""

    total: float
    busy: float  # of all processes, including time stolen by the host
    stolen: float  # stolen by the host
    own: float  # of this process and its children that ended

    @staticmethod
    def now() -> "CpuTimes":
        """The current times; zeros if Linux does not report them."""
        try:
            line = Path("/proc/stat").read_text().partition("\n")[0]
        except OSError:
            return CpuTimes(0.0, 0.0, 0.0, 0.0)
        ticks = [int(each) / os.sysconf("SC_CLK_TCK") for each in line.split()[1:9]]
        idle, stolen = ticks[3] + ticks[4], ticks[7]
        return CpuTimes(sum(ticks), sum(ticks) - idle, stolen, sum(os.times()[:4]))


def busy_machine(before: CpuTimes, after: CpuTimes) -> str:
    """A warning that other processes kept this machine busy in between; empty if they used little."""
    total = after.total - before.total
    others = after.busy - before.busy - (after.own - before.own)
    if total <= 0 or others / total < _BUSY:
        return ""
    stolen = (after.stolen - before.stolen) / total
    host = f" ({stolen:.0%} went to its host)" if stolen >= _BUSY / 5 else ""
    return (
        f"this machine was busy: other processes used {others / total:.0%} of its CPU time{host}. Delays, holds and "
        "failures may be due to the machine and not to the policy; repeat the run when the machine is idle"
    )
