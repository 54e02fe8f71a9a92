# SPDX-License-Identifier: Apache-2.0
"""What the page shows of speed: decoders, kernels, layouts, modes on random weights."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.results_cells import Cells, Result, by_size, ms, table


def _ar(result: Result) -> dict[str, Any]:
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("language model parameters", lambda f: f"{f['parameters'] / 1e6:.0f} M"),
        ("vision and projector", lambda f: f"{f['vision_s'] * 1e3:.1f} ms"),
        ("prefill of 290 rows", lambda f: f"{f['prefill_s'] * 1e3:.1f} ms"),
        ("decode step", lambda f: f"{f['decode_step_s'] * 1e3:.2f} ms"),
        ("decode rate", lambda f: f"{f['decode_tokens_per_s']:.1f} tokens/s"),
        ("share of the bandwidth limit", lambda f: f"{f['decode_share_of_bandwidth']:.0%}"),
        ("language model per action, ours", lambda f: f"{f['language_model_s'] * 1e3:.1f} ms"),
        ("language model per action, transformers", lambda f: f"{f['transformers_language_model_s'] * 1e3:.1f} ms"),
        ("**transformers' time / ours**", lambda f: f"**{f['speedup_over_transformers']:.2f}**"),
        ("same tokens", lambda f: "yes" if f["same_tokens"] else "no"),
    ]
    sizes = result["sizes"]
    return {"table": table([["", *sizes], *([label, *map(text, sizes.values())] for label, text in rows)])}


def _linear(result: Result) -> dict[str, Any]:
    cells = [["", "rows", "torch", "ours", "ratio"]]
    for case in result["cases"]:
        rates = [f"{case['gb_per_s'][name]:.1f}" for name in ("torch", "ours")]
        name = f"{case['matrix']}, {case['shape'][0]} × {case['shape'][1]}"
        cells.append([name, str(case["rows"]), *rates, f"**{case['speedup']:.2f}**"])
    return {"table": table(cells)}


def _tick_cost(result: Result) -> dict[str, Any]:
    sizes, before = result["sizes"], result.get("before") or {"sizes": {}}

    def cell(size: str, kind: str, part: str, shown: Callable[[float], str]) -> str:
        old, now = before["sizes"].get(size, {}).get(kind, {}), shown(sizes[size][kind][part])
        return _from_to(shown(old[part]), now) if part in old else now

    first = next(iter(sizes.values()))
    cells = [["", *sizes]]
    for kind, name, shown in (
        ("seconds", "{}", lambda seconds: f"{seconds * 1e3:.2f}"),
        ("share_of_tick", "share of a tick: {}", lambda share: f"{share:.1%}"),
    ):
        cells += [[name.format(part), *(cell(size, kind, part, shown) for size in sizes)] for part in first[kind]]
    return {"table": table(cells), "has_before": bool(before["sizes"])}


def _decode_modes(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        quantized = size.get("quantized")
        return {
            "table": table(_mode_cells(name, size["modes"])) if "modes" in size else "",
            "quantized": [{"table": table(_quantized_cells(name, quantized))}] if quantized else [],
        }

    alone = not any("modes" in size for size in result["sizes"].values())
    of_sizes = ", ".join(result["sizes"])
    flags = {"no_vision": not result["vision"], "all_modes": not alone, "formats_alone": alone}
    return {**flags, "of_sizes": of_sizes, **by_size(result, view)}


def _mode_cells(size: str, modes: Result) -> Cells:
    cells = [[size, "actions/s", "× ar", "× transformers", "latency mean / p50 / p95, ms"]]
    cells[0] += ["forwards", "overtaken", "MiB"]
    for mode, row in modes.items():
        if "skipped" in row:
            cells.append([mode, f"skipped: {row['skipped']}", *[""] * 6])
            continue
        rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar", "rate_over_transformers")]
        counts = [f"{row['forwards_per_action']:.2f}", f"{row['overtaken']:.0%}"] if "overtaken" in row else ["", ""]
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        cells.append([mode, *rates, ms(row, "mean", "p50", "p95", digits=1), *counts, memory])
    return cells


def _quantized_cells(size: str, formats: Result) -> Cells:
    cells = [[f"{size}: weights", "mode", "actions/s", "× ar", "latency mean, ms", "latency × ar", "MiB"]]
    for name, found in formats.items():
        if "skipped" in found:
            cells.append([name, f"skipped: {found['skipped']}", *[""] * 5])
        for mode, row in found.get("modes", {}).items():
            rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar")]
            latency = [ms(row, "mean", digits=1), f"{row['latency_over_ar']:.2f}"]
            cells.append([name, mode, *rates, *latency, f"{found['layer_bytes'] / 2**20:.1f}"])
    return cells


def _sensitivity(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        cells = [[f"{name}: tokens", "prompt", *size["points"][0]["modes"]]]
        for point in size["points"]:
            rows = point["modes"].values()
            times = [f"{row['seconds_per_action'] * 1e3:.1f} ({ms(row, 'mean', digits=1)})" for row in rows]
            cells.append([str(point["tokens"]), str(point["prompt_rows"]), *times])
        return {"table": table(cells)}

    return by_size(result, view)


def _kv_layouts(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        cells = [[name, "MB copied per tick", "copying alone, ms", "tick, ms", "tick / slots'"]]
        for layout, row in size["layouts"].items():
            seconds = [f"{row[key] * 1e3:.2f}" for key in ("move_s", "tick_s")]
            cells.append([layout, f"{row['moved_bytes'] / 1e6:.1f}", *seconds, f"{row['tick_over_slots']:.2f}"])
        return {"table": table(cells)}

    return by_size(result, view)


def _kernels(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        rows = {kind: [row for row in size["rows"] if row["kind"] == kind] for kind in ("kernel", "stage")}
        return {f"{kind}_table": table(_kernel_cells(kind, found)) for kind, found in rows.items()}

    return {"launch_us": result["launch_s"] * 1e6, **by_size(result, view)}


def _kernel_cells(kind: str, rows: list[Result]) -> Cells:
    """Contestants that ran nowhere get no column."""
    ran = (name for row in rows for name, found in row["contestants"].items() if "seconds" in found)
    contestants = list(dict.fromkeys(ran))
    cells = [[kind, "on", "MB", "MFLOP", "bound, µs", "by", *contestants]]
    for row in rows:
        counts = [f"{row['bytes'] / 1e6:.3g}", f"{row['operations'] / 1e6:.3g}", f"{row['bound_s'] * 1e6:.1f}"]
        times = [_share_of_bound(row["contestants"].get(name)) for name in contestants]
        cells.append([row["name"], row["batch"], *counts, row["bound_by"], *times])
    return cells


def _share_of_bound(found: Result | None) -> str:
    if found is None:
        return ""
    if "skipped" in found:
        return str(found["skipped"])
    share = f" ({found['share_of_bound']:.0%})" if "share_of_bound" in found else ""
    return f"{found['seconds'] * 1e6:.1f}{share}"


def _launches(result: Result) -> dict[str, Any]:
    before, now = result["before"]["cases"], result["cases"]
    ticks: Cells = [["", "launches", "behind", "copies", "read-backs"]]
    for mode in now:
        for kind, begins in (("a prompt begins", True), ("trees alone", False)):
            found = [[each for each in cases[mode]["ticks"] if each["begins"] == begins] for cases in (before, now)]
            if all(found):
                columns = ("launches", "behind", "copies", "read_backs")
                ticks.append(
                    [f"{mode}, {kind}", *(_from_to(*(_most(rows, name) for rows in found)) for name in columns)]
                )
    graphs: Cells = [["graph", "launches"]]
    sizes = [{graph: count for case in cases.values() for graph, count in _graphs(case)} for cases in (before, now)]
    graphs += [[graph, _from_to(sizes[0].get(graph, 0), count)] for graph, count in sizes[1].items()]
    return {"ticks": table(ticks), "graphs": table(graphs)}


def _graphs(case: Result) -> list[tuple[str, int]]:
    """Of each kind of graph the largest: forwards by their operators' tiles, drafts by their depth."""
    found: dict[str, int] = {}
    for each in case["graphs"]:
        kind = each["graph"].partition(", trees")[0]
        if kind.startswith("forward"):
            rows = int(kind.split()[2])
            kind = "forward of 1 to 64 rows" if rows <= 64 else "forward of more rows"
        elif kind.startswith("draft keys"):
            kind = "draft keys of a prompt"
        elif "draft" in kind:
            kind = f"{kind}, {each['graph'].rpartition(', ')[2]}"
        found[kind] = max(found.get(kind, 0), each["launches"])
    return list(found.items())


def _most(ticks: list[Result], name: str) -> int:
    return max(int(tick[name]) for tick in ticks)


def _from_to(before: int | str, now: int | str) -> str:
    return f"{before} → **{now}**" if before != now else str(now)


VIEWS: Mapping[str, Callable[[Result], dict[str, Any]]] = {
    "ar": _ar,
    "linear": _linear,
    "tick_cost": _tick_cost,
    "decode_modes": _decode_modes,
    "sensitivity": _sensitivity,
    "kv_layouts": _kv_layouts,
    "kernels": _kernels,
    "launches": _launches,
}
