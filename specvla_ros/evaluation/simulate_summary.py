"""What simulated episodes add up to."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specvla_ros.engine.tally import DecodeTally
from specvla_ros.evaluation.statistics import mcnemar_p, wilson_interval
from specvla_ros.simulation.rollout import EpisodeResult


@dataclass(frozen=True)
class Rate:
    """A share of episodes with its 95 % Wilson interval."""

    successes: int
    n: int

    @property
    def value(self) -> float:
        """The share; 0 of none."""
        return self.successes / self.n if self.n else 0.0

    def as_json(self) -> dict[str, Any]:
        """With rate and interval."""
        low, high = wilson_interval(self.successes, self.n)
        return {"successes": self.successes, "episodes": self.n, "rate": self.value, "low": low, "high": high}

    def __str__(self) -> str:
        low, high = wilson_interval(self.successes, self.n)
        return f"{100 * self.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


@dataclass(frozen=True)
class TaskSummary:
    """The episodes of one task.

    Args:
        instruction: what the policy was told.
        success: share of episodes that were done in time.
        listened: share in which the thing that was moved most is the one that the task names; None where the world
            does not tell.
        acted_on: episodes by the thing that was moved most.
        steps_to_success: median number of actions; None without a success.
        time_to_success_s: median world time.
        roughness: mean over the episodes, see EpisodeResult.
        failures: early ends by their reason.
    """

    instruction: str
    success: Rate
    listened: Rate | None
    acted_on: dict[str, int]
    steps_to_success: float | None
    time_to_success_s: float | None
    roughness: float
    failures: dict[str, int]


@dataclass(frozen=True)
class SimulateSummary:
    """All episodes.

    Args:
        tasks: by name.
        success: over all of them.
        listened: over the tasks for which it is known.
        latency_s: observation-to-action latency: p50, p95, p99, mean; empty without an action.
        action_rate_hz: actions per second of world time.
        drops: observations without an action, by reason.
        decode: how the actions were decoded.
        context: what it was made with.
    """

    tasks: dict[str, TaskSummary]
    success: Rate
    listened: Rate | None
    latency_s: dict[str, float]
    action_rate_hz: float
    drops: dict[str, int]
    decode: DecodeTally
    context: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The whole, with rates and intervals spelt out."""
        tasks = {}
        for name, task in self.tasks.items():
            listened = task.listened.as_json() if task.listened else None
            tasks[name] = asdict(task) | {"success": task.success.as_json(), "listened": listened}
        return {
            "tasks": tasks,
            "success": self.success.as_json(),
            "listened": self.listened.as_json() if self.listened else None,
            "latency_s": self.latency_s,
            "action_rate_hz": self.action_rate_hz,
            "drops": self.drops,
            "decode": self.decode.as_json()
            | {"tau": self.decode.tau, "forwards_per_action": self.decode.forwards_per_action},
            "context": dict(self.context),
        }


def summarise_episodes(episodes: Sequence[EpisodeResult], *, context: Mapping[str, Any]) -> SimulateSummary:
    """Adds up episodes, in the order of their tasks' first."""
    by_task: dict[str, list[EpisodeResult]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task, []).append(episode)
    tasks = {name: _task(name, group) for name, group in by_task.items()}
    heard = [task.listened for task in tasks.values() if task.listened is not None]
    latency = np.array([seconds for episode in episodes for seconds in episode.latency_s])
    drops: Counter[str] = Counter()
    for episode in episodes:
        drops.update(episode.drops)
    world_s = sum(episode.time_s for episode in episodes)
    return SimulateSummary(
        tasks=tasks,
        success=Rate(sum(episode.succeeded for episode in episodes), len(episodes)),
        listened=Rate(sum(each.successes for each in heard), sum(each.n for each in heard)) if heard else None,
        latency_s=_percentiles(latency),
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
    from specvla_ros.simulation.tasks import TASKS

    return next((each.cube for each in TASKS if each.name == task), None)


def _percentiles(seconds: np.ndarray) -> dict[str, float]:
    if not len(seconds):
        return {}
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "mean": float(seconds.mean())}


@dataclass(frozen=True)
class PairedComparison:
    """Two settings on the same tasks and seeds.

    Args:
        first, second: their successes over the pairs.
        only_first, only_second: pairs in which one of them alone succeeded.
        p: two-sided exact McNemar test that both succeed alike.
    """

    first: Rate
    second: Rate
    only_first: int
    only_second: int
    p: float

    def as_json(self) -> dict[str, Any]:
        """With rates and intervals spelt out."""
        return asdict(self) | {"first": self.first.as_json(), "second": self.second.as_json()}


def compare_episodes(
    first: Mapping[tuple[str, int], EpisodeResult], second: Mapping[tuple[str, int], EpisodeResult]
) -> PairedComparison:
    """Compares the episodes that both have; see `read_episodes`."""
    pairs = [(first[key].succeeded, second[key].succeeded) for key in first if key in second]
    only_first = sum(a and not b for a, b in pairs)
    only_second = sum(b and not a for a, b in pairs)
    return PairedComparison(
        first=Rate(sum(a for a, _ in pairs), len(pairs)),
        second=Rate(sum(b for _, b in pairs), len(pairs)),
        only_first=only_first,
        only_second=only_second,
        p=mcnemar_p(only_first, only_second),
    )
