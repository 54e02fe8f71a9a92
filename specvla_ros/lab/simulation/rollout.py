# SPDX-License-Identifier: Apache-2.0
"""Episodes of a policy on a simulated robot, in lockstep or in real time with decoding latency."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specvla_ros.engine.outcome import Action, DropReason, Outcome
from specvla_ros.engine.pace import mean_age
from specvla_ros.engine.thread import Decoded
from specvla_ros.errors import UserError
from specvla_ros.lab.planning.stage_times import StageTimes
from specvla_ros.lab.simulation.robot import SimulatedRobot
from specvla_ros.lab.simulation.world import SimulationDiverged
from specvla_ros.lab.tally import DecodeTally
from specvla_ros.models.observation import Observation

if TYPE_CHECKING:  # torch, which the simulated robot and the demo do not need
    from specvla_ros.engine.batch import TickWork
    from specvla_ros.engine.engine import Engine
    from specvla_ros.lab.jobs.hosted_engine import HostedEngine
    from specvla_ros.models.target import PolicyFacts

_START_NS = 1_000_000_000  # a stamp of 0 means unset
_FAULT_LIMIT = 10  # consecutive observations without an action after which the policy counts as dead

TickTime = Callable[["TickWork", float], float]  # (a tick's work, measured seconds) -> seconds that count


def tick_time(stages: StageTimes | None = None) -> TickTime:
    """Returns a function for a tick's duration: an emulated device's, or without one the measured duration."""
    if stages is None:
        return lambda _, measured_s: measured_s
    return lambda work, _: stages.tick_s(work)


class Clock(str, Enum):
    """Passage of world time while the policy decodes."""

    LOCKSTEP = "lockstep"  # the world stands still
    REALTIME = "realtime"  # the world keeps moving


@dataclass(frozen=True)
class EpisodeResult:
    """The outcome of an episode."""

    task: str
    seed: int  # of the start state
    instruction: str  # given to the policy
    succeeded: bool  # the task was done in time
    steps: int  # actions that the robot took
    time_s: float  # world time to success, or to the end
    # Per action: world time from its image until it was taken (realtime), or decoding time (lockstep). One that starts
    # with actions of the answer before (decode.commit) is taken when these have passed.
    latency_s: tuple[float, ...] = ()
    acted_s: tuple[float, ...] = ()  # world time at which each action was taken; empty in lockstep
    # Realtime only: age of the image that the robot acts on, averaged over world time after the first action. It
    # combines latency and period: until its next action, the robot acts on the image of the last one.
    picture_age_s: float | None = None
    drops: dict[str, int] = field(default_factory=dict)  # observations without an action, by reason
    # Mean absolute change between successive actions, in normalised units per dimension, without the gripper.
    roughness: float = 0.0
    acted_on: str | None = None  # the cube that was moved most; None if none was, or the world has no cubes
    failure: str = ""  # why the episode ended early; empty if it did not
    # Decoding statistics of its actions, from `DecodeTally.as_json`.
    decode: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Episode:
    """The state of an episode."""

    instruction: str
    max_steps: int  # control steps after which the episode fails
    passed: int = 0  # control steps of the world
    pictured: int = -1  # control step of the newest image given to the engine
    thought_s: float = 0.0  # realtime: world time at which the engine finishes its current tick
    succeeded: bool = False
    begun_ns: int = 0  # realtime: stamp of the answer whose first action was taken while the rest was decoded
    actions: list[Action] = field(default_factory=list)  # actions that the robot took
    latency_s: list[float] = field(default_factory=list)  # latency of each action
    acted_s: list[float] = field(default_factory=list)  # realtime: world time at which each action was taken
    drops: Counter[str] = field(default_factory=Counter)  # observations without an action, by reason
    silent: int = 0  # observations without an action since the last action
    tally: DecodeTally = field(default_factory=DecodeTally)

    @property
    def over(self) -> bool:
        return self.succeeded or self.passed >= self.max_steps or self.silent >= _FAULT_LIMIT

    def drop(self, reason: DropReason) -> None:
        self.drops[reason.value] += 1
        self.silent += 1

    def act(self, action: Action, latency_s: float) -> None:
        self.silent = 0
        self.actions.append(action)
        self.latency_s.append(latency_s)


class Rollout:
    """Runs episodes with one engine on one robot, both used by this thread only.

    A shared engine's ticks also serve other robots, so it only supports the lockstep clock. Raises UserError if a
    shared engine is used in real time, or if the policy needs inputs that the robot does not have.

    Args:
        on_step: called after each `control_dt` of the world, to record a video.
        on_look: called with each observation given to the engine.
        on_act: called with each action that the robot takes.
        time_limit: multiple of the task's time after which an episode fails.
        chunks: in real time, the robot follows all actions of an answer; it takes them all at once, [n, dims].
    """

    def __init__(
        self,
        engine: "Engine | HostedEngine",
        robot: SimulatedRobot,
        clock: Clock,
        tick_time: TickTime,
        on_step: Callable[[], None] = lambda: None,
        on_look: Callable[[Observation], None] = lambda _: None,
        on_act: Callable[[Action], None] = lambda _: None,
        time_limit: float = 1.0,
        *,
        chunks: bool = False,
    ) -> None:
        from specvla_ros.lab.jobs.hosted_engine import HostedEngine

        check_senses(engine.target, robot)
        self._engine = engine
        self._robot = robot
        self._step: Callable[[_Episode], None]
        if clock is Clock.LOCKSTEP:
            decode = engine.decode if isinstance(engine, HostedEngine) else partial(self._decode, engine)
            self._step = partial(self._lockstep, decode)
        elif isinstance(engine, HostedEngine):
            raise UserError("--per-engine needs --clock lockstep: in real time each robot needs its own engine")
        else:
            self._step = partial(self._realtime, engine)
            engine.tick_time, engine.takes_partial = tick_time, True
            engine.measure_ticks()
        self._tick_time = tick_time
        self._on_step = on_step
        self._on_look = on_look
        self._on_act = on_act
        self._time_limit = time_limit
        self._chunks = chunks
        self._per_action = round(robot.action_dt / robot.control_dt)

    def run(self, task: str, seed: int, instruction: str = "") -> EpisodeResult:
        """Runs one episode; `instruction` replaces the task's own.

        Raises UserError if the task or the seed is unknown, or if the policy does not support the instruction.
        """
        self._robot.reset(task, seed)
        self._engine.reset()
        max_steps = round(self._time_limit * self._robot.max_steps * self._per_action)
        episode = _Episode(instruction or self._robot.instruction, max_steps)
        self._engine.check_instruction(episode.instruction)
        failure = ""
        try:
            while not episode.over:
                self._step(episode)
            if episode.silent >= _FAULT_LIMIT:
                failure = f"no action for {_FAULT_LIMIT} images in a row: {dict(episode.drops)}"
        except SimulationDiverged as error:
            failure = str(error)
        time_s, codec = episode.passed * self._robot.control_dt, self._engine.target.codec
        return EpisodeResult(
            task=task,
            seed=seed,
            instruction=episode.instruction,
            succeeded=episode.succeeded,
            steps=len(episode.actions),
            time_s=time_s,
            latency_s=tuple(episode.latency_s),
            acted_s=tuple(episode.acted_s),
            picture_age_s=mean_picture_age_s(episode.acted_s, episode.latency_s, time_s),
            drops=dict(episode.drops),
            roughness=roughness([codec.normalise(action.actions)[0] for action in episode.actions]),
            acted_on=self._robot.acted_on(),
            failure=failure,
            decode=episode.tally.as_json(),
        )

    def _lockstep(self, decode: Callable[[Observation], Decoded], episode: _Episode) -> None:
        """Decodes while the world waits, then advances the world by the action's duration."""
        decoded = decode(self._observe(episode))
        self._take(episode, [decoded.outcome], decoded.seconds)
        self._advance(episode, episode.passed + self._per_action)

    def _decode(self, engine: "Engine", observation: Observation) -> Decoded:
        outcomes: list[Outcome] = [*engine.submit(observation)]
        seconds = 0.0
        while engine.busy:
            seconds += self._tick(engine, outcomes)
        return Decoded(next(each for each in outcomes if each.observation is observation), seconds)

    def _realtime(self, engine: "Engine", episode: _Episode) -> None:
        """Runs one tick while the world keeps moving."""
        control_dt = self._robot.control_dt
        if not engine.busy:
            # The newest image that was not yet decoded; one is taken in each control step.
            stamped = max(int(episode.thought_s / control_dt + 1e-9), episode.pictured + 1)
            self._advance(episode, stamped)
            episode.thought_s = max(episode.thought_s, stamped * control_dt)
            if episode.over:
                return
        # A camera would send every image, and the engine would take the newest. The others need not be rendered.
        if engine.has_room and episode.passed > episode.pictured:
            engine.submit(self._observe(episode))
        outcomes: list[Outcome] = []
        episode.thought_s += self._tick(engine, outcomes)
        self._advance(episode, int(episode.thought_s / control_dt + 1e-9))
        self._take(episode, outcomes, None)

    def _observe(self, episode: _Episode) -> Observation:
        episode.pictured = episode.passed
        stamp_ns = _START_NS + round(episode.passed * self._robot.control_dt * 1e9)
        observation = observe(self._robot, self._engine.target, episode.instruction, stamp_ns)
        self._on_look(observation)
        return observation

    def _tick(self, engine: "Engine", outcomes: list[Outcome]) -> float:
        started = time.perf_counter()
        outcomes += engine.tick()
        return self._tick_time(engine.last_work, time.perf_counter() - started)

    def _take(self, episode: _Episode, outcomes: list[Outcome], seconds: float | None) -> None:
        for outcome in outcomes:
            if not isinstance(outcome, Action):
                episode.drop(outcome.reason)
                continue
            if not outcome.partial:
                episode.tally.add(outcome.record)
            stamp_ns, begun_ns = outcome.observation.stamp_ns, episode.begun_ns
            episode.begun_ns = stamp_ns if outcome.partial else 0
            looked_s = (outcome.observation.stamp_ns - _START_NS) * 1e-9
            age_s = episode.passed * self._robot.control_dt - looked_s
            if self._chunks:
                self._robot.take(outcome.actions, age_s)
            if stamp_ns == begun_ns:  # the first action of an answer is already followed
                continue
            acted_s = max(episode.thought_s, looked_s + outcome.given * self._robot.action_dt, *episode.acted_s[-1:])
            if seconds is None:
                episode.acted_s.append(acted_s)
            episode.act(outcome, acted_s - looked_s if seconds is None else seconds)
            self._on_act(outcome)
            if not self._chunks:
                self._robot.take(outcome.values, age_s)

    def _advance(self, episode: _Episode, until: int) -> None:
        # The time limit may pass within a tick: what is done after it does not count.
        while episode.passed < min(until, episode.max_steps) and not episode.succeeded:
            self._robot.advance()
            episode.passed += 1
            episode.succeeded = self._robot.succeeded()
            self._on_step()


def observe(robot: SimulatedRobot, policy: "PolicyFacts", instruction: str, stamp_ns: int) -> Observation:
    """Builds the policy's input: one image per camera of the policy, in the robot's order, and the state."""
    state = robot.feel() if policy.state_dims else None
    if state is not None and policy.state_names:
        state = state[[robot.state_names.index(name) for name in policy.state_names]]
    return Observation(
        images={name: robot.look(camera) for name, camera in zip(policy.cameras, robot.cameras, strict=False)},
        instruction=instruction,
        stamp_ns=stamp_ns,
        state=state,
    )


def check_senses(policy: "PolicyFacts", robot: SimulatedRobot) -> None:
    """Raises UserError if the robot has fewer cameras than the policy, or a different state."""
    if not policy.cameras or len(policy.cameras) > len(robot.cameras):
        raise UserError(
            f"{policy.directory} needs images of {len(policy.cameras)} cameras ({', '.join(policy.cameras)}), "
            f"but this robot has {len(robot.cameras)}: {', '.join(robot.cameras)}"
        )
    felt = len(robot.state_names)
    known = {*policy.state_names} <= {*robot.state_names} if policy.state_names else policy.state_dims in (0, felt)
    if not known:
        wanted = ", ".join(policy.state_names) or f"{policy.state_dims} numbers"
        raise UserError(
            f"{policy.directory} needs a state of {wanted}, but this robot's state has {felt}"
            + (f": {', '.join(robot.state_names)}" if felt else "")
        )


def mean_picture_age_s(acted_s: Sequence[float], latency_s: Sequence[float], end_s: float) -> float | None:
    """Computes `EpisodeResult.picture_age_s` up to world time `end_s`; None without an earlier action."""
    if not acted_s or end_s <= acted_s[0]:
        return None
    return mean_age([*zip(acted_s, latency_s, strict=True), (max(end_s, acted_s[-1]), 0.0)])


def roughness(normalised: list[np.ndarray]) -> float:
    """Computes `EpisodeResult.roughness` of normalised actions, float64 [action_dim] each, gripper last."""
    return float(np.abs(np.diff(normalised, axis=0)[:, :-1]).mean()) if len(normalised) > 1 else 0.0
