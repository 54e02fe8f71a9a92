# SPDX-License-Identifier: Apache-2.0
"""What the page shows of the four papers: emulation, speculation, rules, pipelining."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results_cells import Cells, Result, difference, if_any, ms, rate, table

_HEAD = Path(__file__).resolve().parents[1] / "specvla_ros" / "lab" / "bundled" / "nano" / "draft" / "training.json"


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


def _speculation(result: Result) -> dict[str, Any]:
    plain, *drafted = result["rows"]
    cells = [["", "success", "difference to ar", "forwards per action", "tokens per forward"]]
    cells[0] += ["tokens per verification", "largest bins off", "ms"]
    for row in result["rows"]:
        against, tau = ("", "") if row is plain else (difference(row["against_first"]), f"{row['tau']:.2f}")
        forwards = [f"{row['forwards_per_action']:.2f}", f"{7 / row['forwards_per_action']:.2f}"]
        errors = [str(row["largest_bins_off"]), f"{row['action_s'] * 1e3:.1f}"]
        cells.append([row["name"], rate(row["success"]), against, *forwards, tau, *errors])
    recipe = json.loads(_HEAD.read_text(encoding="utf-8"))
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
        against, tau = ("", "") if row is plain else (difference(row["against_first"]), f"{row['tau']:.2f}")
        figures = [f"{row['forwards_per_action']:.2f}", str(row["largest_bins_off"])]
        cells.append([row["name"], rate(row["success"]), against, tau, *figures])
    case = result["case"]
    return {
        "pairs": plain["success"]["episodes"],
        "table": table(cells),
        "accepted_in_one_forward": table(_accepted_in_one_forward(drafted)),
        "accepted_by_position": table(_accepted_by_position(drafted)),
        "case_table": table(_case_cells(case)),
    }


def _head_recipes(result: Result) -> dict[str, Any]:
    """Tokens per verification of each recipe, by passes over the answers."""
    rows = result["rows"]
    epochs = range(1, result["epochs"] + 1)
    cells = [["recipe", "learning rate", "own features, tokens deep", *(f"pass {epoch}" for epoch in epochs)]]
    timed = [["recipe", "forwards per action", "of the head", "ms per action", "of plain decoding's"]]
    for row in rows:
        taus = [f"{tau:.2f}" for tau in row["tau_by_epoch"]]
        cells.append([row["name"], f"{row['learning_rate']:g}", str(row["own_steps"]), *taus])
        counted = [f"{row['forwards_per_action']:.2f}", f"{row['head_forwards_per_action']:.2f}"]
        timed.append([row["name"], *counted, f"{row['action_s'] * 1e3:.1f}", f"{row['action_s'] / result['ar_s']:.0%}"])
    return {"table": table(cells), "answers": rows[0]["held_out_answers"], "timed_table": table(timed)}


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
        cells.append([row["name"], *(if_any(mean, "{:.2f}") for mean in means)])
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
        against, tau = ("", "") if row is rows[0] else (difference(row["against_first"]), f"{row['tau']:.2f}")
        forwards, agreement = f"{row['forwards_per_action']:.2f}", f"{row['agreement']:.1%}"
        cells.append([row["name"], rate(row["success"]), against, forwards, tau, agreement])
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
        against, tau = ("", "") if is_plain else (difference(row["against_first"]), f"{row['tau']:.2f}")
        accepted = [
            why.get("exact", 0.0),
            why.get("irrelevant", 0.0) + why.get("deferred", 0.0),
            why.get("shifted", 0.0),
        ]
        cells.append(
            [
                row["name"],
                rate(row["success"]),
                against,
                f"{row['forwards_per_action']:.2f}",
                tau,
                f"{row['agreement']:.1%}",
                *("" if is_plain else f"{share:.1%}" for share in accepted),
                if_any(row["rule_share_of_tick"], "{:.1%}"),
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
    drafting = [row for row in rows if row["ours"] and row is not plain]
    fastest = max(drafting, key=lambda row: float(row["plain_time_over_own"]["ratio"]))
    slower = sum(row["plain_time_over_own"]["high"] < 1 for row in drafting)
    return {
        "table": table(cells),
        "fastest": f"*{fastest['name']}*, {_interval(fastest['plain_time_over_own'])}",
        "slower": f"{slower} of our {len(drafting)} rows",
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


def _actionflow(result: Result) -> dict[str, Any]:
    devices = list(result["devices"].values())
    heads = [device["name"] for device in devices]
    layouts = [["keys and values", *(f"{head}: {what}" for head in heads for what in ("published", "emulated"))]]
    for rows in zip(*(device["layouts"] for device in devices), strict=True):
        figures = [if_any(row[key], "{:.2f}") for row in rows for key in ("published", "emulated")]
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


def _pipelining(result: Result) -> dict[str, Any]:
    policies = list(result["policies"].values())
    closed = [policy for policy in policies if any(device["closed_loop"] for device in policy["devices"].values())]
    return {
        "always_waiting": [
            {"tokens": f"{policy['tokens']:.0f}", "frames": policy["frames"], "table": table(_waiting_cells(policy))}
            for policy in policies
        ],
        "closed_loop": [_closed_loop(closed)] if closed else [],
        "chunks": "nano" not in result["policies"],
        "actions": "nano" in result["policies"],
    }


def _waiting_cells(policy: Result) -> Cells:
    devices = list(policy["devices"].values())
    heads = ("actions/s", "forwards", "overtaken")
    cells = [["", *(head for device in devices for head in (f"{device['name']}: ms", *heads))]]
    for mode in devices[0]["frame_always_waiting"]:
        row = [mode]
        for found in (device["frame_always_waiting"][mode] for device in devices):
            row += [f"{found['latency_s'] * 1e3:.0f}", f"{found['actions_per_s']:.1f}"]
            row += [f"{found['forwards_per_action']:.2f}", f"{found['overtaken']:.0%}"]
        cells.append(row)
    return cells


def _draft_nodes(result: Result) -> dict[str, Any]:
    """Each policy's forwards by nodes, and its latency on each device beside plain decoding's there."""
    policies = result["policies"].values()
    devices = {name: device["name"] for name, device in result["emulated"].items()}
    return {"policies": [_by_nodes(policy, devices) for policy in policies]}


def _by_nodes(policy: Result, devices: Mapping[str, str]) -> dict[str, Any]:
    plain, rows = policy["plain"], policy["nodes"]
    cells = [["nodes", "forwards", *(f"{name}: ms (ar's / its own)" for name in devices.values())]]
    best = {name: min(row["latency_s"][name] for row in rows.values()) for name in devices}
    for nodes, row in {"ar": plain, **rows}.items():
        shown = []
        for name, own in row["latency_s"].items():
            text = f"{own * 1e3:.0f} ({plain['latency_s'][name] / own:.2f})"
            shown.append(f"**{text}**" if own == best[name] else text)
        cells.append([str(nodes), f"{row['forwards_per_action']:.2f}", *shown])
    return {**policy, "tokens": f"{plain['forwards_per_action']:.0f}", "table": table(cells)}


def _closed_loop(policies: list[Result]) -> dict[str, Any]:
    devices = [(policy["tokens"], device) for policy in policies for device in policy["devices"].values()]
    return {
        "starts": devices[0][1]["closed_loop"]["ar"]["success"]["episodes"],
        "tables": "\n\n".join(table(_closed_cells(tokens, device)) for tokens, device in devices),
    }


def _closed_cells(tokens: float, device: Result) -> Cells:
    speeds = ("in its own time", "picture followed, ms", "latency p50 / p95, ms", "actions/s")
    outcomes = ("success", "difference to ar", "time to success", "ar's time / its own")
    cells = [[f"{tokens:.0f} tokens, emulated {device['name']}", *speeds, *outcomes]]
    for mode, row in device["closed_loop"].items():
        against = "" if mode == "ar" else difference(row["against_ar"])
        in_time = f"{_in_time(row):.0%}"
        times = [if_any(row["time_to_success_s"], "{:.1f} s"), if_any(row["plain_time_over_own"], "{:.2f}")]
        age = if_any(row["picture_age_s"] and row["picture_age_s"] * 1e3, "{:.0f}")
        speed = [f"**{in_time}**", age, ms(row, "p50", "p95"), f"{row['action_rate_hz']:.1f}"]
        cells.append([mode, *speed, rate(row["success"]), against, *times])
    return cells


def _in_time(row: Result) -> float:
    share: float = row["in_time"] / row["success"]["episodes"]
    return share


VIEWS: Mapping[str, Callable[[Result], dict[str, Any]]] = {
    "emulation": _emulation,
    "speculation": _speculation,
    "spec_vla": _spec_vla,
    "head_recipes": _head_recipes,
    "acceptance_rules": _acceptance_rules,
    "lvspec": _lvspec,
    "fly": _fly,
    "actionflow": _actionflow,
    "pipelining": _pipelining,
    "draft_nodes": _draft_nodes,
}
