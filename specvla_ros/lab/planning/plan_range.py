# SPDX-License-Identifier: Apache-2.0
"""The plans for both kinds of software side by side, as `specvla plan` shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.files import format_parameters, format_value
from specvla_ros.lab.planning.device import Device, Efficiency, Software
from specvla_ros.lab.planning.plan import AS_GOOD, Plan, make_plan, note
from specvla_ros.models.settings import WeightFormat
from specvla_ros.settings.parameter import values_of

_NO_CHANGES = "With captured graphs, the choices of modes, weight format and parameters stay the same."
_OF_CAPTURED = ("derated", "forwards", "modes", "profile")  # fields of a plan that differ between kinds of software


@dataclass(frozen=True)
class PlanRange:
    """The plans for both kinds of software; the chosen parameters are those for the eager one."""

    eager: Plan
    captured: Plan  # the same plan if the device's file gives one set of shares

    @property
    def single(self) -> bool:
        """True if the device's file does not tell the kinds of software apart."""
        return self.captured is self.eager

    @property
    def verdict(self) -> str:
        """The expected result in one sentence."""
        plan = self.eager
        if not plan.fits:
            return f"{plan.checkpoint} does not fit on {plan.device.name}: {plan.profile.reasons['memory']}"
        mode = _range(plan.profile.settings.mode, self.captured.profile.settings.mode, " or ")
        return f"{plan.checkpoint} on {plan.device.name}: {mode} acts on the newest images; expected {self._expected}"

    @property
    def changes(self) -> list[str]:
        """The choices that are others with captured graphs, and cost more than noise if they are not followed."""
        modes = [(a, b) for a, b in zip(self.eager.modes, self.captured.modes, strict=True) if not a.mode.chooses]
        fixed = {a.mode.name: (a.derated_image_age_s, b.derated_image_age_s) for a, b in modes}
        plain = {a.mode.name: fixed[a.mode.name] for a, _ in modes if not a.mode.drafts}
        formats = {name: (age_s, self.captured.format_ages[name]) for name, age_s in self.eager.format_ages.items()}
        chosen = {"best fixed mode": fixed, "best mode without drafts": plain, "best weight format": formats}
        found = [_change(name, ages) for name, ages in chosen.items()]
        defaults = values_of(EngineSettings())
        before, after = (defaults | each.parameters for each in (self.eager, self.captured))
        names = sorted(name for name in before if before[name] != after[name])
        found += [f"{n} is {_written(after[n])}, not {_written(before[n])}" for n in names]
        return [change for change in found if change]

    @property
    def reasons(self) -> dict[str, str]:
        """Explanations by the name of what they explain."""
        ages = self.captured.format_ages
        formats = [f"{name} {_milliseconds(age_s, ages[name])}" for name, age_s in self.eager.format_ages.items()]
        tried = "`specvla simulate --quantization` and `specvla compare` show what rounding changes"
        return {
            **self.eager.profile.reasons,
            "expect": self._expected,
            "model.quantization": f"{', '.join(formats)} (derated); {tried}",
        }

    def as_json(self) -> dict[str, Any]:
        found = self.eager.as_json()
        found["profile"]["reasons"] = self.reasons
        captured = self.captured.as_json()
        shown = {"verdict": self.verdict, "changes": self.changes}
        return found | shown | {"captured": {name: captured[name] for name in _OF_CAPTURED}}

    @property
    def _expected(self) -> str:
        first, second = self.eager.profile.limit, self.captured.profile.limit
        robots = first.mode.robots
        each = f" for each of {robots} robots" if robots > 1 else ""
        rate = _range(f"{first.derated_rate_hz:.3g}", f"{second.derated_rate_hz:.3g}")
        latency = _milliseconds(first.derated_latency_s, second.derated_latency_s)
        kinds = "" if self.single else "; range: eager execution to CUDA graphs"
        return f"{rate} actions/s{each}, {latency} (derated{kinds})"


def make_plans(
    device: Device, weights: WeightFormat, checkpoint: Path | None = None, robots: int = 1, tokens: int = 0
) -> PlanRange:
    """Computes the plans of both kinds of software; see `make_plan`."""
    eager = make_plan(device, weights, checkpoint, robots, tokens)
    if device.captured == device.efficiency:
        return PlanRange(eager, eager)
    return PlanRange(eager, make_plan(device.running(Software.CAPTURED), weights, checkpoint, robots, tokens))


def _change(name: str, ages: Mapping[str, tuple[float, float]]) -> str:
    """The choice of the youngest images, if it is another with captured graphs; `ages` [s]: eager and captured."""
    eager, captured = (min(ages, key=lambda each: ages[each][kind]) for kind in (0, 1))
    if ages[eager][1] <= AS_GOOD * ages[captured][1]:
        return ""
    return f"the {name} is `{captured}`, not `{eager}`"


def _written(value: Any) -> str:
    return format_value(value) or "empty"


def _milliseconds(eager_s: float, captured_s: float) -> str:
    return f"{_range(f'{eager_s * 1e3:.0f}', f'{captured_s * 1e3:.0f}')} ms"


def print_plan(plans: PlanRange, console: Console) -> None:
    """Prints the verdict, the forwards, the modes and the chosen profile."""
    plan = plans.eager
    tables = _forward_table(plans), _mode_table(plans)
    # Lines wrap on a narrower terminal, which is better than truncated numbers.
    console.width = max(console.width, *(Console(width=10_000).measure(table).maximum for table in tables))
    console.print(plans.verdict, style="bold", highlight=False, soft_wrap=True)
    console.print(note(plan.device), highlight=False, soft_wrap=True)
    if not plans.single:
        console.print(_changes(plans), highlight=False, soft_wrap=True)
    console.print(_summary(plans), highlight=False, soft_wrap=True)
    for table in tables:
        console.print(table)
    if not all(mode.fits(plan.device) for mode in plan.modes):
        console.print("!: does not fit in the device's memory\n", highlight=False)
    software = "" if plans.single else " for eager software"
    console.print(f"Chosen{software}, as a ROS 2 parameter file:", style="bold")
    console.print(format_parameters(plan.parameters), highlight=False, markup=False)
    for name, reason in plans.reasons.items():
        console.print(f"{name}: {reason}", highlight=False, markup=False, soft_wrap=True)


def _changes(plans: PlanRange) -> str:
    changes = plans.changes
    return f"With captured graphs, {'; '.join(changes)}." if changes else _NO_CHANGES


def _summary(plans: PlanRange) -> str:
    plan = plans.eager
    device, model = plan.device, plan.model
    kv_kib = model.kv_values * device.value_bytes / 1024
    rates = [f"{device.bandwidth_gb_s:g} GB/s", f"{device.dense_tflops:g} TFLOP/s {device.dtype}"]
    rates += [f"{device.int8_tops:g} TOP/s int8"] if device.int8_tops else []
    rates += [f"{device.fp8_tflops:g} TFLOP/s fp8"] if device.fp8_tflops else []
    reached = f"in brackets, expected{'' if plans.single else ' of eager software'}: {_reached(device.efficiency)}"
    captured = "" if plans.single else f"\n  to captured graphs: {_reached(device.captured)}"
    return (
        f"{plan.checkpoint}, weights {plan.weights.value}: {model.decoder_values / 1e9:.4g} G decoder weights, "
        f"{kv_kib:g} KiB of keys and values per token, a prompt of {model.prompt_rows} rows\n"
        f"{device.name}: {', '.join(rates)}, {device.memory_gb:g} GB; memory-bound below "
        f"{plan.ridge_rows:.0f} rows\n{reached}{captured}"
    )


def _reached(efficiency: Efficiency) -> str:
    by_rows = sorted(efficiency.compute_by_rows.items())
    at = " with {} rows" if len(by_rows) > 1 else ""
    shares = [f"{share:.0%} of the matrix rate" + at.format(rows) for rows, share in by_rows]
    layer = f"{efficiency.layer_s * 1e6:.0f} µs more per layer"
    return ", ".join((f"{efficiency.bandwidth:.0%} of the bandwidth", *shares, layer))


def _forward_table(plans: PlanRange) -> Table:
    table = _table("forwards", "forward", ("bytes", "FLOP", "ms", "bound by"))
    for forward, captured in zip(plans.eager.forwards, plans.captured.forwards, strict=True):
        ms = _three(forward.seconds * 1e3, forward.derated_seconds * 1e3, captured.derated_seconds * 1e3)
        table.add_row(forward.name, _scaled(forward.bytes), _scaled(forward.operations), ms, forward.bound_by)
    return table


def _mode_table(plans: PlanRange) -> Table:
    plan = plans.eager
    titles = ("actions/s", "latency ms", "age ms", "ticks", "lost", "memory")
    robots = plan.modes[0].mode.robots
    of_each = f" of each of {robots} robots" if robots > 1 else ""
    table = _table(f"modes, a frame{of_each} always waiting ({plan.lengths.name})", "mode", titles)
    for limit, captured in zip(plan.modes, plans.captured.modes, strict=True):
        table.add_row(
            limit.mode.name,
            _three(limit.action_rate_hz, limit.derated_rate_hz, captured.derated_rate_hz),
            _three(limit.latency_s * 1e3, limit.derated_latency_s * 1e3, captured.derated_latency_s * 1e3),
            _three(limit.image_age_s * 1e3, limit.derated_image_age_s * 1e3, captured.derated_image_age_s * 1e3),
            f"{limit.ticks_per_action:.1f}",
            f"{limit.dropped:.0%}",
            _scaled(limit.kv_bytes + limit.weight_bytes) + ("" if limit.fits(plan.device) else "!"),
        )
    return table


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _three(limit: float, eager: float, captured: float) -> str:
    return f"{_short(limit)} ({_range(_short(eager), _short(captured), '-')})"


def _range(eager: str, captured: str, between: str = " to ") -> str:
    return eager if eager == captured else f"{eager}{between}{captured}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _scaled(value: float) -> str:
    """Formats three significant digits with a unit prefix that leaves one to three before the point."""
    known = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
    prefix, size = next((each for each in known if value >= each[1]), known[-1])
    return f"{_short(value / size)} {prefix}"
