# SPDX-License-Identifier: Apache-2.0
"""What the README says of the results: the fields of benchmarks/readme.md.in."""

from collections.abc import Mapping
from typing import Any

from results_cells import Result, if_any, table

# Lossless rows alone: no headline credits a mechanism with what a relaxed rule gains.
_ALONE = {
    "ar": "plain decoding",
    "spec, strict": "speculation alone",
    "pipeline": "pipelining alone",
    "specpipe, strict, 2 chunks": "both",
}


def fields(results: Mapping[str, Result]) -> dict[str, Any]:
    """Those of the template.

    Args:
        results: of the benchmarks `emulation`, `pipelining` and `driving`.
    """
    measured_s = next(
        figure["value"] / 1e3
        for figure in results["emulation"]["figures"]
        if (figure["system"], figure["device"]) == ("ActionFlow, baseline", "orin")
    )
    short, long = (f"{policy['tokens']:.0f}" for policy in results["pipelining"]["policies"].values())
    driving: list[Result] = results["driving"]["rows"]
    on_desktop = [_percent(driving, "rtx5090", mode, "driver, pose") for mode in ("ar", "spec", "pipeline", "specpipe")]
    return {
        "published_hz": f"{1 / measured_s:.2f}",
        "published_s": f"{measured_s:.1f}",
        "short": short,
        "long": long,
        "table": _what_gives_what(results["pipelining"]),
        "starts": driving[0]["success"]["episodes"],
        **{mode: _percent(driving, "orin", mode, "driver, pose") for mode in ("ar", "spec", "pipeline", "specpipe")},
        "low": min(on_desktop),
        "high": max(on_desktop),
        "added_up": _percent(driving, "orin", "spec", "plain, pose"),
    }


def _what_gives_what(result: Result) -> str:
    """Tasks done in their own time, and the mean age of the picture that the arm follows."""
    policies = result["policies"].values()
    columns = [(policy["tokens"], device) for policy in policies for device in policy["devices"].values()]
    names = (f"{device['name'].rpartition('NVIDIA ')[2]}, {tokens:.0f} tokens" for tokens, device in columns)
    cells = [["", *names]]
    for mode, name in _ALONE.items():
        rows = [device["closed_loop"][mode] for _, device in columns]
        shares = [row["in_time"] / row["success"]["episodes"] for row in rows]
        ages = [if_any(row["picture_age_s"], ", {:.2f} s") for row in rows]
        cells.append([name, *(f"{share:.0%}{age}" for share, age in zip(shares, ages, strict=True))])
    return table(cells)


def _percent(rows: list[Result], device: str, mode: str, follower: str) -> int:
    """Success over all arms."""
    found = [
        row["success"] for row in rows if (row["device"], row["mode"], row["follower"]) == (device, mode, follower)
    ]
    return round(100 * sum(each["successes"] for each in found) / sum(each["episodes"] for each in found))
