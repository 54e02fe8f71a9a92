# SPDX-License-Identifier: Apache-2.0
"""The GPU page's section for a GPU report (benchmarks/gpu/report.py)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.pages.tables import Result, microseconds, named, table
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
        "ticks": [row | {"share": row["host_gap_s"] / row["tick_s"]} for row in named(found["ticks"], "name")],
        "graphs": _modes(found["graphs"]),
        "formats": _modes({name: row for name, row in found["formats"].items() if "latency_s" in row}),
        "products": _products(found["gemm"]),
        "attention": _attention(found["attention"]),
        "operators": [row | _contestants(row) for row in _of_launches(found["operators"].values())],
        "forwards": _forwards(found["operators"], result.get("emulated_as", "")),
        "runs": result.get("runs", "one report"),
        "limits": found["operators"]["limits"],
        "soak": "passed" if soak["passed"] else "failed",
        "soak_actions": sum(phase["actions"] for phase in soak["phases"].values()),
        "soak_different": sum(phase["different_actions"] for phase in soak["phases"].values()),
    }


def _modes(rows: Mapping[str, Result], other: str = "") -> list[Result]:
    """Modes with their rates relative to this package's first one and, if given, to `other`."""
    plain = next((row["action_rate_hz"] for name, row in rows.items() if not name.startswith("transformers")), None)
    none = dict.fromkeys(("image_age_s", "forwards_per_action", "in_flight"))
    return [
        none
        | row
        | {
            "over": row["action_rate_hz"] / plain,
            "over_other": other and row["action_rate_hz"] / rows[other]["action_rate_hz"],
        }
        for row in named(rows, "name")
    ]


def _products(rows: Mapping[str, Result]) -> str:
    """Sums over a layer's four matrices."""
    kinds = list(next(iter(rows.values()))["seconds"])
    by_rows: dict[int, list[Mapping[str, float]]] = {}
    for row in rows.values():
        by_rows.setdefault(row["rows"], []).append(row["seconds"])
    cells = [["rows", *(kind.replace(" alone", "") for kind in kinds)]]
    for count, parts in by_rows.items():
        cells.append([str(count), *(microseconds(sum(part[kind] for part in parts)) for kind in kinds)])
    return table(cells)


def _attention(rows: Mapping[str, Result]) -> str:
    kinds = [kind for kind in next(iter(rows.values()))["seconds"] if kind != "flash-attn"]
    cells = [
        [name, str(row["rows"]), *(microseconds(row["seconds"][kind]) for kind in kinds)] for name, row in rows.items()
    ]
    return table([["", "rows", *kinds], *cells])


def _contestants(row: Result) -> Result:
    by = {"Triton": "Triton", "PyTorch": "PyTorch", "compiled": "torch.compile"}
    return {name: row["contestants"].get(key, {}).get("seconds", "") for name, key in by.items()}


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
