# SPDX-License-Identifier: Apache-2.0
"""Fields for closed loops, drivers and several robots."""

from benchmarks.pages.tables import Result, by_task, newer_words, points, rate, views


def _driving(result: Result) -> Result:
    rows: list[Result] = result["rows"]
    robots = dict.fromkeys(row["robot"] for row in rows)
    by_robot = [{"robot": robot, **_followers([row for row in rows if row["robot"] == robot])} for robot in robots]
    limit: float = result["time_limit"]
    return {"robots": by_robot, "limit": "" if limit == 1 else f"{limit:g} times "}


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
    return {
        "rows": [{**row, "refused_by_guard": sum(row["refused"].get("guard", {}).values())} for row in result["rows"]]
    }


def _joint_actions(result: Result) -> Result:
    return {"task_rows": by_task(result["policies"])}


_BUDGETS_S = (0.5, 1.0, 2.0)


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
        "tried": ", ".join(f"{newer_words(name)} {number}" for name, number in result["attacks"].items()),
        "memory": ", ".join(f"{name} {kilobytes / 1e3:.0f} MB" for name, kilobytes in result["memory_kb"].items()),
        "load": f"{result['load_before']:.1f}",
        **{name.removeprefix("--").replace("-", "_"): f"{float(value):g}" for name, value in options},
    }


VIEWS = views(_driving, _joint_actions, _live_driving, _robots_per_device, _serving_under_load)
