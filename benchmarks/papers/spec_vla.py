# SPDX-License-Identifier: Apache-2.0
"""Spec-VLA's tables 1 to 3 and figures 4 and 5 for the nano policy: one threshold for all tokens, the paper's tree.

python -m benchmarks.papers.spec_vla --episodes 20 --workers 2

`decode.preset: spec-vla-paper` with each threshold r in bins, tolerances in millimetres and degrees with the same tree,
and plain decoding, all on the same starts and on the same frames.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import Episodes, Out, Seed, Work, Workers, finish, of_weights, result_head, show_progress
from benchmarks.results_page import RESULTS
from benchmarks.speculation.speculation import TOLERANCES
from specvla_ros import Action, Engine, EngineSettings
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.compare import Setting, sweep
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings
from specvla_ros.lab.simulation.tasks import FRAME_FIRST_SEED
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.target import Target
from specvla_ros.speculation.accept import AcceptReason

PAPERS_R = 9  # on three LIBERO suites
_CASE_FRAMES = 200


def threshold(r: int) -> EngineSettings:
    """Returns the paper's settings with another threshold in bins, for every token."""
    return engine_settings_from(mode="spec", preset="spec-vla-paper", acceptance_bins=(r,), acceptance_gripper_bins=r)


def settings(thresholds: Sequence[int]) -> list[Setting]:
    """Returns plain decoding, then speculation with each threshold and with each tolerance."""
    tree = threshold(0)
    relaxed = [Setting(f"r = {r}", threshold(r)) for r in thresholds]
    bounded = [
        Setting(f"{each.mm:g} mm, {each.degrees:g}°", replace(tree, acceptance=each.acceptance)) for each in TOLERANCES
    ]
    return [Setting("ar", EngineSettings("ar")), *relaxed, *bounded]


def main(
    context: typer.Context,
    thresholds: Annotated[str, typer.Option(help="Thresholds r in bins, comma-separated.")] = "0,1,3,5,7,9,11,13,15",
    episodes: Episodes = 20,
    seed: Seed = 0,
    workers: Workers = 2,
    work: Work = Path("spec-vla-benchmark"),
    out: Out = RESULTS / "spec_vla.json",
) -> None:
    """Runs the missing episodes with every threshold."""
    policy = nano_policy()
    chosen = settings([int(r) for r in thresholds.split(",")])
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    rows = sweep(SimulateSettings(policy), chosen, plan, work, show_progress)
    found = {
        "first_seed": seed,
        "episodes_per_task": episodes,
        "rows": [row.as_json() for row in rows],
        "case": _case(load_target(policy, device="cpu")),
    }
    finish(result_head(context) | of_weights(policy) | found, out)


def _case(policy: Target) -> dict[str, Any]:
    """An action, forward by forward (figure 5), for the frame where the paper's threshold saves the most forwards."""
    strict, relaxed = (Engine(policy, threshold(r)) for r in (0, PAPERS_R))
    best: tuple[Action, Action] | None = None
    for number, frame in enumerate(islice(simulation_source(policy, FRAME_FIRST_SEED), _CASE_FRAMES)):
        observation = replace(frame, stamp_ns=number + 1, epoch=number)
        first, second = (engine.act(observation) for engine in (strict, relaxed))
        if isinstance(first, Action) and isinstance(second, Action):
            saved = first.record.forwards - second.record.forwards
            if best is None or saved > best[0].record.forwards - best[1].record.forwards:
                best = first, second
    if best is None:
        raise SystemExit("the policy gave no action")
    return {
        "instruction": best[0].observation.instruction,
        "threshold": PAPERS_R,
        "strict": _forwards(best[0]),
        "relaxed": _forwards(best[1]),
    }


def _forwards(action: Action) -> list[list[dict[str, Any]]]:
    """Tokens committed per forward: id, distance to the target's own choice in bins, and reason of acceptance."""
    record = action.record
    tokens = [
        {"token": token, "bins_off": off, "why": AcceptReason(why).name.lower()}
        for token, off, why in zip(action.tokens, record.bins_off, record.why, strict=True)
    ]
    ends = [0, *accumulate(record.tokens_per_forward)]
    return [tokens[start:end] for start, end in pairwise(ends)]


if __name__ == "__main__":
    typer.run(main)
