# SPDX-License-Identifier: Apache-2.0
"""Kernels and stages of a packed forward against the roofline, with their alternatives.

Each bound is the bytes over the measured bandwidth or the operations over the measured matrix rate, whichever is
larger. Operands are in memory, not in a cache. On a CPU there are no kernels: their PyTorch references are timed.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.kernel_cases import (
    UNQUANTISED,
    Case,
    batches,
    filled_cache,
    first_layer,
    forward_cases,
    kernel_cases,
    stage_cases,
)
from benchmarks.harness import ColdTimer, take_turns
from benchmarks.random_policy import random_draft_head
from specvla_ros.lab.planning.cost import roofline_seconds
from specvla_ros.lab.planning.device import Device
from specvla_ros.lab.planning.measure import measure_device
from specvla_ros.models.decoder import PackedDecoder

_MANY_ROWS = 2048  # of a compute-bound product
_MEASURED = 7


def limits(decoder: PackedDecoder, device: str) -> Device:
    """Returns the device's limits, measured with large products: one rate for any number of rows."""
    measured = measure_device(decoder.config, device=device, dtype=decoder.dtype, more_rows=(_MANY_ROWS,))
    sources = dict(measured.sources) | {"int8_tops": f"measured: one product of {_MANY_ROWS} rows"}
    return replace(measured, tflops_by_rows={}, int8_tops=_int8_tops(decoder, device), sources=sources)


def _int8_tops(decoder: PackedDecoder, device: str) -> float:
    shape = first_layer(decoder).gate_up.weight.shape
    weight, x = (
        torch.randint(-127, 128, (rows, shape[1]), dtype=torch.int8, device=device) for rows in (shape[0], _MANY_ROWS)
    )
    seconds = take_turns({"int8": lambda: torch._int_mm(x, weight.T)}, _MEASURED, device)["int8"]
    return 2.0 * _MANY_ROWS * weight.numel() / seconds / 1e12


def cases(decoder: PackedDecoder) -> Iterator[tuple[str, Case]]:
    """Yields kernels, then stages; a case's operands exist only during its turn."""
    cache, draft_head, packed = filled_cache(decoder), random_draft_head(decoder), batches(decoder)
    for batch in packed:
        for case in kernel_cases(decoder, batch, cache):
            yield "kernel", case
    for case in forward_cases(decoder, cache):
        yield "kernel", case
    for batch in packed:
        for case in stage_cases(decoder, draft_head, batch, cache):
            yield "stage", case


def row(kind: str, case: Case, limits: Device, timer: ColdTimer) -> dict[str, Any]:
    """Returns a case's bound, and each contestant's time and share of the bound."""
    bound_s = roofline_seconds(case.parts, limits)
    found: dict[str, float | str] = {name: call for name, call in case.calls.items() if isinstance(call, str)}
    found |= timer.seconds({name: call for name, call in case.calls.items() if not isinstance(call, str)})
    return {
        "kind": kind,
        "name": case.name,
        "batch": case.batch,
        "rows": case.rows,
        "bytes": sum(part.bytes for part in case.parts),
        "operations": sum(part.operations for part in case.parts),
        "bound_s": bound_s,
        "bound_by": _bound_by(case, limits),
        "contestants": {name: _contestant(name, found[name], bound_s) for name in case.calls},
    }


def _bound_by(case: Case, limits: Device) -> str:
    reading = sum(part.bytes for part in case.parts) / limits.bytes_per_s()
    computing = sum(
        part.operations / limits.operations_per_s(part.arithmetic, part.rows) for part in case.parts if part.operations
    )
    return "reading" if reading >= computing else "computing"


def _contestant(name: str, found: float | str, bound_s: float) -> dict[str, Any]:
    if isinstance(found, str):
        return {"skipped": found}
    if name == UNQUANTISED:  # the bound is that of the quantised product
        return {"seconds": found}
    return {"seconds": found, "share_of_bound": bound_s / found}
