# SPDX-License-Identifier: Apache-2.0
"""Episodes of a policy on a simulated robot, in lockstep or with the time that decoding takes."""

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
from specvla_ros.lab.planning.cost import StageTimes, stage_times
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.simulation.robot import SimulatedRobot
from specvla_ros.lab.simulation.world import SimulationDiverged
from specvla_ros.lab.tally import DecodeTally
from specvla_ros.models.observation import Observation

if TYPE_CHECKING:  # torch, which the simulated robot and the demo do not need
    from specvla_ros.engine.batch import TickWork
    from specvla_ros.engine.engine import Engine
    from specvla_ros.lab.jobs.hosted_engine import HostedEngine
    from specvla_ros.models.target import PolicyFacts

_START_NS = 1_000_000_000  # a stamp of 0 is no stamp
_FAULT_LIMIT = 10  # observations in a row without an action: the policy is dead, not hesitating

TickTime = Callable[["TickWork", float], float]  # from a tick's work and its seconds here to the seconds it counts for


def read_stage_times(device: str) -> StageTimes:
    """Stage times of one of the package's devices, or of a device's JSON file."""
    return stage_times(read_device(device, "--emulate"))


def tick_time(device: str = "") -> TickTime:
    """The seconds measured here, or those that another device would need; see `read_stage_times`."""
    if not device:
        return lambda _, measured_s: measured_s
    stages = read_stage_times(device)
    return lambda work, _: stages.tick_s(work)


class Clock(str, Enum):
    """How the world's time passes while the policy thinks."""

    LOCKSTEP = "lockstep"  # not at all
    REALTIME = "realtime"  # as it does


@dataclass(frozen=True)
class EpisodeResult:
    """The outcome of an episode."""

    task: str
    seed: int  # of the start
    instruction: str  # what was asked of the policy
    succeeded: bool  # the task was done in time
    steps: int  # actions that the robot took
    time_s: float  # world time to the success, or to the end
    # Per action, world time from its image to the moment it was taken (realtime), or the time that the policy needed
    # (lockstep).
    latency_s: tuple[float, ...] = ()
    acted_s: tuple[float, ...] = ()  # world time at which each action was taken; empty: lockstep
    # Not in lockstep: age of the image that the robot acts on, mean over world time from the first action on. Latency
    # and period together: until its next action it acts on the last one's image.
    picture_age_s: float | None = None
    drops: dict[str, int] = field(default_factory=dict)  # observations without an action, by reason
    # Mean size of the change from action to action, normalised units per dimension but the gripper.
    roughness: float = 0.0
    acted_on: str | None = None  # the cube that was moved most; None: none, or a world without cubes
    failure: str = ""  # why the episode ended early; empty: it did not
    # How its actions were decoded, as `DecodeTally.as_json` gives it.
    decode: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Episode:
    """The state of an episode."""

    instruction: str
    max_steps: int  # control steps after which it has failed
    passed: int = 0  # control steps of the world
    pictured: int = -1  # control step of the newest image that the engine was given
    thought_s: float = 0.0  # realtime: world time at which the engine is through with what it has begun
    succeeded: bool = False
    begun_ns: int = 0  # realtime: stamp of the answer whose first action was taken while the rest was decoded
    actions: list[Action] = field(default_factory=list)  # that the robot took
    latency_s: list[float] = field(default_factory=list)  # of each of them
    acted_s: list[float] = field(default_factory=list)  # realtime: world time at which each was taken
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
    """Runs episodes with one engine on one robot; both belong to this thread.

    A shared engine has ticks that belong to others too: only the lockstep clock goes by it. A UserError says that it is
    asked to in real time, or that the policy is asked with more than the robot has.

    Args:
        on_step: called after each `control_dt` of the world, for a film.
        on_look: called with each observation that the engine is given.
        time_limit: multiple of the task's time after which an episode has failed.
    """

    def __init__(
        self,
        engine: "Engine | HostedEngine",
        robot: SimulatedRobot,
        clock: Clock,
        tick_time: TickTime,
        on_step: Callable[[], None] = lambda: None,
        on_look: Callable[[Observation], None] = lambda _: None,
        time_limit: float = 1.0,
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
            raise UserError("an engine that is shared decides in lockstep only: in real time each robot has its own")
        else:
            self._step = partial(self._realtime, engine)
            engine.tick_time, engine.takes_partial = tick_time, True
            engine.measure_ticks()
        self._tick_time = tick_time
        self._on_step = on_step
        self._on_look = on_look
        self._time_limit = time_limit
        self._per_action = round(robot.action_dt / robot.control_dt)

    def run(self, task: str, seed: int, instruction: str = "") -> EpisodeResult:
        """One episode; `instruction`: in place of the task's own.

        A UserError says that task or seed is unknown, or that the policy cannot be given the instruction.
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
        """The world waits for the action, then moves for the time that it is meant for."""
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
        """One tick, while the world goes on."""
        control_dt = self._robot.control_dt
        if not engine.busy:
            # The newest image that is not the one before; an image is taken each control step.
            stamped = max(int(episode.thought_s / control_dt + 1e-9), episode.pictured + 1)
            self._advance(episode, stamped)
            episode.thought_s = max(episode.thought_s, stamped * control_dt)
            if episode.succeeded:
                return
        # A camera would send every image, and the engine would take the newest; the others need not be drawn.
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
            if stamp_ns == begun_ns:  # of an answer the first action is followed
                continue
            looked_s = (outcome.observation.stamp_ns - _START_NS) * 1e-9
            if seconds is None:
                episode.acted_s.append(episode.thought_s)
            episode.act(outcome, episode.thought_s - looked_s if seconds is None else seconds)
            self._robot.take(outcome.values, episode.passed * self._robot.control_dt - looked_s)

    def _advance(self, episode: _Episode, until: int) -> None:
        while episode.passed < until and not episode.succeeded:
            self._robot.advance()
            episode.passed += 1
            episode.succeeded = self._robot.succeeded()
            self._on_step()


def observe(robot: SimulatedRobot, policy: "PolicyFacts", instruction: str, stamp_ns: int) -> Observation:
    """The policy's input: an image of as many cameras as it has, in the robot's order, and the state."""
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
    """Raises UserError where the robot has fewer cameras than the policy, or a state of another length."""
    if not policy.cameras or len(policy.cameras) > len(robot.cameras):
        raise UserError(
            f"{policy.directory} is asked with images of {len(policy.cameras)} cameras ({', '.join(policy.cameras)}), "
            f"and this robot has {len(robot.cameras)}: {', '.join(robot.cameras)}"
        )
    felt = len(robot.state_names)
    if policy.state_dims not in (0, felt) or not {*policy.state_names} <= {*robot.state_names}:
        wanted = ", ".join(policy.state_names) or f"{policy.state_dims} numbers"
        raise UserError(
            f"{policy.directory} reads a state of {wanted}, and this robot's has {felt}"
            + (f": {', '.join(robot.state_names)}" if felt else "")
        )


def mean_picture_age_s(acted_s: Sequence[float], latency_s: Sequence[float], end_s: float) -> float | None:
    """See `EpisodeResult`; the episode has ended at this world time. None without an action before it."""
    if not acted_s or end_s <= acted_s[0]:
        return None
    return mean_age([*zip(acted_s, latency_s, strict=True), (max(end_s, acted_s[-1]), 0.0)])


def roughness(normalised: list[np.ndarray]) -> float:
    """See `EpisodeResult`; of the actions in normalised units, float64 [action_dim] each, the gripper last."""
    return float(np.abs(np.diff(normalised, axis=0)[:, :-1]).mean()) if len(normalised) > 1 else 0.0
