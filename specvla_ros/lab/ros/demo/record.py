# SPDX-License-Identifier: Apache-2.0
"""The demo's record: episodes, latencies, films, refusals of driver and guard. Needs only the messages of ROS."""

import shutil
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus

from specvla_ros.control.action_space import RefusalReason
from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.engine.outcome import DecodeRecord
from specvla_ros.lab.evaluation.rerun_recording import RECORDING_FILE
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, SUMMARY_FILE, RunDirectory, head
from specvla_ros.lab.evaluation.simulate_summary import Film, SimulateSummary, summarise_episodes, write_simulate_report
from specvla_ros.lab.simulation.rollout import EpisodeResult, mean_picture_age_s, roughness
from specvla_ros.lab.tally import DecodeTally
from specvla_ros.models.codecs.statistics import select_statistics
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.msg import DecodeStats, Reasoning, SimEpisode, VlaAction

_RECENT = 20  # number of actions whose latency and rate are shown
FILM_HZ = 20.0


def thinking_s(action: VlaAction) -> float:
    """Seconds from the image's arrival at the policy to the action's publication.

    Not `latency_s`: that is in simulated time, whose step (/clock's) is longer than this latency.
    """
    return float(action.wait_s + action.vision_s + action.prefill_s + action.decode_s + action.publish_s)


def _stamp_s(message: VlaAction | SimEpisode) -> float:
    return float(message.header.stamp.sec + message.header.stamp.nanosec * 1e-9)


def decode_record(stats: DecodeStats) -> DecodeRecord:
    """The engine's record of an answer, as far as the message holds it."""
    names = ("tokens_per_forward", "accept_lengths", "tree_nodes", "bins_off", "why", "tick_s")
    lists = {name: tuple(getattr(stats, name)) for name in names}
    return DecodeRecord(stats.mode, stats.acceptance, in_flight=stats.in_flight, **lists)


def first_values(action: VlaAction) -> list[float]:
    """The values of an answer's first action."""
    return list(action.values[: len(action.names)])


class DemoRecord:
    """Collects the topics' messages, for films and a report in `out` that replace those of an earlier demo.

    `policy` is a checkpoint's directory; `commanded`: the robot takes motion commands instead of the policy's actions.
    `unnorm_key`: the policy's statistics; empty: its only ones.
    """

    def __init__(self, out: Path, policy: Path, commanded: bool, unnorm_key: str = "") -> None:
        self._directory = RunDirectory(out, "demo")
        self._directory.begin()
        self._out, self._films = self._directory.path, self._directory.path / "films"
        shutil.rmtree(self._films, ignore_errors=True)
        (self._out / RECORDING_FILE).unlink(missing_ok=True)
        self._policy, self._commanded = policy, commanded
        self._statistics = select_statistics(read_config(policy).norm_stats, unnorm_key)
        self._films.mkdir(parents=True, exist_ok=True)
        self.episodes: list[EpisodeResult] = []
        self.episode: SimEpisode | None = None
        self.action: VlaAction | None = None
        self.stats: DecodeStats | None = None
        self.text = ""
        self.recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self.unseen = 0  # episodes that the robot finished but whose end never arrived
        self._finished = 0  # episodes by the robot's own count
        self._actions: list[VlaAction] = []
        self._tally = DecodeTally()  # of the episode
        self._dropped, self._dropped_before = Counter[str](), Counter[str]()  # since activation; at the episode's start
        self._film: Film | None = None
        self._filmed: set[str] = set()

    def on_action(self, action: VlaAction) -> None:
        before, self.action = self.action, action
        if before is not None and before.partial and before.header.stamp == action.header.stamp:
            return  # the robot follows the first message of an answer
        self.recent.append((_stamp_s(action), thinking_s(action)))
        self._actions.append(action)
        if self._film is not None:
            self._film.act(action.names, first_values(action))

    def on_stats(self, stats: DecodeStats) -> None:
        self.stats = stats
        self._tally.add(decode_record(stats))
        self._dropped = Counter(dict(zip(stats.drop_reasons, stats.drop_counts, strict=True)))

    def on_reasoning(self, reasoning: Reasoning) -> None:
        self.text = reasoning.text

    def on_image(self, image: np.ndarray) -> None:
        """Takes an image, RGB uint8; films the first episode of each task."""
        episode = self.episode
        if episode is None or episode.state != SimEpisode.RUNNING:
            return
        if self._film is None and episode.task not in self._filmed:
            self._filmed.add(episode.task)
            self._film = Film(self._films / f"{episode.task}-{episode.seed}.mp4", FILM_HZ)
        if self._film is not None:
            self._film.add(image, episode.instruction)

    def on_episode(self, episode: SimEpisode) -> None:
        before, self.episode = self.episode, episode
        self.unseen += max(0, episode.finished_so_far - self._finished - (episode.state != SimEpisode.RUNNING))
        self._finished = episode.finished_so_far
        if before is not None and (before.episode, before.state) == (episode.episode, episode.state):
            return
        if episode.state == SimEpisode.RUNNING:
            if before is not None and (before.episode, before.state) == (episode.episode, SimEpisode.ABORTED):
                self._filmed.discard(self.episodes.pop().task)  # it restarts, and counts once
            self._actions.clear()
            self._tally, self._dropped_before = DecodeTally(), self._dropped
            return
        self._end_film()
        normalise = self._statistics.normalise
        began_s = _stamp_s(episode) - episode.time_s
        latency_s = [thinking_s(action) for action in self._actions]
        acted_s = [_stamp_s(action) - began_s + late_s for action, late_s in zip(self._actions, latency_s, strict=True)]
        self.episodes.append(
            EpisodeResult(
                task=episode.task,
                seed=episode.seed,
                instruction=episode.instruction,
                succeeded=episode.state == SimEpisode.SUCCEEDED,
                steps=len(self._actions) if self._commanded else episode.actions,
                time_s=episode.time_s,
                latency_s=tuple(latency_s),
                acted_s=tuple(acted_s),
                picture_age_s=mean_picture_age_s(acted_s, latency_s, episode.time_s),
                roughness=roughness([normalise(np.array(first_values(action))) for action in self._actions]),
                acted_on=episode.acted_on or None,
                failure=episode.detail,
                drops=dict(self._dropped - self._dropped_before),
                decode=self._tally.as_json(),
            )
        )

    @property
    def action_rate_hz(self) -> float:
        """Rate of the recent actions, from the stamps of their images."""
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return 0.0
        return (len(self.recent) - 1) / (self.recent[-1][0] - self.recent[0][0])

    def finish(self, context: Mapping[str, Any]) -> SimulateSummary:
        """Writes summary.json and report.html; completes the `settings` of the context."""
        self._end_film()
        context = {
            **context,
            "settings": {"world": "table", "policy": str(self._policy), **context["settings"]},
            "latency": "Time from the image's arrival at the policy to the action's publication",
            **head(),
        }
        summary = summarise_episodes(self.episodes, context=context)
        with self._directory.reporting_errors():
            self._directory.write_json(SUMMARY_FILE, summary.as_json())
            write_simulate_report(self._out / REPORT_FILE, summary, sorted(self._films.glob("*.mp4")))
        return summary

    def _end_film(self) -> None:
        if self._film is not None:
            self._film.close()
            self._film = None


_REFUSED = {"guard: gate": "refused_", "driver: motion": "refused: "}  # status name -> prefix of its counts' keys
_PASSING, _STOPPED = "passing", "stopped: "
_PRESSED = f"{_STOPPED}stop: "
# The driver's kinds of refused actions; the guard's are described in Cause.
_DRIVER_WORDS = {
    RefusalReason.NOT_FINITE.value: "an action contained NaN or infinity",
    RefusalReason.WRONG_SHAPE.value: "an action's number of values did not match its convention",
    RefusalReason.WRONG_SPACE.value: "an action named joints where the driver follows tool poses, or the other way",
    RefusalReason.TOO_OLD.value: "an action's image was too old: the policy or the machine is slow",
    RefusalReason.FROM_THE_FUTURE.value: "an action's image was stamped ahead of the clock",
    RefusalReason.NOT_NEWER.value: "an action was not newer than the last one",
    RefusalReason.NO_POSE.value: "the tool's pose at the stamp of an action's image is unknown",
    RefusalReason.TOO_LARGE.value: "an action exceeded the largest allowed step",
    RefusalReason.BLOCKED.value: "no path to an action's goal stays in the workspace",
    "bad_state": "the measured pose or joints could not be used",
    "not_following": "an action arrived while the driver held still, e.g. while the guard blocked motion",
    "unreadable": "an action has a convention that the driver does not support",
    "unreachable": "the joints cannot follow an action's motion",
}


@dataclass
class Motion:
    """The last diagnostics of driver and guard, and what they refused."""

    guard: str = ""  # passing, holding or stopped, and why; empty: nothing received yet
    driver: str = ""  # likewise
    refused: dict[str, dict[str, int]] = field(default_factory=dict)  # node -> count per kind
    in_motion: dict[str, Counter[str]] = field(default_factory=dict)  # part of `refused` after motion began in a task
    begun: bool = False  # True if the guard passed motion since the switch was pressed
    _begun_before: dict[str, bool] = field(default_factory=dict)  # `begun` at each node's last diagnostics

    @property
    def latched(self) -> bool:
        """True if the guard stopped by itself and stays stopped until it is cleared."""
        return self.guard.startswith(_STOPPED) and not self.guard.startswith(_PRESSED)

    @property
    def stopped_by(self) -> str:
        """The reason for the guard's stop in words; empty if it is not stopped."""
        return self.guard.removeprefix(_STOPPED) if self.guard.startswith(_STOPPED) else ""

    def hear(self, status: DiagnosticStatus, *, held: bool, count: bool) -> None:
        """Takes a status of any node and ignores those of other nodes; `held`: the dead-man's switch is held.

        `count`: count refusals; set it to False once the robot has ended, when everything is refused.
        """
        if status.name not in _REFUSED:
            return
        who, prefix = status.name.partition(":")[0], _REFUSED[status.name]
        setattr(self, who, status.message)
        self.begun = held and (self.begun or (who == "guard" and self.guard.startswith(_PASSING)))
        if count:
            counted = [(each.key, int(each.value)) for each in status.values if each.key.startswith(prefix)]
            counts = {key.removeprefix(prefix): times for key, times in counted if times}
            if self._begun_before.get(who):
                new = Counter(counts) - Counter(self.refused.get(who, {}))
                self.in_motion[who] = self.in_motion.get(who, Counter()) + new
            self.refused[who] = counts
        self._begun_before[who] = self.begun

    def sentences(self) -> Iterator[str]:
        """Refusals while the arm was allowed to move, then those while it waited, one per line."""
        moving: dict[str, Mapping[str, int]] = {who: self.in_motion.get(who, {}) for who in self.refused}
        waiting = {who: Counter(counts) - Counter(moving[who]) for who, counts in self.refused.items()}
        for when, refused in (("during the tasks", moving), ("between tasks (motion disabled)", waiting)):
            for who, counts in refused.items():
                yield f"{when} the {who} rejected{':' if counts else ' nothing'}"
                yield from (f"  {_times(kind, times)}: {in_words(who, kind)}" for kind, times in counts.items())


def in_words(who: str, kind: str) -> str:
    """Describes a kind of refusal."""
    if who == "driver":
        return _DRIVER_WORDS.get(kind, "see the driver's log")
    return Cause(kind).words.format(**vars(GuardSettings()))


def _times(kind: str, times: int) -> str:
    return f"{kind.replace('_', ' ')} {'once' if times == 1 else f'{times} times'}"
