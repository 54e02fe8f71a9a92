# SPDX-License-Identifier: Apache-2.0
"""Frames as one setting or several answer them: the same frames in the same order, the settings taking turns."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.tally import DecodeTally
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.frame_sources import lossless
from specvla_ros.lab.simulation.rollout import TickTime, tick_time
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target


@dataclass(frozen=True)
class Answer:
    """How a setting answered a frame."""

    outcome: Outcome
    seconds: float  # of the ticks since the answer before; of one frame in flight its decoding time


class _Side:
    """One setting's engine and the answers that it has not handed out yet, by their frames' stamps."""

    def __init__(self, engine: Engine, pace: TickTime) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}
        self._pace = pace
        self._seconds = 0.0

    def ask(self, frame: Observation) -> None:
        while not self.engine.has_room:
            self._tick()
        self._keep(self.engine.submit(frame))
        self._tick()

    def finish(self) -> None:
        while self.engine.busy:
            self._tick()

    def _tick(self) -> None:
        started = time.perf_counter()
        outcomes = self.engine.tick()
        self._seconds += self._pace(self.engine.last_work, time.perf_counter() - started)
        self._keep(outcomes)

    def _keep(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.answers[outcome.observation.stamp_ns] = Answer(outcome, self._seconds)
            self._seconds = 0.0


def compare(
    engines: Mapping[str, Engine],
    frames: Iterable[Observation],
    *,
    first_epoch: int = 1,
    in_flight: bool = False,
    pace: TickTime | None = None,
) -> Iterator[tuple[Observation, dict[str, Answer]]]:
    """Each frame with the answers of all settings.

    The settings take turns, frame after frame, so that whatever else the machine does falls on all of them alike.
    Frames are decoded in order, so that a drafter that looks back sees what it would on the robot.

    Args:
        engines: by the names of their settings; nothing is in flight.
        frames: images with instructions, of one episode after the other.
        first_epoch: of the first frame; each other instruction begins another.
        in_flight: a frame is begun as soon as there is room for it; otherwise when the one before is answered.
        pace: from a tick's work and its measured seconds to the seconds that count; by default those measured.
    """
    sides = {name: _Side(engine, pace or tick_time(None)) for name, engine in engines.items()}
    asked: dict[int, Observation] = {}

    def answered() -> Iterator[tuple[Observation, dict[str, Answer]]]:
        for stamp in [each for each in asked if all(each in side.answers for side in sides.values())]:
            yield asked.pop(stamp), {name: side.answers.pop(stamp) for name, side in sides.items()}

    epoch, instruction = first_epoch - 1, None
    for number, frame in enumerate(frames, start=1):
        epoch += frame.instruction != instruction
        instruction = frame.instruction
        asked[number] = replace(frame, stamp_ns=number, epoch=epoch)
        for side in sides.values():
            side.ask(asked[number])
            if not in_flight:
                side.finish()
        yield from answered()
    for side in sides.values():
        side.finish()
    yield from answered()


@dataclass
class FrameRun:
    """The frames as one setting decoded them."""

    seconds: list[float] = field(default_factory=list)  # decoding time per frame and round
    # actions of the first round, float64 [frames, action_dim]; NaN where there was none
    values: list[np.ndarray] = field(default_factory=list)
    tally: DecodeTally = field(default_factory=DecodeTally)  # of the first round's decoding

    def keep(self, outcome: Outcome, action_dim: int) -> None:
        if isinstance(outcome, Action):
            self.values.append(outcome.values)
            self.tally.add(outcome.record)
        else:
            self.values.append(np.full(action_dim, np.nan))

    @property
    def action_s(self) -> float:
        """Mean seconds per action, without the slowest twentieth: those waited for something else on the machine."""
        return float(np.mean(np.sort(self.seconds)[: max(1, len(self.seconds) * 19 // 20)]))


def time_settings(
    policy: Target,
    settings: Mapping[str, EngineSettings],
    frames: Sequence[Observation],
    *,
    rounds: int = 3,
    pace: TickTime | None = None,
    on_frame: Callable[[], None] = lambda: None,
) -> dict[str, FrameRun]:
    """Decodes the frames with each setting, as of `compare`.

    Args:
        frames: images with instructions, of one episode after the other.
        rounds: timed passes over the frames, after a warm-up.
        on_frame: called when all settings have answered one more frame.
    """
    if not frames:
        raise UserError("there are no frames to try the settings on")
    engines = {name: Engine(policy, each) for name, each in settings.items()}
    runs = {name: FrameRun() for name in settings}
    for engine in engines.values():
        engine.warm_up()
    for again in range(rounds):
        for engine in engines.values():
            engine.reset()
        for _, answers in compare(engines, frames, first_epoch=1 + again * len(frames), pace=pace):
            for name, answer in answers.items():
                runs[name].seconds.append(answer.seconds)
                if not again:
                    runs[name].keep(answer.outcome, policy.codec.max_tokens)
            on_frame()
    return runs


@dataclass
class CollectedAnswers:
    """A policy's own answers, in which later ones are looked up."""

    answers: dict[tuple[int, ...], None] = field(default_factory=dict)  # each different one once, in their order
    frames: int = 0  # that were asked about
    dropped: Counter[str] = field(default_factory=Counter)  # frames without an action, by reason


def collect_answers(
    policy: Target, frames: Iterable[Observation], on_frame: Callable[[int], None] | None = None
) -> CollectedAnswers:
    """Has a policy answer frames one after the other; its drafts change nothing.

    Raises:
        UserError: it answers with single actions, or not one frame with actions.
    """
    if policy.codec.horizon < 2:
        raise UserError(
            "earlier answers are looked up for policies that answer with several actions; this one gives a single one: "
            "set draft.temporal in their place"
        )
    engine = Engine(policy, lossless(policy, EngineSettings()))
    found = CollectedAnswers()
    for frame in frames:
        if frame.stamp_ns <= engine.mailbox.last_stamp_ns:  # another bag or episode
            engine.reset()
        outcome = engine.act(frame)
        found.frames += 1
        if isinstance(outcome, Drop):
            found.dropped[outcome.reason.value] += 1
        else:
            found.answers[outcome.tokens] = None
        if on_frame is not None:
            on_frame(found.frames)
    if not found.answers:
        raise UserError(f"the policy answered none of {found.frames} images with actions: {dict(found.dropped)}")
    return found
