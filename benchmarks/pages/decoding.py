# SPDX-License-Identifier: Apache-2.0
"""Fields for the decoding modes: image age, closed loop, draft nodes."""

from collections.abc import Mapping, Sequence

from benchmarks.pages.tables import Result, interval, named, points, rate, table, views

_NOISE = 0.03  # gains below this share of an age do not decide a verdict
_THINKING_GOAL_S = 0.6  # age of the image acted on, set before decode.think_every_s was measured


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
        "captured_cells": _ages(result["captured"], modes),
        "turned": _turned([row for row in rows if row["weights"] == "none"], result["captured"]),
    }


def _turned(eager: Sequence[Result], captured: Sequence[Result]) -> str:
    """A table of the verdicts that change from eager software to captured graphs."""
    cells = [["device", "tokens", "verdict", "eager", "captured"]]
    for before, after in zip(eager, captured, strict=True):
        pairs = zip(_verdicts(before).items(), _verdicts(after).values(), strict=True)
        cells += [
            [before["device"], str(before["tokens"]), name, first, second]
            for (name, first), second in pairs
            if first != second
        ]
    return table(cells)


def _verdicts(row: Result) -> dict[str, str]:
    ages = {mode: found["age_s"] for mode, found in row["modes"].items()}
    younger = row["over_spec"]["high"] < -_NOISE
    return {
        "best fixed mode": row["best"],
        "without drafts": "pipeline" if ages["pipeline"] < (1 - _NOISE) * ages["ar"] else "ar",
        "`auto` beside `spec`": "younger" if younger else "the same",
    }


def _ages(rows: Sequence[Result], modes: Sequence[str]) -> str:
    cells = [
        [
            "device",
            "tokens",
            *(f"{mode}, s" for mode in modes),
            "auto, p95, s",
            "first action, s",
            "over the best",
            "over spec",
        ]
    ]
    for row in rows:
        found = row["modes"]
        ages = [f"{found[mode]['age_s']:.3g}" for mode in modes]
        compared = (row["over_best"], row["over_spec"])
        over = [f"{each['share']:+.1%} ± {(each['high'] - each['low']) / 2:.1%}" for each in compared]
        first = f"{row['first_action']['age_s']:.3g}" if row["first_action"] else ""
        cells.append([row["device"], str(row["tokens"]), *ages, f"{found['auto']['p95_s']:.3g}", first, *over])
    return table(cells)


def _first_actions(result: Result) -> Result:
    cells = [["device", "answers", "age", "ratio", "actions/s", "success", "points"]]
    for row in result["rows"]:
        success = row["success"]
        compared = ["", ""] if row["answers"] == "whole" else [interval(row["age_ratio"]), points(success)]
        shown = [f"{row['picture_age_s']:.2f} s", compared[0], f"{row['action_rate_hz']:.1f}", rate(success["second"])]
        cells.append([row["device"], row["answers"], *shown, compared[1]])
    return {"cells": table(cells), "starts": min(row["starts"] for row in result["rows"])}


def _commit(result: Result) -> Result:
    cells = [
        ["device", "commit", "age", "ratio", "given", "first own action", "answers/s", "success", "points", "jump"]
    ]
    for row in result["rows"]:
        compared = ["", ""] if row["commit"] == "none" else [interval(row["age_ratio"]), points(row["success"])]
        shown = [f"{row['picture_age_s']:.2f} s", compared[0], f"{row['given']:.1f}", f"{row['latency_s']:.2f} s"]
        success, jump = row["success"]["second"], row["jump"]
        jumps = f"median {jump['mm_median']:.0f} mm, p95 {jump['mm_p95']:.0f} mm"
        cells.append(
            [row["device"], row["commit"], *shown, f"{row['actions_per_s']:.1f}", rate(success), compared[1], jumps]
        )
    return {"cells": table(cells), "starts": min(row["success"]["first"]["episodes"] for row in result["rows"])}


def _thinking(result: Result) -> Result:
    cells = [["think every", "age", "ratio", "given", "forwards", "success", "points", "jump at seams", "jump within"]]
    for i, row in enumerate(result["rows"]):
        compared = [interval(row["age_ratio"]), points(row["success"])] if i else ["", ""]
        forwards = [f"{row[name]:.1f}" if row[name] else "" for name in ("forwards_own", "forwards_given")]
        jumps = [_jump(row[name]) for name in ("jump_at_seams", "jump_within")]
        every = f"{row['think_every_s']:g} s" if row["think_every_s"] else "image"
        shown = [
            f"{row['picture_age_s']:.2f} s",
            compared[0],
            f"{row['given_share']:.0%}",
            ", ".join(filter(None, forwards)),
        ]
        cells.append([every, *shown, rate(row["success"]["second"]), compared[1], *jumps])
    own, (stages,) = result["rows"][0], result["emulated"].values()
    prompt_s, forward_s = stages["vision_s"] + stages["prefill_s"], stages["decode_s"]
    return {
        "cells": table(cells),
        "starts": own["success"]["first"]["episodes"],
        "met": "met" if min(row["picture_age_s"] for row in result["rows"]) <= _THINKING_GOAL_S else "missed",
        "goal_s": _THINKING_GOAL_S,
        "prompt_s": prompt_s,
        "forward_s": forward_s,
        "floor_s": 1.5 * (prompt_s + forward_s),
        "forwards_own": own["forwards_own"],
    }


def _jump(figures: Result | None) -> str:
    return f"{figures['mm_p95']:.0f} mm, {figures['deg_p95']:.1f}°" if figures else ""


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
        for row in named(modes, "mode")
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

    rows = named({"ar": policy["plain"], **nodes}, "nodes")
    shown = [{**row, "of": [latency(*each) for each in row["latency_s"].items()]} for row in rows]
    return {**policy, "tokens": f"{policy['plain']['forwards_per_action']:.0f}", "rows": shown}


VIEWS = views(_age, _first_actions, _commit, _thinking, _pipelining, _draft_nodes)
