# SPDX-License-Identifier: Apache-2.0
"""A plan as text tables."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from specvla_ros.lab.planning.device import Efficiency
from specvla_ros.lab.planning.plan import Plan, note

_TABLE_WIDTH = 100  # on a narrower terminal lines wrap: a number that is cut is worse


def print_plan(plan: Plan, console: Console) -> None:
    """Prints forwards, modes and the chosen profile."""
    console.print(note(plan.device), style="bold", highlight=False, soft_wrap=True)
    console.print(_summary(plan), highlight=False, soft_wrap=True)
    for table in (_forward_table(plan), _mode_table(plan)):
        console.print(table, width=_TABLE_WIDTH, crop=False)
    if not all(mode.fits(plan.device) for mode in plan.modes):
        console.print("!: finds no room in the device's memory\n", highlight=False)
    console.print("Chosen, as a ROS 2 parameter file:", style="bold")
    console.print(plan.profile.as_yaml(), highlight=False, markup=False)
    for name, reason in plan.profile.reasons.items():
        console.print(f"{name}: {reason}", highlight=False, markup=False, soft_wrap=True)


def _summary(plan: Plan) -> str:
    device, model = plan.device, plan.model
    kv_kib = model.kv_values * device.value_bytes / 1024
    rates = [f"{device.bandwidth_gb_s:g} GB/s", f"{device.dense_tflops:g} TFLOP/s {device.dtype}"]
    rates += [f"{device.int8_tops:g} TOP/s int8"] if device.int8_tops else []
    rates += [f"{device.fp8_tflops:g} TFLOP/s fp8"] if device.fp8_tflops else []
    return "\n".join(
        (
            f"{plan.checkpoint}, weights {plan.weights.value}: {model.decoder_values / 1e9:.4g} G decoder weights, "
            f"{kv_kib:g} KiB of keys and values per token, a prompt of {model.prompt_rows} rows",
            f"{device.name}: {', '.join(rates)}, {device.memory_gb:g} GB; reading and computing balance at "
            f"{plan.ridge_rows:.0f} rows",
            f"in brackets: {_reached(device.efficiency)}",
        )
    )


def _reached(efficiency: Efficiency) -> str:
    by_rows = sorted(efficiency.compute_by_rows.items())
    shares = [f"{share:.0%} of the matrix rate with {rows} rows" for rows, share in by_rows]
    if len(by_rows) == 1:
        shares = [f"{by_rows[0][1]:.0%} of the matrix rate"]
    layer = f"{efficiency.layer_s * 1e6:.0f} µs more per layer"
    return ", ".join((f"{efficiency.bandwidth:.0%} of the bandwidth", *shares, layer))


def _forward_table(plan: Plan) -> Table:
    table = _table("forwards", "forward", ("bytes", "FLOP", "ms", "bound by"))
    for forward in plan.forwards:
        table.add_row(
            forward.name,
            _scaled(forward.bytes),
            _scaled(forward.operations),
            _both(forward.seconds * 1e3, forward.derated_seconds * 1e3),
            forward.bound_by,
        )
    return table


def _mode_table(plan: Plan) -> Table:
    titles = ("actions/s", "latency ms", "forwards", "lost", "KV B", "weights")
    robots = plan.modes[0].mode.robots
    of_each = f" of each of {robots} robots" if robots > 1 else ""
    table = _table(f"modes, a frame{of_each} always waiting ({plan.lengths.name})", "mode", titles)
    for limit in plan.modes:
        table.add_row(
            limit.mode.name,
            _both(limit.action_rate_hz, limit.derated_rate_hz),
            _both(limit.latency_s * 1e3, limit.derated_latency_s * 1e3),
            f"{limit.ticks_per_action:.1f}",
            f"{limit.dropped:.0%}",
            _scaled(limit.kv_bytes),
            _scaled(limit.weight_bytes) + ("" if limit.fits(plan.device) else "!"),
        )
    return table


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _both(limit: float, expected: float) -> str:
    return f"{_short(limit)} ({_short(expected)})"


def _short(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _scaled(value: float) -> str:
    """Three significant digits with the prefix that leaves one to three before the point."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{_short(value / size)} {prefix}"
    return f"{_short(value / 1e3)} k"
