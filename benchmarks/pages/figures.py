# SPDX-License-Identifier: Apache-2.0
"""The plot of each results page, from the JSON files in benchmarks/results."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.pages.plot import Panel, Plot, Point, Row
from benchmarks.pages.tables import Result
from specvla_ros.lab.evaluation.paired import wilson_interval

Results = Mapping[str, Result]  # by the names of their files, without .json
CLOSED_LOOPS = {"ar": "ar", "spec, strict": "spec", "specpipe, strict, 2 chunks": "specpipe"}
"""The closed loops that a page shows, by name, and their modes."""
_DEVICES = {"orin": "Orin", "thor": "Thor", "rtx5090": "RTX 5090", "h100": "H100"}


def what_it_buys(results: Results) -> Plot:
    """Tasks within nominal time, by device and mode, of answers of 7 tokens and of long ones."""
    series = CLOSED_LOOPS | {"ar": "plain (ar)"}
    panels = []
    for policy in results["pipelining_nano"]["policies"].values():
        rows = []
        for name, device in policy["devices"].items():
            found = [device["closed_loop"][mode] for mode in series]
            rows.append(
                Row(_DEVICES[name], tuple(_share(each["in_time"], each["success"]["episodes"]) for each in found))
            )
        title = f"Answers of {policy['tokens']:.0f} tokens"
        panels.append(Panel(title, "tasks within nominal time, %", tuple(series.values()), tuple(rows)))
    return Plot(tuple(panels))


def speculation(results: Results) -> Plot:
    """Forwards and success of the nano policy by drafts."""
    rows = results["speculation_nano"]["rows"]
    forwards = tuple(Row(_draft(row), (Point.of(row["forwards_per_action"]),)) for row in rows)
    success = tuple(Row(_draft(row), (_rate(row["success"]),)) for row in rows)
    return Plot(
        (
            Panel("Forwards", "forwards per action", ("nano",), forwards),
            Panel("Success", "tasks completed, %", ("nano",), success),
        )
    )


def _draft(row: Result) -> str:
    words = (("temporal alone", "t"), (", window mass", " w"), (" nodes", ""), (", temporal", " t"))
    name: str = row["name"]
    for long, short in words:
        name = name.replace(long, short)
    return name


def pipelining_and_age(results: Results) -> Plot:
    """Mean age of the image acted on, by tokens of an answer and mode."""
    rows = [row for row in results["age"]["rows"] if row["weights"] == "none"]
    modes = tuple(rows[0]["modes"])
    panels = []
    for device in ("orin", "h100"):
        found = [row for row in rows if row["device"] == device]
        shown = tuple(
            Row(f"{row['tokens']} tokens", tuple(_with_error(row["modes"][mode]) for mode in modes)) for row in found
        )
        panels.append(Panel(_DEVICES[device], "mean image age, s", modes, shown, log=True))
    return Plot(tuple(panels))


def _with_error(found: Result) -> Point:
    """A mean age with the 95 % interval of its mean."""
    age_s, error_s = found["age_s"], 1.96 * found["error_s"]
    return Point.of(age_s, age_s - error_s, age_s + error_s)


def gpu(results: Results) -> Plot:
    """Answers per second and image age of each mode, a group of rows per GPU."""
    rates, ages = [], []
    for result in results.values():
        if result["benchmark"] == "gpu":
            modes = result["steps"]["modes"]["found"]
            shown = [mode for mode in modes if "chunks" not in mode and "window" not in mode]
            heading = [Row(result["hardware"])]
            rates += heading + [Row(_contestant(mode), (_rounds(modes[mode]),)) for mode in shown]
            ages += heading + [
                Row(_contestant(mode), (Point.of(1e3 * modes[mode]["image_age_s"]),))
                for mode in shown
                if "image_age_s" in modes[mode]
            ]
    series = ("measured",)
    return Plot(
        (
            Panel("Rate, answers of 7 tokens", "answers/s", series, tuple(rates)),
            Panel("Image age, answers of 7 tokens", "mean image age, ms", series, tuple(ages)),
        )
    )


def _contestant(name: str) -> str:
    return name.replace("transformers, compiled", "compiled generate").replace("transformers", "generate")


def _rounds(row: Result, over: float = 1.0) -> Point:
    """A rate with the smallest and the largest of its rounds."""
    rates = row["rates_hz"]
    return Point.of(row["action_rate_hz"] / over, min(rates) / over, max(rates) / over)


def cpu(results: Results) -> Plot:
    """Answers per second relative to plain decoding in float32, by format and mode."""
    series = ("ar", "spec", "specpipe", "transformers")
    panels = []
    for name in (
        "decode_modes_cpu",
        "decode_modes_cpu_1b",
        "decode_modes_cpu_1b_decoder",
        "decode_modes_cpu_1b_digits",
    ):
        result = results[name]
        for size, found in result["sizes"].items():
            formats = {key: each["modes"] for key, each in found["quantized"].items() if "modes" in each}
            plain = formats["none"]["ar"]["action_rate_hz"]
            other = found.get("modes", {})
            rows = []
            for key, modes in formats.items():
                points: list[Point | None] = [_rounds(modes[mode], plain) if mode in modes else None for mode in series]
                if key == "none" and other:
                    points[-1] = _rounds(other["transformers"], other["ar"]["action_rate_hz"])
                rows.append(Row("float32" if key == "none" else key, tuple(points)))
            vision = "" if result["vision"] else ", no vision"
            title = f"{size}: {result['tokens']} tokens{vision}"
            panels.append(Panel(title, "rate relative to ar in float32", series, tuple(rows), line=1.0))
    return Plot(tuple(panels))


def robots_per_device(results: Results) -> Plot:
    """Age of the worst robot's image by the number of robots that share a device."""
    ways = ("spec, packed", "spec, in turns", "spec, an engine each")
    panels = []
    for name, device in results["robots_per_device"]["devices"].items():
        counts = [row["robots"] for row in device["rows"][ways[0]]]
        rows = tuple(
            Row(
                f"{count} robot{'s' * (count > 1)}",
                tuple(Point.of(device["rows"][way][index]["age_p95_s"]) for way in ways),
            )
            for index, count in enumerate(counts)
        )
        title = f"{_DEVICES.get(name, name)}, {'measured' if device['measured'] else 'emulated'}"
        series = tuple(way.removeprefix("spec, ") for way in ways)
        panels.append(Panel(title, "image age, p95, worst robot, s", series, rows, log=True))
    return Plot(tuple(panels))


def faults_and_attacks(results: Results) -> Plot:
    """Shares of the runs with motion beyond the limits and after the promised time, with and without the guard."""
    faults, stack = results["faults_sim"], results["stack"]
    bare = {key: sum(row["bare"][key] for row in faults["faults"]) for key in ("runs", "beyond", "promised", "late")}
    contestants = (
        ("guard, simulated", faults | {"ran": faults["runs"]}),
        ("no guard, simulated", bare | {"ran": bare["runs"]}),
        ("guard, running nodes", stack),
    )
    panels = [
        Panel(title, axis, ("share",), tuple(Row(name, (_share(each[key], each[of]),)) for name, each in contestants))
        for title, axis, key, of in (
            ("Motion beyond the limits", "runs, %", "beyond", "ran"),
            ("Motion after the promised time", "runs, %", "late", "promised"),
        )
    ]
    nodes = (("input", results["attacks"]), ("running nodes", results["attack_nodes"]))
    rows = tuple(Row(name, (_failed(each["classes"].values()),)) for name, each in nodes)
    return Plot((*panels, Panel("Failed attacks", "cases, %", ("share",), rows)))


def _failed(classes: Iterable[Result]) -> Point:
    counts = [(each["failed"], each["tried"]) for each in classes]
    return _share(sum(failed for failed, _ in counts), sum(tried for _, tried in counts))


def papers(results: Results) -> Plot:
    """Forwards and success by acceptance rule, for a policy that writes text before it acts."""
    rows = results["acceptance_rules"]["text"]
    plain, drafts = rows[0], {"lookup": "lookup", "lookup and answer before": "lookup, answer before"}
    rules = ("strict", "composite", "fly", "lvspec")
    labels = {"strict": "strict", "composite": "composite", "fly": "FLy", "lvspec": "LVSpec"}
    by_name = {row["name"]: row for row in rows}

    def panel(title: str, axis: str, point: Callable[[Result], Point]) -> Panel:
        shown = [Row("plain", (point(plain), *(None for _ in list(drafts)[1:])))]
        shown += [Row(labels[rule], tuple(point(by_name[f"{rule}, {each}"]) for each in drafts)) for rule in rules]
        return Panel(title, axis, tuple(drafts.values()), tuple(shown))

    return Plot(
        (
            panel("Forwards", "forwards per answer", lambda row: Point.of(row["forwards_per_action"])),
            panel("Success", "tasks completed, %", lambda row: _rate(row["success"])),
        )
    )


def _share(count: int, of: int) -> Point:
    """A share in percent with Wilson's 95 % interval."""
    return Point.of(100 * count / of, *(100 * each for each in wilson_interval(count, of)))


def _rate(found: Result) -> Point:
    return Point.of(*(100 * found[key] for key in ("rate", "low", "high")))


FIGURES: Sequence[Callable[[Results], Plot]] = (
    what_it_buys,
    speculation,
    pipelining_and_age,
    gpu,
    cpu,
    robots_per_device,
    faults_and_attacks,
    papers,
)


def figures(results: Results) -> dict[str, Plot]:
    """The plots by the names of their pages."""
    return {figure.__name__.replace("_", "-"): figure(results) for figure in FIGURES}
