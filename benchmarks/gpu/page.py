# SPDX-License-Identifier: Apache-2.0
"""The report's page: one self-contained HTML file."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from specvla_ros.lab.evaluation.page import answer, context_rows, html, notice, table

Rows = Sequence[Sequence[str]]


def page(state: Mapping[str, Any], wanted: Sequence[str] = ()) -> str:
    """Returns the page for the content of report.json; `wanted`: the steps asked for, done or not."""
    options, steps = state["options"], state["steps"]
    found = {name: entry["found"] for name, entry in steps.items()}
    where = found.get("environment", {}).get("environment", {}).get("hardware", options["device"])
    parts = [_answer(steps, wanted)]
    if options.get("dry_run"):
        parts.append(notice("A dry run without a device: the figures are meaningless."))
    elif options["device"] == "cpu":
        parts.append(notice("On a CPU, on references: this only shows that the report works."))
    parts.append(table(["step", "state", "seconds", ""], [_step(name, entry) for name, entry in steps.items()]))
    for name, (title, view) in _VIEWS.items():
        if found.get(name):
            parts += [f"<h2>{escape(title)}</h2>", view(found[name])]
    return html(f"specvla_ros on {where}, {options['sizes']} shapes", parts)


def _answer(steps: Mapping[str, Mapping[str, Any]], wanted: Sequence[str]) -> str:
    names = [*dict.fromkeys((*wanted, *steps))]
    missing = [name for name in names if steps.get(name, {}).get("state") != "done"]
    done = f"{len(names) - len(missing)} of {len(names)} steps are done"
    done += f", without {', '.join(missing)}" if missing else ""
    faults = _faults(steps)
    done += "".join(f"; {fault}" for fault in faults)
    kind = "failed" if missing or faults else "passed"
    rates = _rates(steps.get("modes", {}).get("found") or {})
    if not rates:
        return answer(kind, str(len(names) - len(missing)), "steps done", f"{done}.")
    best, plain = max(rates, key=rates.__getitem__), _plain(rates)
    faster = f": {rates[best] / plain:.2f} times as many as plain decoding" if plain else ""
    return answer(kind, f"{rates[best]:.1f}", f"actions per second with {best}{faster}", f"{done}.")


def _faults(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The faults of this device, found by steps that ran to their end."""
    groups = [row for row in steps.get("tests", {}).get("found", {}).values() if isinstance(row, dict)]
    failed = sum(row.get("failures", 0) + row.get("errors", 0) + ("error" in row) for row in groups)
    soaked = steps.get("soak", {}).get("found", {}).get("soak", {})
    faults = [f"tests failed on this device: {failed}"] if failed else []
    return faults + (["the soak failed"] if soaked and not soaked["passed"] else [])


def _rates(found: Mapping[str, Any]) -> dict[str, float]:
    """Actions per second of each mode that was timed."""
    return {name: row["action_rate_hz"] for name, row in found.items() if isinstance(row, dict) and "latency_s" in row}


def _plain(rates: Mapping[str, float]) -> float | None:
    return next((rates[name] for name in ("ar", "none, ar", "ar, eager") if name in rates), None)


def _step(name: str, entry: Mapping[str, Any]) -> list[str]:
    return [name, entry.get("state", ""), f"{entry['seconds']:.0f}", " ".join(entry.get("reason", []))[:200]]


def _environment(found: Mapping[str, Any]) -> str:
    return table(["", ""], context_rows(found["environment"]))


_MODES_HEAD = (
    *("", "actions/s", "× ar", "× transformers", "latency, ms", "p95", "image age, ms"),
    *("forwards", "same tokens", "GiB", "graphs"),
)


def _modes(found: Mapping[str, Any]) -> str:
    rates = _rates(found)
    other, plain = rates.get("transformers"), _plain(rates)
    rows = []
    for name, row in found.items():
        if name not in rates:
            said = row.get("skipped") if isinstance(row, dict) else row
            said = str(said or f"{row['layer_bytes'] / 2**30:.2f} GiB of layers")
            rows.append([name, said, *[""] * (len(_MODES_HEAD) - 2)])
            continue
        latency = row["latency_s"]
        ratios = [f"{rates[name] / base:.2f}" if base else "" for base in (plain, other)]
        memory = "" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**30:.2f}"
        same = {True: "yes", False: "no"}.get(row.get("same_tokens"), "")
        rows.append(
            [
                name,
                f"{rates[name]:.2f}",
                *ratios,
                *(f"{latency[key] * 1e3:.1f}" for key in ("mean", "p95")),
                f"{row['image_age_s'] * 1e3:.1f}" if "image_age_s" in row else "",
                f"{row['forwards_per_action']:.2f}" if "forwards_per_action" in row else "",
                same,
                memory,
                str(row.get("cuda_graphs", "")),
            ]
        )
    return table(_MODES_HEAD, rows)


def _ticks(found: Mapping[str, Any]) -> str:
    stages = list(next(iter(found.values()))["stages_s"])
    rows = []
    for name, row in found.items():
        times = [row["tick_s"], *(row["stages_s"][stage] for stage in stages), row["host_gap_s"]]
        gap = f"{row['host_gap_s'] / row['tick_s']:.0%}" if row["tick_s"] else ""
        rows.append([name, *(f"{seconds * 1e3:.3f}" for seconds in times), gap])
    text = "<p>Mean milliseconds per tick; the gap is the device's time between the stages.</p>"
    return text + table(["", "tick", *stages, "gap", "share"], rows)


def _gemm(found: Mapping[str, Any]) -> str:
    kinds = list(dict.fromkeys(kind for row in found.values() for kind in row["seconds"]))
    rows = []
    for row in found.values():
        cells = [_microseconds(row["seconds"].get(kind, "")) for kind in kinds]
        shape = f"{row['matrix']} {row['shape'][0]} × {row['shape'][1]}"
        rows.append([shape, str(row["rows"]), *cells])
    return "<p>Microseconds.</p>" + table(["matrix", "rows", *kinds], rows)


def _microseconds(found: Any) -> str:
    return str(found)[:60] if isinstance(found, str) else f"{found * 1e6:.1f}"


def _attention(found: Mapping[str, Any]) -> str:
    kinds = list(dict.fromkeys(kind for row in found.values() for kind in row["seconds"]))
    rows = [
        [name, str(row["rows"]), *(_microseconds(row["seconds"].get(kind, "")) for kind in kinds),
         f"{max(row['largest_difference'].values(), default=0.0):.2g}"]
        for name, row in found.items()
    ]  # fmt: skip
    return "<p>Microseconds, one layer.</p>" + table(["batch", "rows", *kinds, "largest difference"], rows)


def _operators(found: Mapping[str, Any]) -> str:
    limits = found.get("limits", {})
    text = ", ".join(f"{key}: {limits[key]:.4g}" for key in ("bandwidth_gb_s", "dense_tflops") if key in limits)
    rows = []
    for row in (row for name, row in found.items() if name != "limits"):
        for kind, entry in row["contestants"].items():
            share = f"{entry['share_of_bound']:.0%}" if "share_of_bound" in entry else ""
            seconds = _microseconds(entry.get("seconds", entry.get("skipped", "")))
            bound = f"{row['bound_s'] * 1e6:.1f} ({row['bound_by']})"
            rows.append([row["name"], row["batch"], kind, seconds, bound, share])
    head = ["", "batch", "by", "µs", "bound, µs", "share of it"]
    return f"<p>Measured limits: {escape(text)}.</p>" + table(head, rows)


def _tests(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"<p>{escape(found['skipped'])}</p>"
    rows, failures = [], []
    for name, row in found.items():
        if "error" in row:
            rows.append([name, "", "", "", row["error"][-300:]])
            continue
        bad = row["failures"] + row["errors"]
        rows.append([name, str(row["tests"]), str(bad), str(row["skipped"]), f"{row['seconds']:.0f}"])
        failures += [[test, message] for test, message in row["failed"].items()]
    suites = table(["", "tests", "failed", "skipped", "seconds"], rows)
    return suites + (table(["failed", ""], failures) if failures else "")


def _soak(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"<p>{escape(found['skipped'])}</p>"
    keys = ("submitted", "actions", "switches", "different_actions", "drops", "cuda_graphs", "failures")
    rows = [
        [
            name,
            *(f"{value:.3g}" if isinstance(value := phase[key], float) else str(value) for key in keys),
        ]
        for name, phase in found["soak"]["phases"].items()
    ]
    return f"<p>{'Passed' if found['soak']['passed'] else 'Failed'}.</p>" + table(["", *keys], rows)


_VIEWS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "modes": ("Decoding modes on 640 × 480 images", _modes),
    "chunks": ("Answers of five actions", _modes),
    "ticks": ("Inside a tick", _ticks),
    "tests": ("Tests on the device", _tests),
    "formats": ("Quantised weights", _modes),
    "graphs": ("CUDA graphs on and off", _modes),
    "gemm": ("Matrix products by rows and format", _gemm),
    "attention": ("Attention and its alternatives", _attention),
    "operators": ("Kernels and stages against the roofline", _operators),
    "soak": ("Soak", _soak),
    "environment": ("Environment", _environment),
}
