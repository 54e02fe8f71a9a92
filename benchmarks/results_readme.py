# SPDX-License-Identifier: Apache-2.0
"""What the README says of the results: the fields of benchmarks/readme.md.in."""

from collections.abc import Mapping
from typing import Any

from benchmarks.results_tables import Result, table

# Lossless rows alone: no headline credits a mechanism with what a relaxed rule gains.
_DEVICES = {"orin": "Orin", "rtx5090": "RTX 5090"}
_ALONE = {
    "ar": "plain decoding",
    "spec, strict": "speculation alone",
    "pipeline": "pipelining alone",
    "specpipe, strict, 2 chunks": "both",
}


def fields(results: Mapping[str, Result]) -> dict[str, Any]:
    """Those of the template.

    Args:
        results: by the names of their files.
    """
    measured_s = next(
        figure["value"] / 1e3
        for figure in results["emulation"]["figures"]
        if (figure["system"], figure["device"]) == ("ActionFlow, baseline", "orin")
    )
    pipelining = [results[name] for name in ("pipelining_nano", "pipelining_of_chunks")]
    policies = {name: policy for result in pipelining for name, policy in result["policies"].items()}
    driving: list[Result] = results["driving_nano"]["rows"]
    on_desktop = [_percent(driving, "rtx5090", mode, "driver, pose") for mode in ("ar", "spec", "pipeline", "specpipe")]
    return {
        "published_hz": f"{1 / measured_s:.2f}",
        "published_s": f"{measured_s:.1f}",
        "tokens": {name: f"{policy['tokens']:.0f}" for name, policy in policies.items()},
        "table": _what_gives_what(sorted(policies.values(), key=lambda policy: policy["tokens"])),
        "paired": [_starts(result) for result in pipelining],
        "time_limit": f"{pipelining[0]['time_limit']:g}",
        "in_the_end": {mode: _in_the_end(policies, mode) for mode in ("ar", "spec, strict")},
        "gpu": {name: _rate_and_age(row) for name, row in results["gpu_h100"]["steps"]["modes"]["found"].items()},
        "auto": {
            name.partition(",")[0]: _rate_and_age(row)
            for name, row in results["gpu_h100"]["steps"]["auto"]["found"].items()
            if " 35 " in name
        },
        "starts": driving[0]["success"]["episodes"],
        **{mode: _percent(driving, "orin", mode, "driver, pose") for mode in ("ar", "spec", "pipeline", "specpipe")},
        "low": min(on_desktop),
        "high": max(on_desktop),
        "added_up": _percent(driving, "orin", "spec", "plain, pose"),
    }


def _what_gives_what(policies: list[Result]) -> str:
    """Tasks done in their own time, and the mean age of the picture that the arm follows."""
    cells = [["tokens of an answer", *(f"{policy['tokens']:.0f}" for policy in policies)]]
    for device, shown in _DEVICES.items():
        for mode, name in _ALONE.items():
            rows = [policy["devices"][device]["closed_loop"][mode] for policy in policies]
            shares = [row["in_time"] / row["success"]["episodes"] for row in rows]
            ages = ["" if row["picture_age_s"] is None else f", {row['picture_age_s']:.2f} s" for row in rows]
            cells.append([f"{shown}, {name}", *(f"{share:.0%}{age}" for share, age in zip(shares, ages, strict=True))])
    return table(cells)


def _rate_and_age(row: Result) -> dict[str, str]:
    return {
        "hz": f"{row['action_rate_hz']:.0f}",
        "latency": f"{row['latency_s']['mean'] * 1e3:.0f}",
        "age": f"{row['image_age_s'] * 1e3:.0f}" if "image_age_s" in row else "",
    }


def _in_the_end(policies: Mapping[str, Result], mode: str) -> str:
    """Success on the Orin within the time limit, of the policies whose answers are long, the shortest first."""
    long = sorted((policies[name] for name in policies if name != "nano"), key=lambda policy: policy["tokens"])
    rates = [policy["devices"]["orin"]["closed_loop"][mode]["success"]["rate"] for policy in long]
    shown = [f"{rate:.0%}" for rate in rates]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _starts(result: Result) -> int:
    """Of each cell."""
    device = next(iter(next(iter(result["policies"].values()))["devices"].values()))
    starts: int = device["closed_loop"]["ar"]["success"]["episodes"]
    return starts


def _percent(rows: list[Result], device: str, mode: str, follower: str) -> int:
    """Success over all arms."""
    found = [
        row["success"] for row in rows if (row["device"], row["mode"], row["follower"]) == (device, mode, follower)
    ]
    return round(100 * sum(each["successes"] for each in found) / sum(each["episodes"] for each in found))
