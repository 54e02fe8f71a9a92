# SPDX-License-Identifier: Apache-2.0
"""Age of the image that a robot acts on, by mode: the engine's own scheduler with the costs of a device's table.

python -m benchmarks.speed.age

Derived: nothing runs on these devices, and no policy is computed. Forwards per answer were recorded from small policies
(pipelining_nano.json, pipelining_of_chunks.json), separately for answers drafted from the previous image and for those
started while others were in flight. A frame is always waiting; an image's age at its admission adds to all ages.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Annotated, Any

import typer

from benchmarks.acceptance_trace import lengths_for
from benchmarks.harness import Out, chosen_names, finish, result_head
from benchmarks.results_page import RESULTS
from specvla_ros.engine.pace import mean_age
from specvla_ros.lab.planning.cost import (
    OPENVLA_7B,
    Forward,
    draft_parts,
    forward_parts,
    model_cost,
    roofline_seconds,
    vision_part,
)
from specvla_ros.lab.planning.device import Device, Software, read_device
from specvla_ros.lab.planning.limits import DrivenLoop, Mode, Tick, drive
from specvla_ros.models.settings import WeightFormat
from specvla_ros.speculation.settings import DraftSettings

DEVICES = ("orin", "thor", "rtx5090", "h100")
FORMATS = (WeightFormat.NONE, WeightFormat.W8A8)
PLAIN, ALONE, AUTO = "ar", "spec", "auto"
AHEAD, UNDRAFTED = "ahead", "undrafted"
_ACTIONS = {"digits-2": 2, "digits": 8}  # actions per answer of the policies whose first ones are out early
_WINDOWS = 50  # windows per run, for confidence intervals
_NODES = 16  # of the tree beside which vision is timed
_SAMPLES = 4000  # samples of the age for its quantile
_MODEL = model_cost(OPENVLA_7B)


@dataclass(frozen=True)
class Answers:
    """A policy's answers and their number of forwards.

    Args:
        policy: name of the recorded policy.
        fresh: forwards of an answer started alone, including its prompt's.
        stale: forwards of an answer started while others were in flight.
        nodes: nodes of a tree.
        head: True if a draft head grows the tree; otherwise it is the previous answer.
        first: tokens of its first action if the robot acts on it while the rest is decoded; 0: it cannot.
    """

    policy: str
    tokens: int
    fresh: float
    stale: float
    nodes: int
    head: bool
    first: int = 0


def recorded() -> list[Answers]:
    """Returns the answers of the recorded policies, shortest first."""
    found = []
    for file, nodes in (("pipelining_nano", {"nano": 16, "text": 48}), ("pipelining_of_chunks", {})):
        policies = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["policies"]
        for name, policy in policies.items():
            rows = policy["devices"]["orin"]["frame_always_waiting"]
            beside = rows.get("specpipe, strict, 2 chunks, in order") or rows["specpipe, strict, 2 chunks"]
            stale = beside["forwards_per_action"] - 1  # one forward carried the other half of the prompt
            fresh = rows["spec, strict"]["forwards_per_action"]
            tree = nodes.get(name, DraftSettings.nodes if name == "fast" else 64)
            tokens = round(policy["tokens"])
            first = math.ceil(tokens / _ACTIONS[name]) if name in _ACTIONS else 0
            found.append(Answers(name, tokens, fresh, max(fresh, stale), tree, name == "nano", first))
    return sorted(found, key=lambda each: each.tokens)


def modes_of(answers: Answers) -> dict[str, Mode]:
    """Returns the fixed modes, `auto`, and `auto` where images may be beside a forward, and without drafts."""
    nodes = answers.nodes
    return {
        PLAIN: Mode("ar", "ar"),
        ALONE: Mode("spec", "spec", nodes, at_prompt=True),
        "pipeline": Mode("pipeline", "pipeline", chunks=2),
        "specpipe": Mode("specpipe", "specpipe", nodes, chunks=2, at_prompt=True),
        AUTO: Mode("auto", "auto", nodes, max_in_flight=0, at_prompt=True),
        AHEAD: Mode("auto", "auto", nodes, max_in_flight=0, at_prompt=True, ahead=True),
        UNDRAFTED: Mode("auto", "auto", max_in_flight=0),
    }


def main(
    context: typer.Context,
    devices: Annotated[str, typer.Option(help="Devices, comma-separated.")] = ",".join(DEVICES),
    frames: Annotated[int, typer.Option(help="Answers per cell.")] = 1000,
    out: Out = RESULTS / "age.json",
) -> None:
    """Derives all cells."""
    names, rows, captured = chosen_names("--devices", devices, DEVICES), [], []
    for answers in recorded():
        runs: dict[str, DrivenLoop] = {}  # of the fixed modes, which are the same on every device
        for name in names:
            device = read_device(name)
            for weights in FORMATS:
                rows.append(_row(answers, device, name, weights, frames, runs))
                print(f"{answers.policy}, {name}, {weights.value}", flush=True)
            graphs = device.running(Software.CAPTURED)
            captured.append(_row(answers, graphs, name, WeightFormat.NONE, frames, runs))
    found = {"windows": _WINDOWS, "answers": [vars(each) for each in recorded()], "rows": rows, "captured": captured}
    beside = [_beside(read_device(name).running(software), name, software) for name in names for software in Software]
    finish(result_head(context) | found | {"beside": beside}, out)


def _beside(device: Device, name: str, software: Software) -> dict[str, Any]:
    """Times of the vision towers, of a verification, and of both at once."""
    tree = Forward(trees=1, nodes=_NODES, prefix_rows=_MODEL.prompt_rows)
    of_each = (
        [vision_part(_MODEL, device.value_bytes)],
        *(
            forward_parts(each, _MODEL, WeightFormat.NONE, device.value_bytes)
            for each in (tree, replace(tree, image=True))
        ),
    )
    vision_s, forward_s, both_s = (roofline_seconds(parts, device, device.efficiency) for parts in of_each)
    found = {"vision_s": vision_s, "forward_s": forward_s, "both_s": both_s}
    return {"device": name, "software": software.value} | found


def _row(
    answers: Answers, device: Device, name: str, weights: WeightFormat, frames: int, runs: dict[str, DrivenLoop]
) -> dict[str, Any]:
    fresh, stale = (
        lengths_for(f"{answers.policy}, {which}", answers.tokens, forwards)
        for which, forwards in (("fresh", answers.fresh), ("stale", answers.stale))
    )

    def figures(mode: Mode, first: int = 0) -> dict[str, Any]:
        seconds, run = _seconds(answers, mode, device, weights), runs.get(mode.name)
        if run is None:
            timed, rows, tokens = seconds if mode.chooses else None, _MODEL.prompt_rows, answers.tokens
            run = drive(mode, rows, tokens, fresh, timed, stale=stale, frames=frames, first_tokens=first)
            if not mode.chooses:
                runs[mode.name] = run
        return _figures(run, seconds)

    modes = modes_of(answers)
    found = {mode_name: figures(mode) for mode_name, mode in modes.items()}
    first = figures(modes[AUTO], answers.first) if answers.first else None
    ahead, undrafted = found.pop(AHEAD), found.pop(UNDRAFTED)
    fixed = {each: figures for each, figures in found.items() if each != AUTO}
    best = min(fixed, key=lambda each: float(fixed[each]["age_s"]))
    return {
        "device": name,
        "weights": weights.value,
        "policy": answers.policy,
        "tokens": answers.tokens,
        "modes": found,
        "first_action": first,
        "ahead": ahead,
        "undrafted": undrafted,
        "best": best,
        "over_best": _over(found[AUTO], found[best]),
        "over_spec": _over(found[AUTO], found[ALONE]),
        "ahead_over_auto": _over(ahead, found[AUTO]),
        "ahead_over_spec": _over(ahead, found[ALONE]),
        "undrafted_over_plain": _over(undrafted, found[PLAIN]),
    }


def _seconds(answers: Answers, mode: Mode, device: Device, weights: WeightFormat) -> Callable[[Tick], float]:
    model = replace(_MODEL, action_tokens=answers.tokens)
    depth = min(mode.depth, max(1, answers.tokens - 2))

    @cache
    def seconds(tick: Tick) -> float:
        parts = forward_parts(tick.forward, model, weights, device.value_bytes)
        if tick.drafting and answers.head:
            rows, prefix = tick.drafting * mode.nodes, tick.drafting * model.prompt_rows
            parts += draft_parts(model, weights, device.value_bytes, steps=depth, rows=rows, prefix_rows=prefix)
        return roofline_seconds(parts, device, device.efficiency)

    return seconds


def _figures(run: DrivenLoop, seconds: Callable[[Tick], float]) -> dict[str, Any]:
    ends = list(accumulate(map(seconds, run.ticks), initial=0.0))
    acted = [(ends[last + 1], ends[last + 1] - ends[first]) for _, first, last in run.actions]
    step = max(2, len(acted) // _WINDOWS)
    windows = [mean_age(acted[start : start + step + 1]) for start in range(0, len(acted) - step, step)]
    return {
        "age_s": mean_age(acted),
        "error_s": statistics.stdev(windows) / len(windows) ** 0.5,
        "p95_s": quantile_of_age(acted, 0.95),
        "rate_hz": (len(acted) - 1) / (acted[-1][0] - acted[0][0]),
        "latency_s": statistics.fmean(age for _, age in acted),
        "in_flight": run.in_flight,
    }


def quantile_of_age(acted: Sequence[tuple[float, float]], share: float) -> float:
    """Quantile over time of the age of the image acted on; arguments as for `mean_age`."""
    first, last = acted[0][0], acted[-1][0]
    ages, place = [], 0
    for sample in range(_SAMPLES):
        now = first + (last - first) * sample / _SAMPLES
        while place + 1 < len(acted) and acted[place + 1][0] <= now:
            place += 1
        since, age = acted[place]
        ages.append(age + now - since)
    return sorted(ages)[int(share * len(ages))]


def _over(mine: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Relative excess of an age, with its 95 % interval."""
    ratio = mine["age_s"] / other["age_s"]
    error = ratio * ((mine["error_s"] / mine["age_s"]) ** 2 + (other["error_s"] / other["age_s"]) ** 2) ** 0.5
    return {"share": ratio - 1, "low": ratio - 1 - 1.96 * error, "high": ratio - 1 + 1.96 * error}


if __name__ == "__main__":
    typer.run(main)
