# SPDX-License-Identifier: Apache-2.0
"""The figures of simulated episodes: of one setting, and of several beside each other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.tally import DecodeTally, percentiles
from specvla_ros.lab.evaluation.statistics import PairedComparison, Rate
from specvla_ros.lab.simulation.rollout import EpisodeResult


@dataclass(frozen=True)
class TaskSummary:
    """The episodes of one task."""

    instruction: str
    success: Rate
    # share in which the thing moved farthest is the one that the task names; None: unknown in this world
    listened: Rate | None
    acted_on: dict[str, int]  # episodes by the thing moved farthest
    steps_to_success: float | None  # median number of actions; None without a success
    time_to_success_s: float | None  # median world time
    roughness: float  # mean over the episodes, see EpisodeResult
    failures: dict[str, int]  # early ends by their reason


@dataclass(frozen=True)
class SimulateSummary:
    """All episodes."""

    tasks: dict[str, TaskSummary]
    success: Rate
    listened: Rate | None  # over the tasks for which it is known
    latency_s: dict[str, float]  # observation-to-action latency: p50, p95, p99, mean, max; empty without an action
    picture_age_s: float | None  # mean over the episodes, see EpisodeResult; None: lockstep, or no action
    action_rate_hz: float  # actions per second of world time
    drops: dict[str, int]
    decode: DecodeTally
    context: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        tasks = {}
        for name, task in self.tasks.items():
            listened = task.listened.as_json() if task.listened else None
            tasks[name] = asdict(task) | {"success": task.success.as_json(), "listened": listened}
        tally = self.decode
        return vars(self) | {
            "tasks": tasks,
            "success": self.success.as_json(),
            "listened": self.listened.as_json() if self.listened else None,
            "decode": tally.as_json() | {"tau": tally.tau, "forwards_per_action": tally.forwards_per_action},
            "context": dict(self.context),
        }


def summarise_episodes(episodes: Sequence[EpisodeResult], *, context: Mapping[str, Any]) -> SimulateSummary:
    """The figures of episodes; tasks in the order of their first episodes."""
    by_task: dict[str, list[EpisodeResult]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task, []).append(episode)
    tasks = {name: _task(name, group) for name, group in by_task.items()}
    listened = [task.listened for task in tasks.values() if task.listened is not None]
    latency = [seconds for episode in episodes for seconds in episode.latency_s]
    drops: Counter[str] = Counter()
    for episode in episodes:
        drops.update(episode.drops)
    world_s = sum(episode.time_s for episode in episodes)
    ages_s = [episode.picture_age_s for episode in episodes if episode.picture_age_s is not None]
    return SimulateSummary(
        tasks=tasks,
        success=Rate(sum(episode.succeeded for episode in episodes), len(episodes)),
        listened=Rate(sum(rate.successes for rate in listened), sum(rate.n for rate in listened)) if listened else None,
        latency_s=percentiles(latency),
        picture_age_s=float(np.mean(ages_s)) if ages_s else None,
        action_rate_hz=sum(episode.steps for episode in episodes) / world_s if world_s else 0.0,
        drops=dict(drops),
        decode=DecodeTally.sum(DecodeTally.of_json(episode.decode) for episode in episodes if episode.decode),
        context=context,
    )


def _task(name: str, episodes: Sequence[EpisodeResult]) -> TaskSummary:
    done = [episode for episode in episodes if episode.succeeded]
    named = _named_cube(name)
    listened = Rate(sum(episode.acted_on == named for episode in episodes), len(episodes)) if named else None
    return TaskSummary(
        instruction=episodes[0].instruction,
        success=Rate(len(done), len(episodes)),
        listened=listened,
        acted_on=dict(Counter(str(episode.acted_on or "nothing") for episode in episodes)) if named else {},
        steps_to_success=float(np.median([episode.steps for episode in done])) if done else None,
        time_to_success_s=float(np.median([episode.time_s for episode in done])) if done else None,
        roughness=float(np.mean([episode.roughness for episode in episodes])),
        failures=dict(Counter(episode.failure for episode in episodes if episode.failure)),
    )


def _named_cube(task: str) -> str | None:
    from specvla_ros.lab.simulation.tasks import TASKS

    return next((known.cube for known in TASKS if known.name == task), None)


def compare_episodes(
    first: Mapping[tuple[str, int], EpisodeResult], second: Mapping[tuple[str, int], EpisodeResult]
) -> PairedComparison:
    """Compares the episodes that both have; see `read_episodes`."""
    return PairedComparison.from_pairs(
        [(first[key].succeeded, second[key].succeeded) for key in first if key in second]
    )


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep."""

    name: str
    engine: EngineSettings


@dataclass(frozen=True)
class SweepRow:
    """The results of one setting of a sweep."""

    setting: Setting
    summary: SimulateSummary
    against_first: PairedComparison  # its episodes paired with those of the sweep's first setting
    action_s: float  # mean seconds per action on the frames that all settings share
    speed_up: float  # the first setting's `action_s` over this one's

    def as_json(self) -> dict[str, Any]:
        """For sweep.json; accept lengths and their positions are those of Spec-VLA's tables 2 and 3."""
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
