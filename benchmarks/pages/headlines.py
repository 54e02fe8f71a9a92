# SPDX-License-Identifier: Apache-2.0
"""The figures in the sentences above the tables, by page."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.figures import CLOSED_LOOPS
from benchmarks.pages.tables import Result

_FLEET = 8  # robots whose trees share the free rows
_AGE_BUDGET_S = 1.0


def headlines(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """The fields of each page's first paragraphs, from results by the names of their files."""
    return {
        "what-it-buys": _what_it_buys(results["pipelining_nano"]["policies"]),
        "speculation": _speculation(results["speculation_nano"]["rows"]),
        "pipelining-and-age": _age(results["age"]["rows"]),
        "gpu": {},
        "cpu": _cpu(results),
        "robots-per-device": _robots(results["robots_per_device"]),
        "faults-and-attacks": _faults(results),
        "papers": _papers(results["acceptance_rules"]["text"]),
    }


def _what_it_buys(policies: Result) -> dict[str, Any]:
    """Both policies' closed loops by device; the names of the modes without their settings."""
    found = {
        name: {
            device: {short: each["closed_loop"][mode] for mode, short in CLOSED_LOOPS.items()}
            for device, each in policy["devices"].items()
        }
        for name, policy in policies.items()
    }
    tokens = {name: policy["tokens"] for name, policy in policies.items()}
    return {**found, "tokens": tokens, "starts": found["nano"]["orin"]["ar"]["success"]["episodes"]}


def _speculation(rows: list[Result]) -> dict[str, Any]:
    plain, *drafted = rows
    strict = min(
        (row for row in drafted if row["name"].startswith("strict")), key=lambda row: float(row["forwards_per_action"])
    )
    return {
        "plain": plain,
        "strict": strict,
        "relaxed": drafted[-1],
        "starts": plain["success"]["episodes"],
        "drafted_rows": len(drafted),
        "slower_rows": sum(row["action_s"] > plain["action_s"] for row in drafted),
    }


def _age(rows: list[Result]) -> dict[str, Any]:
    rows = [row for row in rows if row["weights"] == "none"]
    younger = [row["modes"]["ar"]["age_s"] / row["modes"]["auto"]["age_s"] for row in rows]
    older = [row for row in rows if row["modes"]["pipeline"]["age_s"] > row["modes"]["ar"]["age_s"]]
    return {
        "least": min(younger),
        "most": max(younger),
        "older": len(older),
        "settings": len(rows),
        "excess": max(row["over_best"]["share"] for row in rows),
        "gain": -min(row["over_spec"]["share"] for row in rows),
    }


def _cpu(results: Mapping[str, Result]) -> dict[str, Any]:
    def over_plain(name: str, size: str, weights: str, mode: str) -> float:
        formats = results[name]["sizes"][size]["quantized"]
        rate: float = formats[weights]["modes"][mode]["action_rate_hz"]
        return rate / float(formats["none"]["modes"]["ar"]["action_rate_hz"])

    return {
        "long_tokens": results["decode_modes_cpu_1b_digits"]["tokens"],
        "long": {
            f"{mode}_{weights}": over_plain("decode_modes_cpu_1b_digits", "1b", weights, mode)
            for mode in ("ar", "spec")
            for weights in ("none", "w8a8")
        },
        "short_tokens": results["decode_modes_cpu_1b"]["tokens"],
        "short": {
            f"{mode}_{weights}": over_plain("decode_modes_cpu_1b", "1b", weights, mode)
            for mode in ("ar", "spec")
            for weights in ("none", "w8a8")
        },
        "over_transformers": results["ar_cpu"]["sizes"]["1b"]["speedup_over_transformers"],
    }


def _robots(result: Result) -> dict[str, Any]:
    """Number of robots that a device serves with images that are young enough, by the way that they share it."""

    def most(device: str, way: str) -> int:
        rows = result["devices"][device]["rows"][f"spec, {way}"]
        return max((row["robots"] for row in rows if row["age_p95_s"] <= _AGE_BUDGET_S), default=0)

    def age_s(way: str) -> float:
        rows = result["devices"]["rtx5090"]["rows"][way]
        return next(float(row["age_p95_s"]) for row in rows if row["robots"] == _FLEET)

    ways = {"packed": "packed", "turns": "in turns", "each": "an engine each"}
    shared = {"fleet": _FLEET, "younger": 1 - age_s("digits: auto, packed") / age_s("digits: spec, packed")}
    return {"budget_s": _AGE_BUDGET_S, **{short: most("rtx5090", way) for short, way in ways.items()}, **shared}


def _faults(results: Mapping[str, Result]) -> dict[str, Any]:
    faults = results["faults_sim"]
    keys = ("runs", "beyond", "late", "promised")
    cases = {}
    for name in ("attacks", "attack_nodes"):
        classes = [
            each for result in results.values() if result["benchmark"] == name for each in result["classes"].values()
        ]
        cases[name] = {key: sum(each[key] for each in classes) for key in ("tried", "failed")}
    return {
        "simulated": faults,
        "bare": {key: sum(row["bare"][key] for row in faults["faults"]) for key in keys},
        "running": results["stack"],
        "cases": cases,
    }


def _papers(rows: list[Result]) -> dict[str, Any]:
    named = {row["name"]: row for row in rows}
    return {
        "plain": named["ar"],
        "strict": named["strict, lookup and answer before"],
        "fly": named["fly, lookup and answer before"],
        "lvspec": named["lvspec, lookup and answer before"],
        "starts": named["ar"]["success"]["episodes"],
    }
