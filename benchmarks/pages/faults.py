# SPDX-License-Identifier: Apache-2.0
"""Fields for faults, attacks, soak and mutation tests."""

from benchmarks.pages.tables import Result, named, newer_words, table, views


def _soak(result: Result) -> Result:
    phases = [{**phase, "failed": "; ".join(phase["failures"]) or "none"} for phase in named(result["phases"], "name")]
    return {"verdict": "passed" if result["passed"] else "failed", "phases": phases}


def _attacks(result: Result) -> Result:
    classes = named(result["classes"], "name")
    did = [
        ", ".join(f"{count} {newer_words(outcome)}" for outcome, count in found["outcomes"].items())
        for found in classes
    ]
    return {
        **{key: sum(found[key] for found in classes) for key in ("tried", "failed")},
        "classes": [{**found, "did": words} for found, words in zip(classes, did, strict=True)],
        "not_run": ", ".join(result.get("not_run", ())) or "none",
    }


def _mutants(result: Result) -> Result:
    rows = [{**row, "noticed": row["killed"] + row["timeouts"]} for row in named(result["modules"], "name")]
    sums = {key: sum(row[key] for row in rows) for key in ("mutants", "noticed", "timeouts", "equivalent")}
    matter = sums["mutants"] - sums["equivalent"]
    all_of_them = result["drawn"] == result["of"]
    rooms = dict.fromkeys(row["name"].rpartition("/")[0].replace("control/guard", "control") for row in rows)
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
        "random": [result["at_random"]] if "at_random" in result else [],
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


def _busy_demo(result: Result) -> Result:
    causes = [(node, *each) for node, counts in result["refused"].items() for each in counts.items()]
    words = ", ".join(f"{count} × {cause} ({node})" for node, cause, count in causes)
    return {"refusals": words or "none"}


VIEWS = views(_soak, _attacks, _faults, _mutants, _busy_demo) | {"attack_nodes": _attacks}
