"""Several settings of the engine on the same simulated episodes: Spec-VLA's tables 1 to 3 and figure 4."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.evaluation.frame_sources import simulation_source
from specvla_ros.evaluation.report.sweep import write_sweep_report
from specvla_ros.evaluation.side_by_side import run_side_by_side
from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings, policy_of, read_episodes, simulate
from specvla_ros.evaluation.simulate_summary import PairedComparison, SimulateSummary, compare_episodes
from specvla_ros.simulation.rollout import EpisodeResult

SWEEP_FILE, REPORT_FILE = "sweep.json", "report.html"
_TIMED_FRAMES = 64


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep."""

    name: str
    engine: EngineSettings


@dataclass(frozen=True)
class SweepRow:
    """What one setting did.

    Args:
        setting: which one.
        summary: of its episodes.
        against_first: paired with the sweep's first setting, episode by episode.
        action_s: mean seconds per action on the same frames as all others, side by side.
        speed_up: the first setting's `action_s` over this one's.
    """

    setting: Setting
    summary: SimulateSummary
    against_first: PairedComparison
    action_s: float
    speed_up: float

    def as_json(self) -> dict[str, Any]:
        """For sweep.json; lengths and places are those of Spec-VLA's tables 2 and 3."""
        tally = self.summary.decode
        return {
            "name": self.setting.name,
            "success": self.summary.success.as_json(),
            "against_first": self.against_first.as_json(),
            "tau": tally.tau,
            "forwards_per_action": tally.forwards_per_action,
            "share_by_accept_length": tally.by_length(),
            "accept_length_by_place": tally.by_place(),
            "largest_bins_off": max((bins for _, bins in tally.bins_off), default=0),
            "action_s": self.action_s,
            "speed_up": self.speed_up,
        }


def relaxation_settings(spec: EngineSettings, bins: Sequence[int]) -> list[Setting]:
    """Plain decoding, then speculation as given: strict, and with each tolerance in bins (Spec-VLA, figure 4)."""
    relaxed = [
        Setting(f"r{r}", replace(spec, acceptance=replace(spec.acceptance, rule="bin_distance", bins=(r,))))
        for r in bins
    ]
    strict = Setting("strict", replace(spec, acceptance=replace(spec.acceptance, rule="strict")))
    return [Setting("ar", replace(spec, mode="ar")), strict, *relaxed]


def sweep(
    base: SimulateSettings,
    settings: Sequence[Setting],
    plan: SimulatePlan,
    out: Path,
    on_episode: Callable[[str, EpisodeResult, int, int], None] | None = None,
) -> list[SweepRow]:
    """Simulates every setting on the same seeds, and times them side by side on the same frames.

    Called again it runs what is missing; each setting's results lie in a folder of its name.

    Args:
        base: all but the engine's settings.
        settings: the first is what the others are compared with.
        plan: which episodes.
        out: directory of the results.
        on_episode: called with the setting's name, an episode, the episodes finished and those wanted.

    Raises:
        UserError: something given is wrong, or the disk is full; finished episodes are kept.
    """
    summaries = {}
    for setting in settings:

        def report(result: EpisodeResult, done: int, wanted: int, name: str = setting.name) -> None:
            if on_episode is not None:
                on_episode(name, result, done, wanted)

        summaries[setting.name] = simulate(replace(base, engine=setting.engine), plan, out / setting.name, report)
    policy = policy_of(base)
    source = simulation_source(
        policy,
        plan.first_seed,
        world=base.world,
        tasks=plan.tasks,
        engine=base.engine,
    )
    runs = run_side_by_side(policy, {each.name: each.engine for each in settings}, list(islice(source, _TIMED_FRAMES)))
    first = settings[0].name
    rows = [
        SweepRow(
            setting=setting,
            summary=summaries[setting.name],
            against_first=compare_episodes(read_episodes(out / first), read_episodes(out / setting.name)),
            action_s=runs[setting.name].action_s,
            speed_up=runs[first].action_s / runs[setting.name].action_s,
        )
        for setting in settings
    ]
    context = summaries[first].context
    text = json.dumps({"rows": [row.as_json() for row in rows], "context": context}, indent=2, allow_nan=False)
    (out / SWEEP_FILE).write_text(text + "\n", encoding="utf-8")
    write_sweep_report(out / REPORT_FILE, rows)
    return rows
