# SPDX-License-Identifier: Apache-2.0
"""The report's page: one self-contained HTML file."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2128; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #d0d7de; padding-bottom: .2rem; }
table { border-collapse: collapse; margin: .8rem 0; } th, td { padding: .25rem .7rem; text-align: right; }
th { background: #f2f4f7; font-weight: 600; } td:first-child, th:first-child, td:has(.bar) { text-align: left; }
tr { border-bottom: 1px solid #e6e9ed; }
.bar { display: inline-block; height: .7rem; background: #3b82c4; vertical-align: middle; }
.bad { color: #b42318; font-weight: 600; } .warn { background: #fff4d6; padding: .6rem .9rem; }
"""
Rows = Sequence[Sequence[str]]


def page(state: Mapping[str, Any]) -> str:
    """Returns the page for the content of report.json."""
    options, steps = state["options"], state["steps"]
    found = {name: entry["found"] for name, entry in steps.items()}
    where = found.get("environment", {}).get("environment", {}).get("hardware", options["device"])
    parts = [f"<h1>specvla_ros on {escape(str(where))}, {escape(options['sizes'])} shapes</h1>"]
    if options.get("dry_run"):
        parts.append('<p class="warn">A dry run without a device: the figures are meaningless.</p>')
    elif options["device"] == "cpu":
        parts.append('<p class="warn">On a CPU, on references: this only shows that the report works.</p>')
    parts.append(_table(["step", "state", "seconds", ""], [_step(name, entry) for name, entry in steps.items()]))
    for name, (title, view) in _VIEWS.items():
        if found.get(name):
            parts += [f"<h2>{escape(title)}</h2>", view(found[name])]
    body = "\n".join(parts)
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>GPU report</title><style>{_STYLE}</style>{body}"


def _step(name: str, entry: Mapping[str, Any]) -> list[str]:
    state = entry.get("state", "")
    shown = escape(state) if state == "done" else f'<span class="bad">{escape(state)}</span>'
    return [escape(name), shown, f"{entry['seconds']:.0f}", escape(" ".join(entry.get("reason", [])))[:200]]


def _table(head: Sequence[str], rows: Rows) -> str:
    """An HTML table; cells are HTML."""
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return (
        f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"
        f"{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
    )


def _bar(value: float, most: float) -> str:
    return f'<span class="bar" style="width:{9 * value / most if most else 0:.2f}rem"></span>'


def _environment(found: Mapping[str, Any]) -> str:
    def flat(values: Mapping[str, Any]) -> list[list[str]]:
        rows = []
        for name, value in values.items():
            rows += flat(value) if isinstance(value, Mapping) else [[escape(str(name)), escape(str(value))]]
        return rows

    return _table(["", ""], flat(found["environment"]))


def _modes(found: Mapping[str, Any]) -> str:
    rates = {name: row["action_rate_hz"] for name, row in found.items() if isinstance(row, dict) and "latency_s" in row}
    most, other = max(rates.values(), default=0.0), rates.get("transformers")
    plain = next((rates[name] for name in ("ar", "none, ar", "ar, eager") if name in rates), None)
    rows = []
    for name, row in found.items():
        if name not in rates:
            said = row.get("skipped") if isinstance(row, dict) else row
            rows.append([escape(name), "", escape(str(said or f"{row['layer_bytes'] / 2**30:.2f} GiB of layers"))])
            continue
        latency = row["latency_s"]
        ratios = [f"{rates[name] / base:.2f}" if base else "" for base in (plain, other)]
        memory = "" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**30:.2f}"
        same = {True: "yes", False: "no"}.get(row.get("same_tokens"), "")
        rows.append(
            [
                escape(name),
                f"{rates[name]:.2f}",
                _bar(rates[name], most),
                *ratios,
                *(f"{latency[key] * 1e3:.1f}" for key in ("mean", "p95")),
                f"{row['image_age_s'] * 1e3:.1f}" if "image_age_s" in row else "",
                f"{row['forwards_per_action']:.2f}" if "forwards_per_action" in row else "",
                same,
                memory,
                escape(str(row.get("cuda_graphs", ""))),
            ]
        )
    head = [
        "",
        "actions/s",
        "",
        "× ar",
        "× transformers",
        "latency, ms",
        "p95",
        "image age, ms",
        "forwards",
        "same tokens",
        "GiB",
        "graphs",
    ]
    return _table(head, rows)


def _ticks(found: Mapping[str, Any]) -> str:
    stages = list(next(iter(found.values()))["stages_s"])
    rows = []
    for name, row in found.items():
        times = [row["tick_s"], *(row["stages_s"][stage] for stage in stages), row["host_gap_s"]]
        gap = f"{row['host_gap_s'] / row['tick_s']:.0%}" if row["tick_s"] else ""
        rows.append([escape(name), *(f"{seconds * 1e3:.3f}" for seconds in times), gap])
    text = "<p>Mean milliseconds per tick; the gap is the device's time between the stages.</p>"
    return text + _table(["", "tick", *stages, "gap", "share"], rows)


def _gemm(found: Mapping[str, Any]) -> str:
    kinds = list(dict.fromkeys(kind for row in found.values() for kind in row["seconds"]))
    rows = []
    for row in found.values():
        cells = [_microseconds(row["seconds"].get(kind, "")) for kind in kinds]
        shape = f"{escape(row['matrix'])} {row['shape'][0]} × {row['shape'][1]}"
        rows.append([shape, str(row["rows"]), *cells])
    return "<p>Microseconds.</p>" + _table(["matrix", "rows", *kinds], rows)


def _microseconds(found: Any) -> str:
    return escape(str(found))[:60] if isinstance(found, str) else f"{found * 1e6:.1f}"


def _attention(found: Mapping[str, Any]) -> str:
    kinds = list(dict.fromkeys(kind for row in found.values() for kind in row["seconds"]))
    rows = [
        [escape(name), str(row["rows"]), *(_microseconds(row["seconds"].get(kind, "")) for kind in kinds),
         f"{max(row['largest_difference'].values(), default=0.0):.2g}"]
        for name, row in found.items()
    ]  # fmt: skip
    return "<p>Microseconds, one layer.</p>" + _table(["batch", "rows", *kinds, "largest difference"], rows)


def _operators(found: Mapping[str, Any]) -> str:
    limits = found.get("limits", {})
    text = ", ".join(f"{key}: {limits[key]:.4g}" for key in ("bandwidth_gb_s", "dense_tflops") if key in limits)
    rows = []
    for row in (row for name, row in found.items() if name != "limits"):
        for kind, entry in row["contestants"].items():
            share = f"{entry['share_of_bound']:.0%}" if "share_of_bound" in entry else ""
            seconds = _microseconds(entry.get("seconds", entry.get("skipped", "")))
            bound = f"{row['bound_s'] * 1e6:.1f} ({escape(row['bound_by'])})"
            rows.append([escape(row["name"]), escape(row["batch"]), escape(kind), seconds, bound, share])
    head = ["", "batch", "by", "µs", "bound, µs", "share of it"]
    return f"<p>Measured limits: {escape(text)}.</p>" + _table(head, rows)


def _tests(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"<p>{escape(found['skipped'])}</p>"
    rows, failures = [], []
    for name, row in found.items():
        if "error" in row:
            rows.append([escape(name), "", "", "", f'<span class="bad">{escape(row["error"][-300:])}</span>'])
            continue
        bad = row["failures"] + row["errors"]
        shown = f'<span class="bad">{bad}</span>' if bad else "0"
        rows.append([escape(name), str(row["tests"]), shown, str(row["skipped"]), f"{row['seconds']:.0f}"])
        failures += [[escape(test), escape(message)] for test, message in row["failed"].items()]
    table = _table(["", "tests", "failed", "skipped", "seconds"], rows)
    return table + (_table(["failed", ""], failures) if failures else "")


def _soak(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"<p>{escape(found['skipped'])}</p>"
    keys = ("submitted", "actions", "switches", "different_actions", "drops", "cuda_graphs", "failures")
    rows = [
        [
            escape(name),
            *(escape(f"{value:.3g}" if isinstance(value := phase[key], float) else str(value)) for key in keys),
        ]
        for name, phase in found["soak"]["phases"].items()
    ]
    return f"<p>{'Passed' if found['soak']['passed'] else 'Failed'}.</p>" + _table(["", *keys], rows)


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
    "vllm": ("vLLM's OpenVLA", _modes),
    "environment": ("Environment", _environment),
}
