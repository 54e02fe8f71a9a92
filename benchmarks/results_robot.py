# SPDX-License-Identifier: Apache-2.0
"""What the page shows of robots: success in simulation, drivers, guards, faults, attacks."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.results_cells import Cells, Result, difference, if_any, ms, rate, table


def _simulation(result: Result) -> dict[str, Any]:
    columns, devices = result["results"], result.get("emulated") or result["devices"]
    lockstep = columns["lockstep"]
    cells = [["", *(f"realtime, emulated {devices[n]['name']}" if n in devices else n for n in columns)]]
    cells.append(["**success**", *(f"**{rate(found['success'])}**" for found in columns.values())])
    for task in lockstep["tasks"]:
        cells.append([task, *(rate(found["tasks"][task]["success"]) for found in columns.values())])
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("moved what the instruction names", lambda found: rate(found["listened"])),
        ("latency p50 / p95", lambda found: "" if found is lockstep else f"{ms(found, 'p50', 'p95')} ms"),
        ("actions per second", lambda found: f"{found['action_rate_hz']:.1f}"),
        ("median time to success", lambda found: if_any(_median_time(found), "{:.1f} s")),
        ("p against lockstep", lambda found: "" if found is lockstep else f"{found['against_lockstep']['p']:.2g}"),
    ]
    cells += [[label, *map(text, columns.values())] for label, text in rows]
    return {"table": table(cells), "last_seed": result["first_seed"] + result["episodes_per_task"] - 1}


def _median_time(found: Result) -> float | None:
    """Mean over the tasks of the median world time of their successes; None without one."""
    times = [task["time_to_success_s"] for task in found["tasks"].values() if task["time_to_success_s"] is not None]
    return sum(times) / len(times) if times else None


def _formats(result: Result) -> dict[str, Any]:
    formats: dict[str, Result] = result["formats"]
    said = {name: found["agreement"] for name, found in formats.items()}
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("tokens as float32's", lambda found: f"{found['same_tokens'] / found['tokens']:.1%}"),
        ("answers wholly so", lambda found: f"{found['same_answers'] / found['answers']:.1%}"),
        ("mm off, p95 / largest", lambda found: _p95_and_largest(found["deviation"], "mm")),
        ("degrees off, p95 / largest", lambda found: _p95_and_largest(found["deviation"], "deg")),
        ("another gripper command", lambda found: f"{found['deviation']['gripper_share']:.1%}"),
    ]
    cells = [["", *formats], *([label, *map(text, said.values())] for label, text in rows)]
    cells.append(["**success**", *(f"**{rate(found['success'])}**" for found in formats.values())])
    against = [difference(found["against"]) for name, found in formats.items() if name != "none"]
    cells.append(["points of success against float32", "", *against])
    for task in formats["none"]["tasks"]:
        cells.append([task, *(rate(found["tasks"][task]) for found in formats.values())])
    how = "\n".join(f"- *{name}*: {found['how']}" for name, found in formats.items())
    return {"table": table(cells), "how": how, "starts": formats["none"]["success"]["episodes"]}


def _p95_and_largest(deviation: Result, unit: str) -> str:
    return f"{deviation[f'p95_{unit}']:.1f} / {deviation[f'largest_{unit}']:.1f}"


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
        shown = [rate(of[name]["success"]) for name in followers]
        against = ["", *(f", {difference(of[name]['against'])}" for name in followers[1:])]
        cells.append([device, mode, *(rate + difference for rate, difference in zip(shown, against, strict=True))])
    return cells


def _live_driving(result: Result) -> dict[str, Any]:
    cells = [["arm", "mode", "done", "latency p50 / p95", "actions per second", "refused by the guard"]]
    for row in result["rows"]:
        refused = sum(row["refused"]["guard"].values())
        rates = [f"{ms(row, 'p50', 'p95')} ms", f"{row['action_rate_hz']:.1f}", str(refused)]
        cells.append([row["robot"], row["mode"], rate(row["success"]), *rates])
    return {"table": table(cells), "starts": result["rows"][0]["success"]["episodes"]}


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
    return [str(row["runs"]), _beyond(row), late, *_stop(row), f"{row['recovered']}{by_hand}"]


def _beyond(row: Result) -> str:
    """How many runs went beyond their limits, and how many of these by a contact alone."""
    return f"{row['beyond']}, {row['in_contact']} in contact" if row["in_contact"] else str(row["beyond"])


def _stop(row: Result) -> list[str]:
    """Median and largest time in seconds and way in millimetres."""
    if not row["stopped"]:
        return ["", ""]
    time = f"{row['time_s_median']:.2f} / {row['time_s_max']:.2f}"
    return [time, f"{1e3 * row['distance_m_median']:.0f} / {1e3 * row['distance_m_max']:.0f}"]


def faults_by_kind(result: Result) -> str:
    """A table with a row for each kind of fault, whatever it befell."""
    cells = [["what was tried", "runs", "beyond limits", "moved after its time", "longest stop, s", "longest way, mm"]]
    for kind, words in _KINDS.items():
        rows = [row for row in result["faults"] if row["fault"].split()[0] == kind]
        counts = {name: sum(row[name] for row in rows) for name in ("runs", "beyond", "in_contact", "late", "promised")}
        stopped = [row for row in rows if row["stopped"]]
        longest = [max((row[name] for row in stopped), default=0.0) for name in ("time_s_max", "distance_m_max")]
        stop = [f"{longest[0]:.2f}", f"{1e3 * longest[1]:.0f}"] if stopped else ["", ""]
        late = f"{counts['late']} of {counts['promised']}" if counts["promised"] else ""
        cells.append([words, str(counts["runs"]), _beyond(counts), late, *stop])
    return table(cells)


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


_BUDGETS_S = (0.5, 1.0, 2.0)


def _robots_per_device(result: Result) -> dict[str, Any]:
    devices = result["devices"].values()
    return {
        "most": table(_most_cells(result)),
        "tables": "\n\n".join(table(_robots_cells(device)) for device in devices),
        "period_ms": f"{1e3 * result['period_s']:.0f}",
    }


def _of_device(device: Result) -> str:
    return f"{device['name']}, measured" if device["measured"] else f"emulated {device['name']}"


def _most_cells(result: Result) -> Cells:
    """The most robots whose picture is never older than a budget, but for a twentieth of the time."""
    devices = list(result["devices"].values())
    heads = [f"{_of_device(device)}, {budget:g} s" for device in devices for budget in _BUDGETS_S]
    cells = [["", *heads]]
    for way in devices[0]["rows"]:
        most = [_most(device["rows"][way], budget) for device in devices for budget in _BUDGETS_S]
        cells.append([way, *most])
    return cells


def _most(rows: list[Result], budget_s: float) -> str:
    kept = [row["robots"] for row in rows if row["age_p95_s"] <= budget_s]
    return f"{max(kept)}{'+' if max(kept) == rows[-1]['robots'] else ''}" if kept else "none"


def _robots_cells(device: Result) -> Cells:
    ways = device["rows"]
    cells = [[f"{_of_device(device)}: robots", *(str(row["robots"]) for row in next(iter(ways.values())))]]
    for way, rows in ways.items():
        cells.append([way, *(f"{row['age_p95_s']:.2f} s, {row['actions_per_s']:.1f}" for row in rows)])
    return cells


def _serving_under_load(result: Result) -> dict[str, Any]:
    counts = ("answers", "wrong", "lost", "late", "reconnects", "refused")
    cells = [["", *counts, "p50, ms", "p95, ms", "longest, ms"]]
    for part, row in result["parts"].items():
        times = [f"{1e3 * row[name]:.0f}" for name in ("p50_s", "p95_s", "max_s")]
        cells.append([part, *(str(row[name]) for name in counts), *times])
    return {
        "table": table(cells),
        "tried": ", ".join(f"{name} {number}" for name, number in result["attacks"].items()),
        "memory": ", ".join(f"{name} {kilobytes / 1e3:.0f} MB" for name, kilobytes in result["memory_kb"].items()),
        "load": f"{result['load_before']:.1f}",
        **{name: f"{value:g}" for name, value in _options(result["command"]).items()},
    }


def _options(command: str) -> dict[str, float]:
    """The numbers that a benchmark's command line gives."""
    words = command[command.index("--") :].split()
    return {
        name.removeprefix("--").replace("-", "_"): float(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }


VIEWS: Mapping[str, Callable[[Result], dict[str, Any]]] = {
    "simulation": _simulation,
    "formats": _formats,
    "driving": _driving,
    "live_driving": _live_driving,
    "soak": _soak,
    "guard_stop": _guard_stop,
    "attacks": _attacks,
    "faults": _faults,
    "attack_nodes": _attacks,
    "robots_per_device": _robots_per_device,
    "serving_under_load": _serving_under_load,
}
