"""One episode: the engine looks, decides, and a simulated robot moves, with time as it would pass."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.tally import DecodeTally
from specvla_ros.simulation.device_pace import TickTime
from specvla_ros.simulation.robot import SimulatedRobot
from specvla_ros.simulation.world import SimulationDiverged

_START_NS = 1_000_000_000  # a stamp of 0 is no stamp
_FAULT_LIMIT = 10  # observations in a row without an action: the policy is dead, not hesitating


class Clock(str, Enum):
    """How the world's time passes while the policy thinks."""

    LOCKSTEP = "lockstep"  # not at all
    REALTIME = "realtime"  # as it does


@dataclass(frozen=True)
class EpisodeResult:
    """How an episode went.

    Args:
        task: what was judged.
        seed: of the start.
        instruction: what the policy was told.
        succeeded: the task was done in time.
        steps: actions that the robot took.
        time_s: world time to the success, or to the end.
        latency_s: per action, world time from its image to the moment it was taken (realtime), or the time that the
            policy needed (lockstep).
        drops: observations without an action, by reason.
        roughness: mean size of the change from action to action, normalised units per dimension but the gripper.
        acted_on: the cube that was moved most; None: none, or a world without cubes.
        failure: why the episode ended early; empty: it did not.
        decode: how its actions were decoded, as `DecodeTally.as_json` gives it.
    """

    task: str
    seed: int
    instruction: str
    succeeded: bool
    steps: int
    time_s: float
    latency_s: tuple[float, ...] = ()
    drops: dict[str, int] = field(default_factory=dict)
    roughness: float = 0.0
    acted_on: str | None = None
    failure: str = ""
    decode: dict[str, Any] = field(default_factory=dict)


OnStep = Callable[[], None]


class Rollout:
    """Runs episodes with one engine on one robot; both belong to this thread.

    Args:
        engine: warm.
        robot: in its world.
        clock: how time passes.
        tick_time: seconds of a tick; see device_pace.
        on_step: called after each `control_dt` of the world, for a film.
        on_look: called with each observation that the engine is given.
        time_limit: an episode has failed after so many times the time that its task allows.
    """

    def __init__(
        self,
        engine: Engine,
        robot: SimulatedRobot,
        clock: Clock,
        tick_time: TickTime,
        on_step: OnStep | None = None,
        on_look: Callable[[Observation], None] | None = None,
        time_limit: float = 1.0,
    ) -> None:
        self._engine = engine
        self._robot = robot
        self._clock = clock
        self._tick_time = tick_time
        self._on_step = on_step
        self._on_look = on_look
        self._time_limit = time_limit
        self._per_action = round(robot.action_dt / robot.control_dt)

    def run(self, task: str, seed: int, instruction: str = "") -> EpisodeResult:
        """One episode.

        Args:
            task: that is judged.
            seed: of the start.
            instruction: in place of the task's own.

        Raises:
            UserError: an unknown task or seed, or an instruction that the policy cannot be asked.
        """
        self._robot.reset(task, seed)
        self._engine.reset()
        self._instruction = instruction or self._robot.instruction
        self._engine.check_instruction(self._instruction)
        self._passed = 0  # control steps
        self._pictured = -1  # control step of the newest picture that the engine was given
        self._thought_s = 0.0  # realtime: when the engine is through with what it has begun
        self._succeeded = False
        self._actions: list[Action] = []
        self._latency_s: list[float] = []
        self._drops: dict[str, int] = {}
        self._tally = DecodeTally()
        self._silent = 0
        failure = ""
        most = round(self._time_limit * self._robot.max_steps * self._per_action)
        try:
            step = self._lockstep if self._clock is Clock.LOCKSTEP else self._realtime
            while not self._succeeded and self._passed < most:
                step()
                if self._silent >= _FAULT_LIMIT:
                    failure = f"no action for {_FAULT_LIMIT} images in a row: {self._drops}"
                    break
        except SimulationDiverged as error:
            failure = str(error)
        return EpisodeResult(
            task=task,
            seed=seed,
            instruction=self._instruction,
            succeeded=self._succeeded,
            steps=len(self._actions),
            time_s=self._passed * self._robot.control_dt,
            latency_s=tuple(self._latency_s),
            drops=dict(self._drops),
            roughness=_roughness(self._engine, self._actions),
            acted_on=self._robot.acted_on(),
            failure=failure,
            decode=self._tally.as_json(),
        )

    def _lockstep(self) -> None:
        """The world waits for the action, then moves for the time that it is meant for."""
        self._engine.submit(self._observe())
        seconds = 0.0
        outcomes: list[Outcome] = []
        while self._engine.busy:
            seconds += self._tick(outcomes)
        self._take(outcomes, seconds)
        self._advance(self._passed + self._per_action)

    def _realtime(self) -> None:
        """One tick, while the world goes on."""
        at = int(self._thought_s / self._robot.control_dt + 1e-9)
        if not self._engine.busy:
            # The newest picture that is not the one before; a picture is taken each control step.
            stamped = max(at, self._pictured + 1)
            self._advance(stamped)
            self._thought_s = max(self._thought_s, stamped * self._robot.control_dt)
            if self._succeeded:
                return
        # A camera would send every picture, and the engine would take the newest; the others need not be drawn.
        if self._engine.has_room and self._passed > self._pictured:
            self._engine.submit(self._observe())
        outcomes: list[Outcome] = []
        self._thought_s += self._tick(outcomes)
        self._advance(int(self._thought_s / self._robot.control_dt + 1e-9))
        self._take(outcomes, None)

    def _observe(self) -> Observation:
        self._pictured = self._passed
        observation = Observation(
            images=self._robot.look(),
            instruction=self._instruction,
            stamp_ns=_START_NS + round(self._passed * self._robot.control_dt * 1e9),
        )
        if self._on_look is not None:
            self._on_look(observation)
        return observation

    def _tick(self, outcomes: list[Outcome]) -> float:
        started = time.perf_counter()
        outcomes += self._engine.tick()
        return self._tick_time(self._engine.last_work, time.perf_counter() - started)

    def _take(self, outcomes: list[Outcome], seconds: float | None) -> None:
        for outcome in outcomes:
            if not isinstance(outcome, Action):
                self._drops[outcome.reason.value] = self._drops.get(outcome.reason.value, 0) + 1
                self._silent += 1
                continue
            self._silent = 0
            self._actions.append(outcome)
            self._tally.add(outcome.record)
            looked_s = (outcome.observation.stamp_ns - _START_NS) * 1e-9
            self._latency_s.append(self._thought_s - looked_s if seconds is None else seconds)
            self._robot.take(outcome.values, self._passed * self._robot.control_dt - looked_s)

    def _advance(self, until: int) -> None:
        while self._passed < until and not self._succeeded:
            self._robot.advance()
            self._passed += 1
            self._succeeded = self._robot.succeeded()
            if self._on_step is not None:
                self._on_step()


def _roughness(engine: Engine, actions: list[Action]) -> float:
    if len(actions) < 2:
        return 0.0
    normalised = np.array([engine.target.codec.normalise(action.actions)[0] for action in actions])
    return float(np.abs(np.diff(normalised[:, :-1], axis=0)).mean())
