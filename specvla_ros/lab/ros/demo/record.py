# SPDX-License-Identifier: Apache-2.0
"""The demo's record: episodes, latencies and films. Needs no ROS beyond the messages it is handed."""

import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.lab.evaluation.rerun_recording import RECORDING_FILE
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, SUMMARY_FILE, RunDirectory, head
from specvla_ros.lab.evaluation.simulate_summary import Film, SimulateSummary, summarise_episodes, write_simulate_report
from specvla_ros.lab.simulation.rollout import EpisodeResult
from specvla_ros.models.codecs.statistics import select_statistics
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.msg import DecodeStats, Reasoning, SimEpisode, VlaAction

_RECENT = 20  # actions whose latency and rate are shown
FILM_HZ = 20.0


def thinking_s(action: VlaAction) -> float:
    """Seconds from the image's arrival at the policy to the action's publication.

    Not `latency_s`: simulated time has the step of /clock, which is longer than that.
    """
    return float(action.wait_s + action.vision_s + action.prefill_s + action.decode_s + action.publish_s)


def first_values(action: VlaAction) -> list[float]:
    """The first action's values, where the answer holds several."""
    return list(action.values[: len(action.names)])


class DemoRecord:
    """Collects the topics' messages, for films and a report in `out`; those of an earlier demo are replaced.

    Args:
        policy: checkpoint directory, for its action statistics.
        commanded: whether the robot takes motion commands, and not the policy's actions.
    """

    def __init__(self, out: Path, policy: Path, commanded: bool) -> None:
        self._directory = RunDirectory(out, "demo")
        self._directory.begin()
        self._out, self._films = self._directory.path, self._directory.path / "films"
        shutil.rmtree(self._films, ignore_errors=True)
        (self._out / RECORDING_FILE).unlink(missing_ok=True)
        self._policy, self._commanded = policy, commanded
        self._statistics = select_statistics(read_config(policy).norm_stats, "")
        self._films.mkdir(parents=True, exist_ok=True)
        self.episodes: list[EpisodeResult] = []
        self.episode: SimEpisode | None = None
        self.action: VlaAction | None = None
        self.stats: DecodeStats | None = None
        self.text = ""
        self.recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._actions: list[VlaAction] = []
        self._film: Film | None = None
        self._filmed: set[str] = set()

    def on_action(self, action: VlaAction) -> None:
        self.action = action
        self.recent.append((action.header.stamp.sec + action.header.stamp.nanosec * 1e-9, thinking_s(action)))
        self._actions.append(action)

    def on_stats(self, stats: DecodeStats) -> None:
        self.stats = stats

    def on_reasoning(self, reasoning: Reasoning) -> None:
        self.text = reasoning.text

    def on_image(self, image: np.ndarray) -> None:
        """Takes an image, RGB uint8: the first episode of each task is filmed."""
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
        if before is not None and (before.episode, before.state) == (episode.episode, episode.state):
            return
        if episode.state == SimEpisode.RUNNING:
            self._actions.clear()
            return
        self._end_film()
        self.episodes.append(
            EpisodeResult(
                task=episode.task,
                seed=episode.seed,
                instruction=episode.instruction,
                succeeded=episode.state == SimEpisode.SUCCEEDED,
                steps=len(self._actions) if self._commanded else episode.actions,
                time_s=episode.time_s,
                latency_s=tuple(thinking_s(action) for action in self._actions),
                roughness=self._roughness(),
                acted_on=episode.acted_on or None,
                failure=episode.detail,
            )
        )

    @property
    def action_rate_hz(self) -> float:
        """Of the recent actions, by the stamps of their images."""
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return 0.0
        return (len(self.recent) - 1) / (self.recent[-1][0] - self.recent[0][0])

    def finish(self, context: Mapping[str, Any]) -> SimulateSummary:
        """Writes summary.json and report.html; the `settings` of the context are completed here."""
        self._end_film()
        context = {
            **context,
            "settings": {"world": "table", "policy": str(self._policy), **context["settings"]},
            "latency": "from the image's arrival at the policy to the action's publication",
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

    def _roughness(self) -> float:
        if len(self._actions) < 2:
            return 0.0
        normalised = np.array([self._statistics.normalise(np.array(first_values(action))) for action in self._actions])
        return float(np.abs(np.diff(normalised[:, :-1], axis=0)).mean())
