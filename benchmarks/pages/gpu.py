# SPDX-License-Identifier: Apache-2.0
"""The GPU page's section for a GPU report (benchmarks/gpu/report.py)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.pages.tables import Result, table
from benchmarks.random_policy import PROMPT
from specvla_ros.lab.planning.cost import OPENVLA_7B, Forward, forward_parts, model_cost
from specvla_ros.lab.planning.device import read_device
from specvla_ros.models.settings import WeightFormat

_FORWARDS = {
    "7 x 1 node": Forward(trees=7, nodes=7, prefix_rows=7 * PROMPT),
    "tree of 50": Forward(trees=1, nodes=50, prefix_rows=PROMPT),
    "prompt of 290": Forward(prompt_rows=PROMPT),
    "290 + 3 x 16 nodes": Forward(prompt_rows=PROMPT, trees=3, nodes=48, prefix_rows=3 * PROMPT),
}
_STAGES = ("vision and prompt", "forward", "verification", "draft")


def gpu(result: Result) -> Result:
    """Returns the template's fields, mostly tables."""
    found = {name: step["found"] for name, step in result["steps"].items()}
    soak = found["soak"]["soak"]
    modes = found["modes"]
    return {
        "hz": {name: row["action_rate_hz"] for name, row in modes.items()},
        "age_ms": {name: 1e3 * row["image_age_s"] for name, row in modes.items() if "image_age_s" in row},
        "modes": _modes(modes, "transformers, compiled"),
        "chunks": _modes(found["chunks"]),
        "auto": "auto" in found,
        **{
            f"auto_{tokens}": _modes(
                {name: row for name, row in found.get("auto", {}).items() if f" {tokens} " in name}
            )
            for tokens in (7, 35)
        },
        "ticks": _ticks(found["ticks"]),
        "graphs": _modes(found["graphs"]),
        "formats": _modes({name: row for name, row in found["formats"].items() if "latency_s" in row}),
        "products": _products(found["gemm"]),
        "attention": _attention(found["attention"]),
        "operators": _operators(found["operators"]),
        "forwards": _forwards(found["operators"], result.get("emulated_as", "")),
        "runs": result.get("runs", "one report"),
        "limits": found["operators"]["limits"],
        "soak": "passed" if soak["passed"] else "failed",
        "soak_ticks": soak["ticks"],
        "soak_actions": sum(phase["actions"] for phase in soak["phases"].values()),
        "soak_different": sum(phase["different_actions"] for phase in soak["phases"].values()),
    }


def _modes(rows: Mapping[str, Result], other: str = "") -> str:
    """A table of modes, relative to this package's first row and, if given, to the row `other`."""
    if not rows:
        return ""
    plain = next(row["action_rate_hz"] for name, row in rows.items() if not name.startswith("transformers"))
    bases = [plain] + ([rows[other]["action_rate_hz"]] if other else [])
    head = ["", "answers/s", "× first", *([f"× {other}"] if other else [])]
    cells = [[*head, "latency, ms", "p95, ms", "image age, ms", "forwards", "in flight", "GiB"]]
    for name, row in rows.items():
        rate, latency = row["action_rate_hz"], row["latency_s"]
        memory = row["peak_bytes"]
        cells.append(
            [
                name,
                f"{rate:.1f}",
                *(f"{rate / base:.2f}" for base in bases),
                f"{latency['mean'] * 1e3:.1f}",
                f"{latency['p95'] * 1e3:.1f}",
                *_optional(
                    row, ("image_age_s", 1e3, ".1f"), ("forwards_per_action", 1, ".2f"), ("in_flight", 1, ".1f")
                ),
                f"{memory / 2**30:.1f}" if memory else "",
            ]
        )
    return table(cells)


def _optional(row: Result, *shown: tuple[str, float, str]) -> list[str]:
    return [format(row[name] * scale, form) if name in row else "" for name, scale, form in shown]


def _ticks(rows: Mapping[str, Result]) -> str:
    cells = [["", "tick, ms", *(f"{stage}, ms" for stage in _STAGES), "GPU waits, ms", "share", "graphs"]]
    for name, row in rows.items():
        times = [row["tick_s"], *(row["stages_s"][stage] for stage in _STAGES), row["host_gap_s"]]
        share = f"{row['host_gap_s'] / row['tick_s']:.0%}"
        cells.append([name, *(f"{seconds * 1e3:.2f}" for seconds in times), share, row["cuda_graphs"]])
    return table(cells)


def _products(rows: Mapping[str, Result]) -> str:
    """Sums over a layer's four matrices."""
    kinds = list(next(iter(rows.values()))["seconds"])
    by_rows: dict[int, list[Mapping[str, float]]] = {}
    for row in rows.values():
        by_rows.setdefault(row["rows"], []).append(row["seconds"])
    cells = [["rows", *(kind.replace(" alone", "") for kind in kinds)]]
    for count, parts in by_rows.items():
        cells.append([str(count), *(_microseconds(sum(part[kind] for part in parts)) for kind in kinds)])
    return table(cells)


def _attention(rows: Mapping[str, Result]) -> str:
    kinds = [kind for kind in next(iter(rows.values()))["seconds"] if kind != "flash-attn"]
    cells = [["", "rows", *kinds]]
    cells += [
        [name, str(row["rows"]), *(_microseconds(row["seconds"][kind]) for kind in kinds)] for name, row in rows.items()
    ]
    return table(cells)


def _operators(rows: Mapping[str, Result]) -> str:
    cells = [["", "batch", "limit", "Triton", "PyTorch", "torch.compile"]]
    for row in _of_launches(rows.values()):
        by = {name: entry.get("seconds", "") for name, entry in row["contestants"].items()}
        times = [_microseconds(by.get(name, "")) for name in ("Triton", "PyTorch", "torch.compile")]
        cells.append([row["name"], row["batch"], _microseconds(row["bound_s"]), *times])
    return table(cells)


def _of_launches(rows: Iterable[Any]) -> list[Result]:
    return [row for row in rows if "contestants" in row and not row["name"].startswith(("whole", "int8"))]


def _forwards(rows: Mapping[str, Result], emulated_as: str) -> str:
    """Whole forwards, measured and by both sets of the planner's table of the device; empty without such a table."""
    if not emulated_as:
        return ""
    device, model = read_device(emulated_as), model_cost(OPENVLA_7B)
    cells: list[Sequence[str]] = [["", "measured, ms", "limit, ms", "eager, ms", "error", "captured, ms", "error"]]
    for name, forward in _FORWARDS.items():
        row = rows[f"whole forward, {name}"]
        seconds = row["contestants"]["Triton"]["seconds"]
        parts = forward_parts(forward, model, WeightFormat.NONE, 2)
        shown = [f"{each * 1e3:.2f}" for each in (seconds, row["bound_s"])]
        for efficiency in (device.efficiency, device.captured):
            emulated = sum(part.seconds(device, efficiency) for part in parts)
            shown += [f"{emulated * 1e3:.2f}", f"{emulated / seconds - 1:+.0%}"]
        cells.append([name, *shown])
    return table(cells)


def _microseconds(found: float | str) -> str:
    return "" if isinstance(found, str) else f"{found * 1e6:.0f}"
