# SPDX-License-Identifier: Apache-2.0
"""Fields for the decoding modes: image age, closed loop, draft nodes."""

from collections.abc import Mapping, Sequence

from benchmarks.pages.tables import Result, named, table, views

_NOISE = 0.03  # gains below this share of an age do not decide a verdict
# Ages that were set as goals before these were measured: policy, device, mechanism, age before, goal.
_GOALS = (("digits", "rtx5090", "first actions", 0.36, 0.20), ("reasoning", "orin", "think", 0.91, 0.60))


def _age(result: Result) -> Result:
    """A table per weight format, the largest excess over the best fixed mode, and the number of significant cells."""
    rows, captured = ([_first(row) for row in result[name]] for name in ("rows", "captured"))
    formats = dict.fromkeys(row["weights"] for row in rows)
    beyond = [row for row in rows if row["over_best"]["low"] > 0]
    undrafted = [row["undrafted_over_plain"]["share"] for row in (*rows, *captured)]
    return {
        "formats": [{"weights": name, "cells": [row for row in rows if row["weights"] == name]} for name in formats],
        "largest": max(row["over_best"]["share"] for row in rows),
        "beyond": len(beyond),
        "cells_in_all": len(rows),
        "least": min(row["over_spec"]["share"] for row in rows),
        "captured": captured,
        "turned": _turned([row for row in rows if row["weights"] == "none"], captured),
        **_ahead([*rows, *captured]),
        "undrafted_least": min(undrafted),
        "undrafted_most": max(undrafted),
        "mode_names": [{"mode": mode} for mode in rows[0]["modes"]],
    }


def _first(row: Result) -> Result:
    return row | {"first_action_s": row["first_action"] and row["first_action"]["age_s"]}


def _ahead(rows: Sequence[Result]) -> Result:
    """The range of changes by images beside a forward in mode auto, and the number of cells beyond noise."""
    shares = [row["ahead_over_auto"]["share"] for row in rows]
    younger = [row for row in rows if row["ahead_over_auto"]["high"] < 0]
    return {
        "ahead_cells": len(rows),
        "ahead_younger": len(younger),
        "ahead_least": min(shares),
        "ahead_most": max(shares),
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


def _mechanisms(result: Result) -> Result:
    rows = []
    for row in result["rows"]:
        given = f"{row['given_texts']:.0%}" if row["policy"] == "reasoning" else f"{row['given_actions']:.1f}"
        alone = {"age_ratio": None, "against": None} if row["with"] == "auto" else {"against": row["success"]}
        rows.append(row | {"given": given} | alone)
    return {
        "rows": rows,
        "starts": min(row["starts"] for row in rows),
        "goals": [goal for each in _GOALS if (goal := _goal(rows, *each))["found"]],
        "floor": _floor(result["emulated"]["orin"]),
    }


def _goal(rows: Sequence[Result], policy: str, device: str, mechanism: str, before_s: float, goal_s: float) -> Result:
    """The youngest image of a mechanism in each weight format, against an age set as a goal before."""
    found = [row for row in rows if (row["policy"], row["device"]) == (policy, device) and mechanism in row["with"]]
    youngest = {
        weights: min(row["picture_age_s"] for row in found if row["weights"] == weights)
        for weights in dict.fromkeys(row["weights"] for row in found)
    }
    met = [
        f"{age_s:.2f} s with weights in {_format(weights)} ({'met' if age_s <= goal_s else 'missed'})"
        for weights, age_s in youngest.items()
    ]
    return {
        "of": f"{policy} on {device}",
        "before_s": before_s,
        "goal_s": goal_s,
        "found": " and ".join(met),
    }


def _format(weights: str) -> str:
    return "bfloat16" if weights == "none" else weights


def _floor(stages: Result) -> Result:
    """Least age with one frame at a time: vision, prompt and one forward for the action."""
    prompt_s, forward_s = stages["vision_s"] + stages["prefill_s"], stages["decode_s"]
    return {"prompt_s": prompt_s, "forward_s": forward_s, "age_s": 1.5 * (prompt_s + forward_s)}


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


VIEWS = views(_age, _mechanisms, _pipelining, _draft_nodes)
