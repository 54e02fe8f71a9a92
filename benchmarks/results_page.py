# SPDX-License-Identifier: Apache-2.0
"""Writes docs/results.md: the text of benchmarks/results.md.in with the figures of the files in benchmarks/results.

python benchmarks/results_page.py

The template's fields are Python's (`{tree_nodes}`, `{acceptance[name]}`). Text between `<!-- for NAME -->` and
`<!-- end -->` is repeated for every JSON file of the benchmark NAME. Within such a block NAME is a field of the result:
the text is repeated for every entry of a list, and left out where a truth value is false.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specvla_ros.evaluation.statistics import paired_difference
from specvla_ros.planning.device import read_device
from specvla_ros.planning.stage_times import stage_times

Result = dict[str, Any]
Cells = list[list[str]]

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "results"
SAFETY = ROOT / "docs" / "explanation" / "safety.md"
_TRIED = re.compile(r"(?<=<!-- tried -->\n).*?(?=\n<!-- end of tried -->)", re.DOTALL)
_NANO = ROOT / "specvla_ros" / "policies" / "nano"
# What its weights decide; the text policy is made from it.
_OF_NANO = ("simulation", "speculation", "spec_vla", "acceptance_rules", "lvspec", "pipelining", "driving")
_EMULATED = ("simulation", "pipelining", "driving", "faults", "actionflow")  # what the devices' tables decide
_TEMPLATE = Path(__file__).with_name("results.md.in")
_TAG = re.compile(r"<!-- (?:for (?P<name>\w+)|end) -->")


def main() -> None:
    """Writes the page, and the figures that another page takes from a result."""
    PAGE.write_text(page(), encoding="utf-8")
    SAFETY.write_text(safety_page(), encoding="utf-8")


def page() -> str:
    """The page with all JSON files."""
    scope: dict[str, Any] = {}
    for name in VIEWS:
        files = sorted({*RESULTS.glob(f"{name}.json"), *RESULTS.glob(f"{name}_*.json")})
        scope[name] = [_scope(name, json.loads(file.read_text(encoding="utf-8")), file.name) for file in files]
    scope["no_gpu"] = not any(result["on_gpu"] for results in scope.values() for result in results)
    return _text(_template(), scope)


def safety_page() -> str:
    """The page on safety, with the table of what was tried from the fault suite's result."""
    result = json.loads((RESULTS / "faults_sim.json").read_text(encoding="utf-8"))
    return _TRIED.sub(table(_faults_by_kind(result)), SAFETY.read_text(encoding="utf-8"))


def section(result: Result) -> str:
    """The part of the page that shows one result."""
    name = result["benchmark"]
    block = next(node for node in _template() if not isinstance(node, str) and node.name == name)
    return _text([block], {name: [_scope(name, result, "not written yet")]})


def _scope(benchmark: str, result: Result, file: str) -> dict[str, Any]:
    """What the template may name of a result."""
    on_gpu = "cuda" in result["command"]
    own: dict[str, Any] = {"file": file, "on_gpu": on_gpu, "on_cpu": not on_gpu}
    if benchmark in _OF_NANO:
        own["other_weights"] = result.get("policy_weights") != weights_digest(_NANO)
    if benchmark in _EMULATED:
        own["other_emulation"] = not _of_these_tables(result)
    return {**result, **own, **VIEWS[benchmark](result)}


def _of_these_tables(result: Result) -> bool:
    """Whether a result was made with the stage times that its devices have today."""
    emulated = result.get("emulated", {})
    now = {name: stage_times(read_device(name)).as_json() for name in emulated}
    return bool(emulated) and all(
        math.isclose(found[stage], now[name][stage], rel_tol=1e-6)
        for name, found in emulated.items()
        for stage in now[name]
        if stage.endswith("_s")
    )


def weights_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


@dataclass(frozen=True)
class _Block:
    """A part of the template between `for NAME` and `end`."""

    name: str
    nodes: "list[str | _Block]"


def _template() -> list[str | _Block]:
    text, start, parts = _TEMPLATE.read_text(encoding="utf-8"), 0, []
    for tag in _TAG.finditer(text):
        parts.append((text[start : tag.start()], tag["name"]))
        start = tag.end()
    return _nodes(iter([*parts, (text[start:], None)]))


def _nodes(parts: Iterator[tuple[str, str | None]]) -> list[str | _Block]:
    """Text and blocks up to the end of this one.

    Args:
        parts: text before a tag, and the name in the tag; None for an end.
    """
    nodes: list[str | _Block] = []
    for text, name in parts:
        nodes.append(text)
        if name is None:
            break
        nodes.append(_Block(name, _nodes(parts)))
    return nodes


def _text(nodes: list[str | _Block], scope: Mapping[str, Any]) -> str:
    """Text of the nodes with their fields; paragraphs are one empty line apart."""
    return re.sub(r"\n{3,}", "\n\n", _filled(nodes, scope)).strip("\n") + "\n"


def _filled(nodes: list[str | _Block], scope: Mapping[str, Any]) -> str:
    return "".join(
        node.format_map(scope)
        if isinstance(node, str)
        else "".join(_filled(node.nodes, inner) for inner in _inner_scopes(scope, node.name))
        for node in nodes
    )


def _inner_scopes(scope: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """One scope for every entry of a list, or the outer one where a truth value is true."""
    found = scope[name]
    return [{**scope, **entry} for entry in found] if isinstance(found, list) else [scope] * bool(found)


# Tables: what a result's section shows, from its JSON.


def table(cells: Cells) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *body])


def _rate(found: Mapping[str, float]) -> str:
    """A share in percent with its interval."""
    return f"{100 * found['rate']:.0f} % [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def _ms(row: Mapping[str, Any], *names: str, digits: int = 0) -> str:
    """Statistics of the latency in milliseconds."""
    return " / ".join(f"{row['latency_s'][name] * 1e3:.{digits}f}" for name in names)


def _difference(pairs: Mapping[str, Any]) -> str:
    """Points of success against the first setting, with a 95 % interval."""
    found = paired_difference(pairs["only_first"], pairs["only_second"], pairs["first"]["episodes"])
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * points for points in found))


def _if_any(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)


def _by_size(result: Result, view: Callable[[str, Result], dict[str, Any]]) -> dict[str, Any]:
    return {"sizes": [{**size, "name": name, **view(name, size)} for name, size in result["sizes"].items()]}


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


def _emulation(result: Result) -> dict[str, Any]:
    reached = [["", "bandwidth", "matrix rate, by rows", "µs per layer"]]
    for device in result["devices"].values():
        shares = device["efficiency"]
        by_rows = ", ".join(f"{rows}: {100 * share:.0f} %" for rows, share in shares["compute_by_rows"].items())
        bandwidth = f"{100 * shares['bandwidth']:.0f} %"
        reached.append([device["name"], bandwidth, by_rows, f"{shares['layer_us']:.0f}"])
    cells = [["software, device", "work", "published", "emulated", "error of the time", "claimed"]]
    for figure in result["figures"]:
        band = figure["band_percent"]
        cells.append(
            [
                f"{figure['system']}, {result['devices'][figure['device']]['name']}",
                _work(figure),
                f"{figure['value']:g} {figure['unit']}",
                f"{figure['emulated']:.4g} {figure['unit']}",
                f"{round(figure['error_percent']):+d} %",
                "no" if band is None else f"{figure['use']}, within {band:g} %",
            ]
        )
    claimed = [abs(figure["error_percent"]) for figure in result["figures"] if figure["band_percent"] is not None]
    return {
        "reached": table(reached),
        "table": table(cells),
        "claimed": len(claimed),
        "largest": f"{max(claimed):.0f}",
        "fitted": sum(map(_fitted_numbers, result["devices"].values())),
        "least": f"{100 / (1 + max(figure['error_percent'] for figure in result['figures']) / 100):.0f}",
    }


def _fitted_numbers(device: Result) -> int:
    shares = device["efficiency"]["compute_by_rows"]
    fitted = [name for name, origin in device["sources"].items() if origin.startswith("fitted")]
    return sum(len(shares) if name.endswith("compute_by_rows") else 1 for name in fitted)


def _work(figure: Result) -> str:
    """What was timed, in words."""
    weights = "" if figure["weights"] == "none" else f" {figure['weights']}"
    rows, tokens = figure["rows"], figure["tokens"]
    what = {
        "answer": f"{tokens} tokens after {rows} rows",
        "pipeline": f"{tokens} frames in flight, {rows} rows each",
        "gathered": f"{tokens} frames in flight, {rows} rows each, gathered",
        "token": f"a token after {rows} rows",
        "prompt": f"a prompt of {rows} rows",
        "flow": f"{rows} rows of images, 10 steps",
    }[figure["work"]]
    return f"{figure['model']}{weights}, {what}"


def _simulation(result: Result) -> dict[str, Any]:
    columns, devices = result["results"], result.get("emulated") or result["devices"]
    lockstep = columns["lockstep"]
    cells = [["", *(f"realtime, emulated {devices[n]['name']}" if n in devices else n for n in columns)]]
    cells.append(["**success**", *(f"**{_rate(found['success'])}**" for found in columns.values())])
    for task in lockstep["tasks"]:
        cells.append([task, *(_rate(found["tasks"][task]["success"]) for found in columns.values())])
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("moved what the instruction names", lambda found: _rate(found["listened"])),
        ("latency p50 / p95", lambda found: "" if found is lockstep else f"{_ms(found, 'p50', 'p95')} ms"),
        ("actions per second", lambda found: f"{found['action_rate_hz']:.1f}"),
        ("median time to success", lambda found: f"{_median_time(found):.1f} s"),
        ("p against lockstep", lambda found: "" if found is lockstep else f"{found['against_lockstep']['p']:.2g}"),
    ]
    cells += [[label, *map(text, columns.values())] for label, text in rows]
    return {"table": table(cells), "last_seed": result["first_seed"] + result["episodes_per_task"] - 1}


def _median_time(found: Result) -> float:
    """Mean over the tasks of the median world time of their successes."""
    times = [task["time_to_success_s"] for task in found["tasks"].values() if task["time_to_success_s"] is not None]
    return sum(times) / len(times) if times else float("nan")


def _speculation(result: Result) -> dict[str, Any]:
    plain, *drafted = result["rows"]
    cells = [["", "success", "difference to ar", "forwards per action", "tokens per forward"]]
    cells[0] += ["tokens per verification", "largest bins off", "ms"]
    for row in result["rows"]:
        against, tau = ("", "") if row is plain else (_difference(row["against_first"]), f"{row['tau']:.2f}")
        forwards = [f"{row['forwards_per_action']:.2f}", f"{7 / row['forwards_per_action']:.2f}"]
        errors = [str(row["largest_bins_off"]), f"{row['action_s'] * 1e3:.1f}"]
        cells.append([row["name"], _rate(row["success"]), against, *forwards, tau, *errors])
    recipe = json.loads((_NANO / "draft" / "training.json").read_text(encoding="utf-8"))
    return {
        "speculating": len(drafted),
        "slower": sum(row["action_s"] > plain["action_s"] for row in drafted),
        **{key: recipe[key] for key in ("learning_rate", "own_steps")},
        "pairs": plain["success"]["episodes"],
        "bounds": " or ".join(f"{bound['mm']:g} mm and {bound['degrees']:g}°" for bound in result["tolerances"]),
        "table": table(cells),
        "accepted_in_one_forward": table(_accepted_in_one_forward(drafted)),
        "accepted_by_position": table(_accepted_by_position(drafted)),
    }


def _spec_vla(result: Result) -> dict[str, Any]:
    plain, *drafted = result["rows"]
    cells = [["", "success", "difference to ar", "tokens per verification", "forwards per action", "largest bins off"]]
    for row in result["rows"]:
        against, tau = ("", "") if row is plain else (_difference(row["against_first"]), f"{row['tau']:.2f}")
        figures = [f"{row['forwards_per_action']:.2f}", str(row["largest_bins_off"])]
        cells.append([row["name"], _rate(row["success"]), against, tau, *figures])
    case = result["case"]
    return {
        "pairs": plain["success"]["episodes"],
        "table": table(cells),
        "accepted_in_one_forward": table(_accepted_in_one_forward(drafted)),
        "accepted_by_position": table(_accepted_by_position(drafted)),
        "case_table": table(_case_cells(case)),
    }


def _case_cells(case: Result) -> Cells:
    """One action, a column for each forward; what is drafted and accepted in bold, with its bins off where any."""
    forwards = max(len(case["strict"]), len(case["relaxed"]))
    cells = [["", *(f"forward {number}" for number in range(1, forwards + 1))]]
    for name, committed in ((mode, case[mode]) for mode in ("strict", "relaxed")):
        shown = [" ".join(_case_token(token) for token in tokens) for tokens in committed]
        cells.append([name, *shown, *[""] * (forwards - len(shown))])
    return cells


def _case_token(token: Result) -> str:
    off = f" (±{token['bins_off']})" if token["bins_off"] else ""
    return f"{token['token']}" if token["why"] == "target" else f"**{token['token']}{off}**"


def _accepted_in_one_forward(rows: list[Result]) -> Cells:
    """Spec-VLA's table 2: shares of the accept lengths."""
    lengths = range(max(int(length) for row in rows for length in row["share_by_accept_length"]) + 1)
    shares = [[f"{100 * row['share_by_accept_length'].get(str(n), 0):.0f} %" for n in lengths] for row in rows]
    head = ["drafts accepted in one forward", *map(str, lengths)]
    return [head, *([row["name"], *cells] for row, cells in zip(rows, shares, strict=True))]


def _accepted_by_position(rows: list[Result]) -> Cells:
    """Spec-VLA's table 3: where in the answer accept lengths were reached."""
    positions = sorted({int(position) for row in rows for position in row["accept_length_by_place"]})
    cells = [["accepted, by the first drafted token", *(str(position + 1) for position in positions)]]
    for row in rows:
        means = (row["accept_length_by_place"].get(str(position)) for position in positions)
        cells.append([row["name"], *(_if_any(mean, "{:.2f}") for mean in means)])
    return cells


def _acceptance_rules(result: Result) -> dict[str, Any]:
    return {
        "millimetres": result["tolerance"]["metres"] * 1e3,
        "nano_starts": result["nano"][0]["success"]["episodes"],
        "nano_table": table(_rules(result["nano"])),
        "text_starts": result["text"][0]["success"]["episodes"],
        "text_table": table(_rules(result["text"])),
    }


def _rules(rows: list[Result]) -> Cells:
    cells = [["", "success", "difference to ar", "forwards per answer", "τ", "agreement"]]
    for row in rows:
        against, tau = ("", "") if row is rows[0] else (_difference(row["against_first"]), f"{row['tau']:.2f}")
        forwards, agreement = f"{row['forwards_per_action']:.2f}", f"{row['agreement']:.1%}"
        cells.append([row["name"], _rate(row["success"]), against, forwards, tau, agreement])
    return cells


def _lvspec(result: Result) -> dict[str, Any]:
    rows = {row["name"]: row for row in result["rows"]}
    plain = result["rows"][0]
    return {
        "starts": plain["success"]["episodes"],
        "tokens": f"{plain['tokens_per_action']:.0f}",
        "millions": f"{result['text_policy']['parameters'] / 1e6:.1f}",
        "comparisons": [
            {"title": title, "table": table(_lvspec_cells([rows[name] for name in names], plain))}
            for title, names in result["tables"].items()
        ],
    }


def _lvspec_cells(rows: list[Result], plain: Result) -> Cells:
    cells = [["", "success", "difference to plain", "forwards per answer", "τ", "agreement"]]
    cells[0] += ["exact", "loosened", "shifted", "rule's share of a tick", "ms"]
    for row in rows:
        is_plain, why = row is plain, row["why"]
        against, tau = ("", "") if is_plain else (_difference(row["against_first"]), f"{row['tau']:.2f}")
        accepted = [
            why.get("exact", 0.0),
            why.get("irrelevant", 0.0) + why.get("deferred", 0.0),
            why.get("shifted", 0.0),
        ]
        cells.append(
            [
                row["name"],
                _rate(row["success"]),
                against,
                f"{row['forwards_per_action']:.2f}",
                tau,
                f"{row['agreement']:.1%}",
                *("" if is_plain else f"{share:.1%}" for share in accepted),
                _if_any(row["rule_share_of_tick"], "{:.1%}"),
                f"{row['action_s'] * 1e3:.1f}",
            ]
        )
    return cells


def _fly(result: Result) -> dict[str, Any]:
    rows: list[Result] = result["rows"]
    plain = rows[0]
    heads = ["forwards per token", "τ", "of the draft, per token", "ms per token", "plain's time / its own"]
    cells = [["", *heads, "own choice", "as plain", "perplexity", "recovery", "right"]]
    for row in rows:
        counts = [f"{row['forwards_per_token']:.3f}", f"{row['tau']:.2f}", f"{row['draft_forwards_per_token']:.2f}"]
        times = [f"{row['token_s'] * 1e3:.1f}", "" if row is plain else _interval(row["plain_time_over_own"])]
        shares = [f"{row['own_choice']:.1%}", f"{row['as_plain']:.1%}"]
        worth = [f"{row['perplexity']:.3f}", f"{row['recovery']:.1%}", f"{row['right']} of {row['judged']}"]
        cells.append([row["name"], *counts, *times, *shares, *worth])
    forwards, time = result["goals"]["forwards"], result["goals"]["time"]
    training = result["draft_training"]
    return {
        "table": table(cells),
        "parameters_m": {name: f"{n / 1e6:.0f}" for name, n in result["parameters"].items()},
        "gate_us": f"{1e6 * (result['gate_s']['fly'] - result['gate_s']['strict']):.0f}",
        "strict_us": f"{1e6 * result['gate_s']['strict']:.0f}",
        "kinds": ", ".join(result["kinds"]),
        "trained": [{**training, "agreement": training["validation"][-1]["agreement"]}] if training else [],
        "forwards_goal": _reached(forwards),
        "share": f"{forwards['share']:.3f}",
        "time_goal": _reached(time),
        "assisted": ", ".join(f"K {k}: {_interval(ratio)}" for k, ratio in time["ratios"].items()),
    }


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _reached(goal: Mapping[str, Any]) -> str:
    return "reached" if goal["reached"] else "not reached"


def _tick_cost(result: Result) -> dict[str, Any]:
    sizes = result["sizes"].values()
    first = next(iter(sizes))
    cells = [["", *result["sizes"]]]
    cells += [[part, *(f"{size['seconds'][part] * 1e3:.2f}" for size in sizes)] for part in first["seconds"]]
    cells += [
        [f"share of a tick: {part}", *(f"{size['share_of_tick'][part]:.1%}" for size in sizes)]
        for part in first["share_of_tick"]
    ]
    return {"table": table(cells)}


def _pipelining(result: Result) -> dict[str, Any]:
    devices = list(result["devices"].values())
    heads = ("actions/s", "forwards", "overtaken")
    cells = [["", *(head for device in devices for head in (f"{device['name']}: ms", *heads))]]
    for mode in devices[0]["frame_always_waiting"]:
        row = [mode]
        for found in (device["frame_always_waiting"][mode] for device in devices):
            row += [f"{found['latency_s'] * 1e3:.0f}", f"{found['actions_per_s']:.1f}"]
            row += [f"{found['forwards_per_action']:.2f}", f"{found['overtaken']:.0%}"]
        cells.append(row)
    closed = [device for device in devices if device["closed_loop"]]
    return {"table": table(cells), "closed_loop": [_closed_loop(closed)] if closed else []}


def _closed_loop(devices: list[Result]) -> dict[str, Any]:
    return {
        "starts": devices[0]["closed_loop"]["ar"]["success"]["episodes"],
        "tables": "\n\n".join(table(_closed_cells(device)) for device in devices),
    }


def _closed_cells(device: Result) -> Cells:
    heads = ("success", "difference to ar", "in its own time", "time to success", "ar's time / its own")
    cells = [[f"emulated {device['name']}", *heads, "latency p50 / p95, ms", "actions/s"]]
    for mode, row in device["closed_loop"].items():
        against = "" if mode == "ar" else _difference(row["against_ar"])
        in_time = f"{row['in_time'] / row['success']['episodes']:.0%}"
        times = [_if_any(row["time_to_success_s"], "{:.1f} s"), _if_any(row["plain_time_over_own"], "{:.2f}")]
        speed = [_ms(row, "p50", "p95"), f"{row['action_rate_hz']:.1f}"]
        cells.append([mode, _rate(row["success"]), against, in_time, *times, *speed])
    return cells


def _driving(result: Result) -> dict[str, Any]:
    rows: list[Result] = result["rows"]
    tables = [
        f"### {robot}\n\n" + table(_driving_cells([row for row in rows if row["robot"] == robot]))
        for robot in dict.fromkeys(row["robot"] for row in rows)
    ]
    return {"tables": "\n\n".join(tables), "starts": rows[0]["success"]["episodes"]}


def _driving_cells(rows: list[Result]) -> Cells:
    followers = list(dict.fromkeys(row["follower"] for row in rows))
    cells = [["emulated", "mode", *followers]]
    for device, mode in dict.fromkeys((row["name"], row["mode"]) for row in rows):
        of = {row["follower"]: row for row in rows if (row["name"], row["mode"]) == (device, mode)}
        shown = [_rate(of[name]["success"]) for name in followers]
        against = ["", *(f", {_difference(of[name]['against'])}" for name in followers[1:])]
        cells.append([device, mode, *(rate + difference for rate, difference in zip(shown, against, strict=True))])
    return cells


def _decode_modes(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        quantized = size.get("quantized")
        return {
            "table": table(_mode_cells(name, size["modes"])),
            "quantized": [{"table": table(_quantized_cells(name, quantized))}] if quantized else [],
        }

    return {"no_vision": not result["vision"], **_by_size(result, view)}


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
        cells.append([mode, *rates, _ms(row, "mean", "p50", "p95", digits=1), *counts, memory])
    return cells


def _quantized_cells(size: str, formats: Result) -> Cells:
    cells = [[f"{size}: weights", "mode", "actions/s", "× ar", "latency mean, ms", "latency × ar", "MiB"]]
    for name, found in formats.items():
        if "skipped" in found:
            cells.append([name, f"skipped: {found['skipped']}", *[""] * 5])
        for mode, row in found.get("modes", {}).items():
            rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar")]
            latency = [_ms(row, "mean", digits=1), f"{row['latency_over_ar']:.2f}"]
            cells.append([name, mode, *rates, *latency, f"{found['layer_bytes'] / 2**20:.1f}"])
    return cells


def _sensitivity(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        cells = [[f"{name}: tokens", "prompt", *size["points"][0]["modes"]]]
        for point in size["points"]:
            rows = point["modes"].values()
            times = [f"{row['seconds_per_action'] * 1e3:.1f} ({_ms(row, 'mean', digits=1)})" for row in rows]
            cells.append([str(point["tokens"]), str(point["prompt_rows"]), *times])
        return {"table": table(cells)}

    return _by_size(result, view)


def _kv_layouts(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        cells = [[name, "MB copied per tick", "copying alone, ms", "tick, ms", "tick / slots'"]]
        for layout, row in size["layouts"].items():
            seconds = [f"{row[key] * 1e3:.2f}" for key in ("move_s", "tick_s")]
            cells.append([layout, f"{row['moved_bytes'] / 1e6:.1f}", *seconds, f"{row['tick_over_slots']:.2f}"])
        return {"table": table(cells)}

    return _by_size(result, view)


def _actionflow(result: Result) -> dict[str, Any]:
    devices = list(result["devices"].values())
    heads = [device["name"] for device in devices]
    layouts = [["keys and values", *(f"{head}: {what}" for head in heads for what in ("published", "emulated"))]]
    for rows in zip(*(device["layouts"] for device in devices), strict=True):
        figures = [_if_any(row[key], "{:.2f}") for row in rows for key in ("published", "emulated")]
        layouts.append([rows[0]["layout"], *figures])
    depths = [["tokens", "in flight", *(f"{head}: {what}" for head in heads for what in _DEPTH)]]
    for rows in zip(*(device["depth"] for device in devices), strict=True):
        shown = [
            text
            for row in rows
            for text in (f"{row['actions_per_s']:.2f}", *(f"{row[key] * 1e3:.0f}" for key in _AGES))
        ]
        depths.append([str(rows[0]["tokens"]), str(rows[0]["max_in_flight"]), *shown])
    lengths = [["tokens", "prompt", *(f"{head}: {what}" for head in heads for what in ("ar", "pipeline", "gain"))]]
    for rows in zip(*(device["lengths"] for device in devices), strict=True):
        shown = [f"{row[key]:.2f}" for row in rows for key in ("ar_hz", "pipeline_hz", "gain")]
        lengths.append([str(rows[0]["tokens"]), str(rows[0]["prompt_rows"]), *shown])
    return {
        "layouts_table": table(layouts),
        "breakdown_table": table(_breakdown_cells(devices)),
        "depth_table": table(depths),
        "lengths_table": table(lengths),
    }


_DEPTH = ("actions/s", "latency, ms", "oldest picture, ms")
_AGES = ("latency_s", "oldest_image_s")


def _breakdown_cells(devices: list[Result]) -> Cells:
    cells = [["", *(device["name"] for device in devices)]]
    for mode, parts in devices[0]["breakdown"].items():
        for part in parts:
            found = [device["breakdown"][mode] for device in devices]
            shown = [f"{times[part] * 1e3:.1f} ms ({times[part] / sum(times.values()):.0%})" for times in found]
            cells.append([f"{mode}: {part}", *shown])
    return cells


def _kernels(result: Result) -> dict[str, Any]:
    def view(name: str, size: Result) -> dict[str, Any]:
        rows = {kind: [row for row in size["rows"] if row["kind"] == kind] for kind in ("kernel", "stage")}
        return {f"{kind}_table": table(_kernel_cells(kind, found)) for kind, found in rows.items()}

    return {"launch_us": result["launch_s"] * 1e6, **_by_size(result, view)}


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


def _soak(result: Result) -> dict[str, Any]:
    bounds = result["bounds"]
    cells = [["", "frames", "actions", "forwards per action", "different actions", "grown by, MiB", "failures"]]
    for name, phase in result["phases"].items():
        different = f"{phase['different_actions']} ({phase['difference_rate']:.2%})"
        grown = " / ".join(f"{phase[key] / 2**20:.2f}" for key in ("resident_growth", "gpu_growth"))
        counts = [str(phase["submitted"]), str(phase["actions"]), f"{phase['forwards_per_action']:.2f}"]
        cells.append([name, *counts, different, grown, "; ".join(phase["failures"]) or "none"])
    return {
        "verdict": "passed" if result["passed"] else "failed",
        "resident_mib": bounds["resident_growth"] / 2**20,
        "gpu_mib": bounds["gpu_growth"] / 2**20,
        "table": table(cells),
    }


def _guard_stop(result: Result) -> dict[str, Any]:
    cells = [["output", "who falls silent", "rounds", "median, s", "largest, s", "promised, s"]]
    for row in result["rows"]:
        times = [f"{row[name]:.3f}" if row[name] is not None else "" for name in ("median_s", "max_s", "promised_s")]
        cells.append([row["output"], row["silent"], str(row["rounds"]), *times])
    return {"table": table(cells)}


def _attacks(result: Result) -> dict[str, Any]:
    classes = result["classes"]
    cells = [["class", "tried", "what they did", "failed", "slowest, s", "most memory, MiB"]]
    for name, found in classes.items():
        did = ", ".join(f"{count} {outcome}" for outcome, count in found["outcomes"].items())
        numbers = (found["failed"], found["slowest_s"], found["peak_mib"])
        cells.append([name, str(found["tried"]), did, *map(str, numbers)])
    tried, failed = (sum(found[key] for found in classes.values()) for key in ("tried", "failed"))
    not_run = ", ".join(result.get("not_run", ())) or "none"
    return {"tried": tried, "failed": failed, "table": table(cells), "not_run": not_run}


_KINDS = {
    "kill": "a process killed (kill -9), started again",
    "freeze": "a process stopped (SIGSTOP), gone on with",
    "lose": "a topic lost by the network, and back",
    "clock": "the nodes' clock still, jumping, slow, fast",
    "frames": "frames late, doubled, out of order, with lying stamps",
    "actions": "actions of NaN, infinity, too large, leaping",
    "tool": "measured poses of NaN, still, jumping",
    "commands": "a driver that sends NaN, leaps, runs away",
    "twin": "two publishers of commands, of actions",
    "press": "stop pressed",
    "release": "the dead-man's switch released",
    "flood": "a flood of instructions",
}


def _faults(result: Result) -> dict[str, Any]:
    judge = result["judge"]
    return {
        "fault_table": table(_fault_cells(result["faults"])),
        "mode_table": table(_mode_and_output_cells(result["modes_and_outputs"])),
        "stop_table": table(_stop_cells(result["stops"])),
        "extreme_table": table(_extreme_cells(result)),
        "timing_table": table(_timing_cells(result["modes"])),
        "real_ran": [{"real_table": table(_real_cells(result["real"]))}] if result["real"] else [],
        "speed_percent": f"{100 * judge['speed_share'] - 100:.0f}",
        "outside_mm": f"{1e3 * judge['outside_m']:g}",
        "stands_mm_s": f"{1e3 * judge['stands_m_s']:g}",
    }


def _fault_cells(rows: list[Result]) -> Cells:
    cells = [
        ["fault", "runs", "beyond limits", "late", "stop, s", "way, mm", "goes on", "no guard: runs", "beyond", "late"]
    ]
    for row in rows:
        bare = row["bare"]
        without = [str(bare[name]) for name in ("runs", "beyond", "late")] if bare["runs"] else ["", "", ""]
        cells.append([row["fault"], *_counted(row), *without])
    return cells


def _counted(row: Result) -> list[str]:
    late = f"{row['late']} of {row['promised']}" if row["promised"] else ""
    by_hand = f", {row['cleared']} by hand" if row["cleared"] else ""
    return [str(row["runs"]), str(row["beyond"]), late, *_stop(row), f"{row['recovered']}{by_hand}"]


def _stop(row: Result) -> list[str]:
    """Median and largest time in seconds and way in millimetres."""
    if not row["stopped"]:
        return ["", ""]
    time = f"{row['time_s_median']:.2f} / {row['time_s_max']:.2f}"
    return [time, f"{1e3 * row['distance_m_median']:.0f} / {1e3 * row['distance_m_max']:.0f}"]


def _faults_by_kind(result: Result) -> Cells:
    cells = [["what was tried", "runs", "beyond limits", "moved after its time", "longest stop, s", "longest way, mm"]]
    for kind, words in _KINDS.items():
        rows = [row for row in result["faults"] if row["fault"].split()[0] == kind]
        runs, beyond, late, promised = (
            sum(row[name] for row in rows) for name in ("runs", "beyond", "late", "promised")
        )
        stopped = [row for row in rows if row["stopped"]]
        longest = [max((row[name] for row in stopped), default=0.0) for name in ("time_s_max", "distance_m_max")]
        stop = [f"{longest[0]:.2f}", f"{1e3 * longest[1]:.0f}"] if stopped else ["", ""]
        cells.append([words, str(runs), str(beyond), f"{late} of {promised}" if promised else "", *stop])
    return cells


def _mode_and_output_cells(rows: list[Result]) -> Cells:
    cells = [["mode", "output", "runs", "beyond limits", "late", "stop, s", "way, mm", "goes on"]]
    return cells + [[row["mode"], row["output"], *_counted(row)] for row in rows]


def _stop_cells(rows: list[Result]) -> Cells:
    cells = [["robot", "output", "limit, m/s", "stops", "at most from, m/s", "stop, s", "way, mm"]]
    for row in rows:
        fastest = f"{row['speed_m_s_max']:.2f}" if row["stopped"] else ""
        cells.append([row["robot"], row["output"], f"{row['speed']:g}", str(row["stopped"]), fastest, *_stop(row)])
    return cells


def _extreme_cells(result: Result) -> Cells:
    names = {
        "without_fault": "no fault, guard",
        "with_faults": "faults, guard",
        "without_guard_extremes": "faults, no guard",
    }
    cells = [["largest of all runs", "speed", "speed of the tool", "acceleration", "outside, mm"]]
    for name, words in names.items():
        found = result[name]
        shares = [f"{100 * found[each]:.0f} %" for each in ("speed_share", "tool_share", "acceleration_share")]
        cells.append([words, *shares, f"{1e3 * found['outside_m']:.1f}"])
    return cells


def _timing_cells(modes: Mapping[str, Result]) -> Cells:
    cells = [["mode", "actions per second", "latency p50 / largest, ms", "in flight"]]
    for mode, row in modes.items():
        latency = f"{1e3 * row['latency_p50_s']:.0f} / {1e3 * row['latency_max_s']:.0f}"
        cells.append([mode, f"{row['action_rate_hz']:.1f}", latency, str(row["in_flight"])])
    return cells


def _real_cells(rows: list[Result]) -> Cells:
    cells = [["fault", "rounds", "ran", "beyond limits", "late", "stop, s", "way, mm", "goes on", "bytes lost"]]
    return cells + [[row["fault"], str(row["rounds"]), *_counted(row), str(row["bytes_lost"])] for row in rows]


VIEWS: dict[str, Callable[[Result], dict[str, Any]]] = {
    "emulation": _emulation,
    "ar": _ar,
    "linear": _linear,
    "simulation": _simulation,
    "speculation": _speculation,
    "spec_vla": _spec_vla,
    "acceptance_rules": _acceptance_rules,
    "lvspec": _lvspec,
    "fly": _fly,
    "tick_cost": _tick_cost,
    "pipelining": _pipelining,
    "driving": _driving,
    "decode_modes": _decode_modes,
    "sensitivity": _sensitivity,
    "kv_layouts": _kv_layouts,
    "actionflow": _actionflow,
    "kernels": _kernels,
    "soak": _soak,
    "guard_stop": _guard_stop,
    "faults": _faults,
    "attacks": _attacks,
    "attack_nodes": _attacks,
}


if __name__ == "__main__":
    main()
