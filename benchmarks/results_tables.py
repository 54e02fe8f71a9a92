# SPDX-License-Identifier: Apache-2.0
"""Fields that the results page's template needs in addition to a result: shares, labels, columns."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specvla_ros.lab.evaluation.paired import paired_difference

Result = dict[str, Any]
_HEAD = Path(__file__).resolve().parents[1] / "specvla_ros" / "lab" / "bundled" / "nano" / "draft" / "training.json"
_BUDGETS_S = (0.5, 1.0, 2.0)


def table(cells: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first row is its header."""
    head, *body = ("| " + " | ".join(row) + " |" for row in cells)
    return "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *body])


def rate(found: Mapping[str, float]) -> str:
    """Formats a share in percent with its interval."""
    return f"{100 * found['rate']:.0f} % [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def points(pairs: Mapping[str, Any]) -> str:
    """Formats the difference in success to the first setting, in points, with a 95 % interval."""
    found = paired_difference(pairs["only_first"], pairs["only_second"], pairs["first"]["episodes"])
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * point for point in found))


def interval(found: Mapping[str, float]) -> str:
    """Formats a ratio with its interval."""
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _beside_first(rows: Sequence[Result]) -> list[Result]:
    """The rows, marking the first as the reference, which does not speculate."""
    return [{**rows[0], "against_first": None, "tau": None}, *rows[1:]]


def _named(rows: Mapping[str, Result], name: str) -> list[Result]:
    return [{name: key, **row} for key, row in rows.items()]


def _by_size(result: Result, view: Callable[[str, Result], Result]) -> Result:
    """Adds the fields of `view` to each model size of a benchmark."""
    return {"sizes": [{**size, "name": name, **view(name, size)} for name, size in result["sizes"].items()]}


# Speed


def _tick_cost(result: Result) -> Result:
    sizes, before = result["sizes"], (result.get("before") or {"sizes": {}})["sizes"]

    def cell(size: str, kind: str, part: str, shown: Callable[[float], str]) -> str:
        old = {_label(name): value for name, value in before.get(size, {}).get(kind, {}).items()}
        label, now = _label(part), shown(sizes[size][kind][part])
        return _from_to(shown(old[label]), now) if label in old else now

    cells = [["", *sizes]]
    for kind, name, shown in (
        ("seconds", "{}", lambda seconds: f"{seconds * 1e3:.2f}"),
        ("share_of_tick", "share of a tick: {}", lambda share: f"{share:.1%}"),
    ):
        parts = next(iter(sizes.values()))[kind]
        cells += [[name.format(_label(part)), *(cell(size, kind, part, shown) for size in sizes)] for part in parts]
    return {"table": table(cells), "has_before": bool(before)}


def _decode_modes(result: Result) -> Result:
    def run(row: Result) -> Result:
        """Marks a skipped row; only our rows count forwards."""
        skipped = [row] if "skipped" in row else []
        mine = row if "overtaken" in row else {**row, "forwards_per_action": None, "overtaken": None}
        return {**mine, "ran": not skipped, "skipped": skipped}

    def view(name: str, size: Result) -> Result:
        formats = size.get("quantized") or {}
        rows = [
            {"format": format_, "layer_bytes": found.get("layer_bytes"), **run(row)}
            for format_, found in formats.items()
            for row in ([found] if "skipped" in found else _named(found["modes"], "mode"))
        ]
        modes = [run(row) for row in _named(size.get("modes", {}), "mode")]
        return {"any_modes": bool(modes), "modes": modes, "any_formats": bool(rows), "formats": rows}

    alone = not any("modes" in size for size in result["sizes"].values())
    flags = {"no_vision": not result["vision"], "all_modes": not alone, "formats_alone": alone}
    return {**flags, "of_sizes": ", ".join(result["sizes"]), **_by_size(result, view)}


def _kernels(result: Result) -> Result:
    def view(name: str, size: Result) -> Result:
        return {f"{kind}s": [_of_kind(kind, size["rows"])] for kind in ("kernel", "stage")}

    return {"launch_us": result["launch_s"] * 1e6, **_by_size(result, view)}


def _of_kind(kind: str, rows: list[Result]) -> Result:
    """The rows of a kind; contestants that never ran get no column."""
    mine = [row for row in rows if row["kind"] == kind]
    ran = dict.fromkeys(name for row in mine for name, found in row["contestants"].items() if "seconds" in found)
    shown = [{**row, "of": [{"time": _share_of_bound(row["contestants"].get(name))} for name in ran]} for row in mine]
    return {"kind": kind, "ran": [{"contestant": name} for name in ran], "rows": shown}


def _share_of_bound(found: Result | None) -> str:
    if found is None:
        return ""
    if "skipped" in found:
        return str(found["skipped"])
    share = f" ({found['share_of_bound']:.0%})" if "share_of_bound" in found else ""
    return f"{found['seconds'] * 1e6:.1f}{share}"


def _launches(result: Result) -> Result:
    before, now = result["before"]["cases"], result["cases"]
    ticks = [["", "launches", "after read-back", "copies", "read-backs"]]
    for mode in now:
        for kind, begins in (("a prompt starts", True), ("trees alone", False)):
            old, new = ([each for each in cases[mode]["ticks"] if each["begins"] == begins] for cases in (before, now))
            if old and new:
                columns = ("launches", "behind", "copies", "read_backs")
                most = [[max(int(tick[name]) for tick in found) for found in (old, new)] for name in columns]
                ticks.append([f"{mode}, {kind}", *(_from_to(*pair) for pair in most)])
    held, holds = (
        {graph: count for case in cases.values() for graph, count in _graphs(case)} for cases in (before, now)
    )
    graphs = [["graph", "launches"], *([graph, _from_to(held.get(graph, 0), count)] for graph, count in holds.items())]
    return {"ticks": table(ticks), "graphs": table(graphs)}


def _graphs(case: Result) -> list[tuple[str, int]]:
    """Launches of the largest graph of each kind: forwards by their operators' tiles, drafts by their depth."""
    found: dict[str, int] = {}
    for each in case["graphs"]:
        kind = each["graph"].partition(", trees")[0]
        if kind.startswith("forward"):
            kind = "forward of 1 to 64 rows" if int(kind.split()[2]) <= 64 else "forward of more rows"
        elif kind.startswith("draft keys"):
            kind = "draft keys of a prompt"
        elif "draft" in kind:
            kind = f"{kind}, {each['graph'].rpartition(', ')[2]}"
        found[kind] = max(found.get(kind, 0), each["launches"])
    return list(found.items())


def _from_to(before: int | str, now: int | str) -> str:
    return f"{before} → **{now}**" if before != now else str(now)


def _sensitivity(result: Result) -> Result:
    return _by_size(result, lambda _, size: {"columns": [{"mode": mode} for mode in size["points"][0]["modes"]]})


# The papers


def _emulation(result: Result) -> Result:
    devices, figures = result["devices"], result["figures"]
    errors = [figure["error_percent"] for figure in figures]
    claimed = [abs(figure["error_percent"]) for figure in figures if figure["band_percent"] is not None]
    return {
        "devices": [{**device, "by_rows": _by_rows(device)} for device in devices.values()],
        "figures": [_figure(figure, devices[figure["device"]]) for figure in figures],
        "claimed": len(claimed),
        "largest": f"{max(claimed):.0f}",
        "fitted": sum(map(_fitted_numbers, devices.values())),
        "least": f"{100 / (1 + max(errors) / 100):.0f}",
    }


def _by_rows(device: Result) -> str:
    shares = device["efficiency"]["compute_by_rows"]
    return ", ".join(f"{rows}: {100 * share:.0f} %" for rows, share in shares.items())


def _fitted_numbers(device: Result) -> int:
    shares = device["efficiency"]["compute_by_rows"]
    fitted = [name for name, origin in device["sources"].items() if origin.startswith("fitted")]
    return sum(len(shares) if name.endswith("compute_by_rows") else 1 for name in fitted)


def _figure(figure: Result, device: Result) -> Result:
    rows, tokens, band = figure["rows"], figure["tokens"], figure["band_percent"]
    what = {
        "answer": f"{tokens} tokens after {rows} rows",
        "pipeline": f"{tokens} frames in flight, {rows} rows each",
        "gathered": f"{tokens} frames in flight, {rows} rows each, gathered",
        "token": f"a token after {rows} rows",
        "prompt": f"a prompt of {rows} rows",
        "flow": f"{rows} rows of images, 10 steps",
    }[figure["work"]]
    return {
        **figure,
        "device_name": device["name"],
        "what": what,
        "of_weights": "" if figure["weights"] == "none" else f" {figure['weights']}",
        "error": round(figure["error_percent"]),
        "claim": "no" if band is None else f"{figure['use']}, within {band:g} %",
    }


def _speculation(result: Result) -> Result:
    plain, *drafted = result["rows"]
    recipe = json.loads(_HEAD.read_text(encoding="utf-8"))
    return {
        "speculating": len(drafted),
        "slower": sum(row["action_s"] > plain["action_s"] for row in drafted),
        **{key: recipe[key] for key in ("learning_rate", "own_steps")},
        "bounds": " or ".join(f"{bound['mm']:g} mm and {bound['degrees']:g}°" for bound in result["tolerances"]),
        **_accepted(result),
    }


def _accepted(result: Result) -> Result:
    """Spec-VLA's tables 1 to 3: success, shares of the accept lengths, and accept lengths by position in the answer."""
    rows, drafted = result["rows"], result["rows"][1:]
    lengths = range(max(int(length) for row in drafted for length in row["share_by_accept_length"]) + 1)
    places = sorted({int(place) for row in drafted for place in row["accept_length_by_place"]})

    def by_both(row: Result) -> Result:
        shares, means = row["share_by_accept_length"], row["accept_length_by_place"]
        return {
            **row,
            "by_length": [{"share": shares.get(str(length), 0)} for length in lengths],
            "by_place": [{"mean": means.get(str(place))} for place in places],
        }

    return {
        "pairs": rows[0]["success"]["episodes"],
        "rows": [{**row, "tokens_per_forward": 7 / row["forwards_per_action"]} for row in _beside_first(rows)],
        "drafted": [by_both(row) for row in drafted],
        "lengths": [{"n": length} for length in lengths],
        "places": [{"n": place + 1} for place in places],
    }


def _spec_vla(result: Result) -> Result:
    return {**_accepted(result), "case_table": _case_table(result["case"])}


def _case_table(case: Result) -> str:
    """One action with a column per forward; accepted drafts are bold, with their distance in bins unless 0."""
    forwards = max(len(case["strict"]), len(case["relaxed"]))
    cells = [["", *(f"forward {number}" for number in range(1, forwards + 1))]]
    for mode in ("strict", "relaxed"):
        tokens = [" ".join(_case_token(token) for token in committed) for committed in case[mode]]
        cells.append([mode, *tokens, *[""] * (forwards - len(tokens))])
    return table(cells)


def _case_token(token: Result) -> str:
    off = f" (±{token['bins_off']})" if token["bins_off"] else ""
    return f"{token['token']}" if token["why"] == "target" else f"**{token['token']}{off}**"


def _head_recipes(result: Result) -> Result:
    """Tokens per verification of each recipe, by pass over the answers."""
    return {
        "passes": [{"n": epoch} for epoch in range(1, result["epochs"] + 1)],
        "answers": result["rows"][0]["held_out_answers"],
        "rows": [
            {**row, "taus": [{"tau": tau} for tau in row["tau_by_epoch"]], "of_plain": row["action_s"] / result["ar_s"]}
            for row in result["rows"]
        ],
    }


def _acceptance_rules(result: Result) -> Result:
    parts = ("nano", "text")
    return {
        "millimetres": result["tolerance"]["metres"] * 1e3,
        **{f"{name}_starts": result[name][0]["success"]["episodes"] for name in parts},
        **{name: _beside_first(result[name]) for name in parts},
    }


def _lvspec(result: Result) -> Result:
    plain = result["rows"][0]
    rows = {row["name"]: {**row, **_accepted_by(row)} for row in _beside_first(result["rows"])}
    return {
        "starts": plain["success"]["episodes"],
        "tokens": f"{plain['tokens_per_action']:.0f}",
        "millions": f"{result['text_policy']['parameters'] / 1e6:.1f}",
        "comparisons": [
            {"title": title, "rows": [rows[name] for name in names]} for title, names in result["tables"].items()
        ],
    }


def _accepted_by(row: Result) -> dict[str, float | None]:
    """Shares of the committed tokens by the reason that a draft was accepted; None for plain decoding."""
    reasons = {"exact": ("exact",), "loosened": ("irrelevant", "deferred"), "shifted": ("shifted",)}
    if row["tau"] is None:
        return dict.fromkeys(reasons)
    return {name: sum(row["why"].get(why, 0.0) for why in whys) for name, whys in reasons.items()}


def _fly(result: Result) -> Result:
    plain, *others = result["rows"]
    forwards, time = (result["goals"][name] for name in ("forwards", "time"))
    training, gate_s = result["draft_training"], result["gate_s"]
    drafting = [row for row in others if row["ours"]]
    fastest = max(drafting, key=lambda row: float(row["plain_time_over_own"]["ratio"]))
    slower = sum(row["plain_time_over_own"]["high"] < 1 for row in drafting)
    reached = {True: "reached", False: "not reached"}
    return {
        "rows": [{**plain, "plain_time_over_own": None}, *others],
        "fastest": f"*{fastest['name']}*, {interval(fastest['plain_time_over_own'])}",
        "slower": f"{slower} of our {len(drafting)} rows",
        "parameters_m": {name: f"{n / 1e6:.0f}" for name, n in result["parameters"].items()},
        "gate_us": f"{1e6 * (gate_s['fly'] - gate_s['strict']):.0f}",
        "strict_us": f"{1e6 * gate_s['strict']:.0f}",
        "kinds": ", ".join(result["kinds"]),
        "trained": [{**training, "agreement": training["validation"][-1]["agreement"]}] if training else [],
        "forwards_goal": reached[bool(forwards["reached"])],
        "share": f"{forwards['share']:.3f}",
        "time_goal": reached[bool(time["reached"])],
        "assisted": ", ".join(f"K {k}: {interval(ratio)}" for k, ratio in time["ratios"].items()),
    }


def _actionflow(result: Result) -> Result:
    devices = list(result["devices"].values())
    parts = [(mode, part) for mode, parts in devices[0]["breakdown"].items() for part in parts]
    return {
        **{
            part: [{**rows[0], "of": list(rows)} for rows in zip(*(device[part] for device in devices), strict=True)]
            for part in ("layouts", "depth", "lengths")
        },
        "breakdown": [
            {"part": f"{mode}: {part}", "of": [_share(device["breakdown"][mode], part) for device in devices]}
            for mode, part in parts
        ],
    }


def _age(result: Result) -> Result:
    """A table per weight format, the largest excess over the best fixed mode, and the number of significant cells."""
    rows, modes = result["rows"], list(result["rows"][0]["modes"])
    formats = dict.fromkeys(row["weights"] for row in rows)
    beyond = [row for row in rows if row["over_best"]["low"] > 0]
    return {
        "formats": [
            {"weights": name, "cells": _ages([row for row in rows if row["weights"] == name], modes)}
            for name in formats
        ],
        "largest": max(row["over_best"]["share"] for row in rows),
        "beyond": len(beyond),
        "cells_in_all": len(rows),
        "least": min(row["over_spec"]["share"] for row in rows),
    }


def _first_actions(result: Result) -> Result:
    cells = [["device", "answers", "age", "ratio", "actions/s", "success", "points"]]
    for row in result["rows"]:
        success = row["success"]
        compared = ["", ""] if row["answers"] == "whole" else [interval(row["age_ratio"]), points(success)]
        shown = [f"{row['picture_age_s']:.2f} s", compared[0], f"{row['action_rate_hz']:.1f}", rate(success["second"])]
        cells.append([row["device"], row["answers"], *shown, compared[1]])
    return {"cells": table(cells), "starts": min(row["starts"] for row in result["rows"])}


def _ages(rows: Sequence[Result], modes: Sequence[str]) -> str:
    cells = [["device", "tokens", *(f"{mode}, s" for mode in modes), "auto, p95, s", "over the best", "over spec"]]
    for row in rows:
        found = row["modes"]
        ages = [f"{found[mode]['age_s']:.3g}" for mode in modes]
        compared = (row["over_best"], row["over_spec"])
        over = [f"{each['share']:+.1%} ± {(each['high'] - each['low']) / 2:.1%}" for each in compared]
        cells.append([row["device"], str(row["tokens"]), *ages, f"{found['auto']['p95_s']:.3g}", *over])
    return table(cells)


def _share(times: Mapping[str, float], part: str) -> Result:
    return {"seconds": times[part], "share": times[part] / sum(times.values())}


def _pipelining(result: Result) -> Result:
    policies = list(result["policies"].values())
    closed = [
        {"tokens": policy["tokens"], "name": device["name"], "rows": _closed(device["closed_loop"])}
        for policy in policies
        if any(device["closed_loop"] for device in policy["devices"].values())
        for device in policy["devices"].values()
    ]
    return {
        "always_waiting": [_waiting(policy) for policy in policies],
        "closed_loop": [{"starts": closed[0]["rows"][0]["success"]["episodes"], "tables": closed}] if closed else [],
        "chunks": "nano" not in result["policies"],
        "actions": "nano" in result["policies"],
    }


def _closed(modes: Mapping[str, Result]) -> list[Result]:
    return [
        {**row, "against_ar": None if row["mode"] == "ar" else row["against_ar"], "in_time_share": _in_time(row)}
        for row in _named(modes, "mode")
    ]


def _in_time(row: Result) -> float:
    share: float = row["in_time"] / row["success"]["episodes"]
    return share


def _waiting(policy: Result) -> Result:
    found = [device["frame_always_waiting"] for device in policy["devices"].values()]
    modes = [{"mode": mode, "of": [rows[mode] for rows in found]} for mode in found[0]]
    return {**policy, "tokens": f"{policy['tokens']:.0f}", "modes": modes}


def _draft_nodes(result: Result) -> Result:
    """Each policy's forwards by nodes, and its latency on each device relative to plain decoding."""
    return {"policies": [_by_nodes(policy) for policy in result["policies"].values()]}


def _by_nodes(policy: Result) -> Result:
    plain_s, nodes = policy["plain"]["latency_s"], policy["nodes"]
    best_s = {name: min(row["latency_s"][name] for row in nodes.values()) for name in plain_s}

    def latency(name: str, own_s: float) -> Result:
        text = f"{own_s * 1e3:.0f} ({plain_s[name] / own_s:.2f})"
        return {"latency": f"**{text}**" if own_s == best_s[name] else text}

    rows = _named({"ar": policy["plain"], **nodes}, "nodes")
    shown = [{**row, "of": [latency(*each) for each in row["latency_s"].items()]} for row in rows]
    return {**policy, "tokens": f"{policy['plain']['forwards_per_action']:.0f}", "rows": shown}


# Robots


def _simulation(result: Result) -> Result:
    columns, devices = result["results"], result.get("emulated") or result["devices"]

    def column(name: str, found: Result) -> Result:
        waits, latency_s = name == "lockstep", found["latency_s"]
        return {
            **found,
            "title": f"realtime, emulated {devices[name]['name']}" if name in devices else name,
            "latency": "" if waits else f"{latency_s['p50'] * 1e3:.0f} / {latency_s['p95'] * 1e3:.0f} ms",
            "median_time_s": _median_time(found),
            "p": None if waits else found["against_lockstep"]["p"],
        }

    return {
        "columns": [column(name, found) for name, found in columns.items()],
        "tasks": [
            {"task": task, "of": [found["tasks"][task] for found in columns.values()]}
            for task in columns["lockstep"]["tasks"]
        ],
        "last_seed": result["first_seed"] + result["episodes_per_task"] - 1,
    }


def _median_time(found: Result) -> float | None:
    """Mean over the tasks of the median world time to success; None if no task succeeded."""
    times = [task["time_to_success_s"] for task in found["tasks"].values() if task["time_to_success_s"] is not None]
    return sum(times) / len(times) if times else None


def _formats(result: Result) -> Result:
    formats: dict[str, Result] = result["formats"]
    plain = formats["none"]

    def column(found: Result) -> Result:
        said = found["agreement"]
        return {
            **found,
            "against": None if found["name"] == "none" else found["against"],
            "tokens_share": said["same_tokens"] / said["tokens"],
            "answers_share": said["same_answers"] / said["answers"],
        }

    return {
        "columns": [column(found) for found in _named(formats, "name")],
        "tasks": [
            {"task": task, "of": [{"rate": found["tasks"][task]} for found in formats.values()]}
            for task in plain["tasks"]
        ],
        "starts": plain["success"]["episodes"],
    }


def _driving(result: Result) -> Result:
    rows: list[Result] = result["rows"]
    robots = dict.fromkeys(row["robot"] for row in rows)
    by_robot = [{"robot": robot, **_followers([row for row in rows if row["robot"] == robot])} for robot in robots]
    return {"robots": by_robot, "starts": rows[0]["success"]["episodes"]}


def _followers(rows: list[Result]) -> Result:
    first, *others = dict.fromkeys(row["follower"] for row in rows)
    lines = []
    for device, mode in dict.fromkeys((row["name"], row["mode"]) for row in rows):
        of = {row["follower"]: row for row in rows if (row["name"], row["mode"]) == (device, mode)}
        texts = [rate(of[first]["success"])]
        texts += [f"{rate(of[name]['success'])}, {points(of[name]['against'])}" for name in others]
        lines.append({"device": device, "mode": mode, "of": [{"text": text} for text in texts]})
    return {"followers": [{"follower": name} for name in (first, *others)], "rows": lines}


def _live_driving(result: Result) -> Result:
    rows = [{**row, "refused_by_guard": sum(row["refused"]["guard"].values())} for row in result["rows"]]
    return {"rows": rows, "starts": rows[0]["success"]["episodes"]}


def _soak(result: Result) -> Result:
    bounds, phases = result["bounds"], _named(result["phases"], "name")
    return {
        "verdict": "passed" if result["passed"] else "failed",
        "resident_mib": bounds["resident_growth"] / 2**20,
        "gpu_mib": bounds["gpu_growth"] / 2**20,
        "phases": [{**phase, "failed": "; ".join(phase["failures"]) or "none"} for phase in phases],
    }


def _attacks(result: Result) -> Result:
    classes = _named(result["classes"], "name")
    did = [", ".join(f"{count} {_label(outcome)}" for outcome, count in found["outcomes"].items()) for found in classes]
    return {
        **{key: sum(found[key] for found in classes) for key in ("tried", "failed")},
        "classes": [{**found, "did": words} for found, words in zip(classes, did, strict=True)],
        "not_run": ", ".join(result.get("not_run", ())) or "none",
    }


def _mutants(result: Result) -> Result:
    rows = [{**row, "noticed": row["killed"] + row["timeouts"]} for row in _named(result["modules"], "name")]
    sums = {key: sum(row[key] for row in rows) for key in ("mutants", "noticed", "timeouts", "equivalent")}
    matter = sums["mutants"] - sums["equivalent"]
    all_of_them = result["drawn"] == result["of"]
    rooms = dict.fromkeys(row["name"].rpartition("/")[0].replace("/guard", "") for row in rows)
    left_out = ", ".join(f"{count} × {reason}" for reason, count in result["left_out"].items())
    live = [f"`{each['module']}:{each['line']}` ({each['operator']})" for each in result["survivors"]]
    return {
        **sums,
        "which": "mutants, all existing ones," if all_of_them else f"mutants, a sample of {result['of']},",
        "rooms": ", ".join(f"`{room}`" for room in rooms),
        "that_matter": matter,
        "score": sums["noticed"] / max(1, matter),
        "survivors_count": len(live),
        "left_out_words": left_out or "none",
        "rows": rows,
        "any_live": bool(live),
        "live": ", ".join(live),
    }


_KINDS = {
    "kill": "a process killed (kill -9), started again",
    "freeze": "a process stopped (SIGSTOP) and continued",
    "lose": "a topic lost by the network and restored",
    "clock": "the nodes' clock still, jumping, slow, fast",
    "frames": "frames late, duplicated, out of order, with wrong stamps",
    "actions": "actions with NaN, infinity, too large, jumping",
    "tool": "measured poses with NaN, still, jumping",
    "commands": "a driver that sends NaN, jumps, runs away",
    "twin": "two publishers of commands or of actions",
    "late": "driver or guard late by 10 to 99 ms",
    "busy": "an overloaded machine: driver and guard repeatedly late",
    "press": "stop pressed",
    "release": "the dead-man's switch released",
    "flood": "a flood of instructions",
}


def _faults(result: Result) -> Result:
    judge, none = result["judge"], dict.fromkeys(("runs", "beyond", "late"), "")
    extremes = {
        "without_fault": "no fault, guard",
        "with_faults": "faults, guard",
        "without_guard_extremes": "faults, no guard",
    }
    bare = [{**row, "bare": row["bare"] if row["bare"]["runs"] else none} for row in result["faults"]]
    return {
        "faults": [_counted(row) for row in bare],
        "modes_and_outputs": [_counted(row) for row in result["modes_and_outputs"]],
        "stops": [{**row, **_stop(row)} for row in result["stops"]],
        "extremes": [{"name": words, **result[key]} for key, words in extremes.items()],
        "arms": "that also enforce the limits themselves" if result["limiter"] else "that follow every command",
        "speed_percent": f"{100 * judge['speed_share'] - 100:.0f}",
        "outside_mm": f"{1e3 * judge['outside_m']:g}",
        "stands_mm_s": f"{1e3 * judge['stands_m_s']:g}",
    }


def _counted(row: Result) -> Result:
    by_hand = f", {row['cleared']} by hand" if row["cleared"] else ""
    return {**row, **_beyond_and_late(row), **_stop(row), "goes_on": f"{row['recovered']}{by_hand}"}


def _beyond_and_late(row: Result) -> dict[str, str]:
    """Counts of runs beyond their limits, of those in contact only, caused by the fault, and with late motion."""
    by_contact = f", {row['in_contact']} in contact" if row["in_contact"] else ""
    late = f"{row['late']} of {row['promised']}" if row["promised"] else ""
    return {"beyond_limits": f"{row['beyond']}{by_contact}", "caused": str(row["caused"]), "late_of": late}


def _stop(row: Result) -> dict[str, str]:
    """Median and maximum stopping time in seconds and distance in millimetres."""
    if not row["stopped"]:
        return {"stop_s": "", "way_mm": ""}
    time = f"{row['time_s_median']:.2f} / {row['time_s_max']:.2f}"
    return {"stop_s": time, "way_mm": f"{1e3 * row['distance_m_median']:.0f} / {1e3 * row['distance_m_max']:.0f}"}


def faults_by_kind(result: Result) -> str:
    """A table with one row per kind of fault, over all nodes and topics."""
    head = ["fault", "runs", "beyond limits", "caused by the fault", "moved after the deadline"]
    cells = [[*head, "max stop, s", "max distance, mm"]]
    for kind, words in _KINDS.items():
        rows = [row for row in result["faults"] if row["fault"].split()[0] == kind]
        names = ("runs", "beyond", "caused", "in_contact", "late", "promised")
        counts = {name: sum(row[name] for row in rows) for name in names}
        stops = [(row["time_s_max"], row["distance_m_max"]) for row in rows if row["stopped"]]
        longest_s, longest_m = (max(values) for values in zip(*stops, strict=True)) if stops else (0.0, 0.0)
        stop = [f"{longest_s:.2f}", f"{1e3 * longest_m:.0f}"] if stops else ["", ""]
        cells.append([words, str(counts["runs"]), *_beyond_and_late(counts).values(), *stop])
    return table(cells)


def _robots_per_device(result: Result) -> Result:
    devices = [{**device, "device": _device(device)} for device in result["devices"].values()]
    budgets = [(device, budget_s) for device in devices for budget_s in _BUDGETS_S]
    return {
        "budgets": [{**device, "budget_s": budget_s} for device, budget_s in budgets],
        "most": [
            {"way": way, "of": [{"robots": _most(device["rows"][way], budget_s)} for device, budget_s in budgets]}
            for way in devices[0]["rows"]
        ],
        "by_device": [
            {
                **device,
                "counts": next(iter(device["rows"].values())),
                "ways": [{"way": way, "of": rows} for way, rows in device["rows"].items()],
            }
            for device in devices
        ],
        "period_ms": f"{1e3 * result['period_s']:.0f}",
    }


def _device(device: Result) -> str:
    return f"{device['name']}, measured" if device["measured"] else f"emulated {device['name']}"


def _most(rows: list[Result], budget_s: float) -> str:
    """The maximum number of robots whose image stays within an age budget for 95 % of the time."""
    kept = [row["robots"] for row in rows if row["age_p95_s"] <= budget_s]
    return f"{max(kept)}{'+' if max(kept) == rows[-1]['robots'] else ''}" if kept else "none"


def _serving_under_load(result: Result) -> Result:
    """The result with the numbers from its command line."""
    command = result["command"]
    words = command[command.index("--") :].split()
    options = zip(words[::2], words[1::2], strict=True)
    return {
        "tried": ", ".join(f"{_label(name)} {number}" for name, number in result["attacks"].items()),
        "memory": ", ".join(f"{name} {kilobytes / 1e3:.0f} MB" for name, kilobytes in result["memory_kb"].items()),
        "load": f"{result['load_before']:.1f}",
        **{name.removeprefix("--").replace("-", "_"): f"{float(value):g}" for name, value in options},
    }


# Words and labels of recorded results, and what the page shows instead.
_NEWER_WORDS = {"picture": "image", "pictures": "images", "told": "reported"}
_LABELS = {
    "another action, by a field that decides it": "different action, by a field that determines it",
    "goes on": "continued",
    "images that lie": "malformed images",
    "lived": "survived",
    "passed over": "ignored",
    "passed over or bounded": "ignored or bounded",
    "refused, and reported": "refused and reported",
    "taken": "accepted",
    "taken, and in force": "accepted and in force",
}


def _label(recorded: str) -> str:
    """The words that the page shows for a label of a recorded result."""
    label = re.sub(r"\w+", lambda word: _NEWER_WORDS.get(word[0], word[0]), recorded)
    return _LABELS.get(label, label)


# Fields that a benchmark's part of the template needs in addition to the result.
VIEWS: Mapping[str, Callable[[Result], Result]] = {
    view.__name__.removeprefix("_"): view
    for view in (
        *(_age, _first_actions, _tick_cost, _decode_modes, _sensitivity, _kernels, _launches),
        *(_emulation, _speculation, _spec_vla, _head_recipes, _acceptance_rules, _lvspec, _fly, _actionflow),
        *(_pipelining, _draft_nodes, _simulation, _formats, _driving, _live_driving),
        *(_soak, _attacks, _faults, _robots_per_device, _serving_under_load, _mutants),
    )
} | {"attack_nodes": _attacks}
