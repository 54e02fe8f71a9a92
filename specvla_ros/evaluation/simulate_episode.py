"""One simulated episode, as a worker process runs it."""

import json
import os
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.film import Film
from specvla_ros.models.action_statistics import ActionStatistics
from specvla_ros.models.policy import Policy, load_policy
from specvla_ros.simulation.device_pace import read_device, tick_time
from specvla_ros.simulation.robot import SimulatedRobot
from specvla_ros.simulation.rollout import Clock, EpisodeResult, Rollout

TABLE = "table"


@dataclass(frozen=True)
class SimulateSettings:
    """What a simulation is made with; two with the same settings give the same episodes.

    Args:
        policy: checkpoint directory.
        world: `table`, or a LIBERO suite.
        clock: how the world's time passes while the policy thinks.
        emulate: device whose stage times are taken in place of those measured; empty: none.
        engine: how to decode.
        time_limit: an episode has failed after so many times the time that its task allows.
        device, dtype, unnorm_key, center_crop, quantization: as for `load_policy`.
    """

    policy: Path
    world: str = TABLE
    clock: Clock = Clock.LOCKSTEP
    emulate: str = ""
    engine: EngineSettings = field(default_factory=EngineSettings)
    time_limit: float = 1.0
    device: str = "auto"
    dtype: str = "auto"
    unnorm_key: str = ""
    center_crop: bool = False
    quantization: str = "none"

    def as_json(self) -> dict[str, Any]:
        """For the results, and to tell whether earlier results are of the same settings."""
        raw = asdict(self) | {"policy": str(self.policy.resolve()), "clock": self.clock.value}
        return dict(json.loads(json.dumps(raw)))


@dataclass(frozen=True)
class EpisodeJob:
    """One episode to run.

    Args:
        settings: shared by all.
        task: of the world.
        seed: of the start.
        film: MP4 file to write; None: none.
    """

    settings: SimulateSettings
    task: str
    seed: int
    film: Path | None = None


def run_job(job: EpisodeJob) -> EpisodeResult:
    """Runs one episode; engine and robot are kept for the next one in this process.

    Raises:
        UserError: the policy, the world or an argument does not fit.
    """
    engine, robot = _stage(job.settings, os.getpid())
    pace = tick_time(read_device(job.settings.emulate) if job.settings.emulate else None)
    clock, limit = job.settings.clock, job.settings.time_limit
    if job.film is None:
        return Rollout(engine, robot, clock, pace, time_limit=limit).run(job.task, job.seed)
    with Film(job.film, 1.0 / robot.control_dt) as film:
        caption = _caption(job)
        rollout = Rollout(engine, robot, clock, pace, lambda: film.add(robot.look(), caption(robot)), time_limit=limit)
        return rollout.run(job.task, job.seed)


def _caption(job: EpisodeJob) -> Any:
    emulated = f", emulated {job.settings.emulate}" if job.settings.emulate else ""
    clock = job.settings.clock.value
    return lambda robot: f"{robot.instruction}  [{clock}{emulated}]" + ("  done" if robot.succeeded() else "")


@lru_cache(maxsize=1)
def _stage(settings: SimulateSettings, process: int) -> tuple[Engine, SimulatedRobot]:
    """Engine and robot of a process: loading takes longer than an episode."""
    policy = policy_of(settings)
    robot = make_robot(settings.world)
    check_statistics(policy.statistics, robot)
    engine = Engine(policy, settings.engine)
    engine.warm_up()
    return engine, robot


def policy_of(settings: SimulateSettings) -> Policy:
    """Loads the policy; without a key, the action statistics of a LIBERO suite are those that are named as it is.

    Raises:
        UserError: the checkpoint or an option does not fit.
    """
    return load_policy(
        settings.policy,
        device=settings.device,
        dtype=settings.dtype,
        unnorm_key=settings.unnorm_key or ("" if settings.world == TABLE else settings.world),
        center_crop=settings.center_crop,
        quantization=settings.quantization,
    )


def make_robot(world: str) -> SimulatedRobot:
    """The robot of a world.

    Raises:
        UserError: no such world, or it cannot be drawn or is not installed here.
    """
    if world == TABLE:
        from specvla_ros.simulation.table_robot import TableRobot

        return TableRobot()
    from specvla_ros.simulation.libero import LiberoRobot

    return LiberoRobot()


def check_statistics(statistics: ActionStatistics, robot: SimulatedRobot) -> None:
    """Whether a policy's actions are such as the robot takes.

    Raises:
        UserError: not seven values, a range far beyond the robot's, or far below it.
    """
    if len(statistics.low) != 7:
        raise UserError(
            f"the policy's actions ('{statistics.unnorm_key}') have {len(statistics.low)} values, the robot takes 7"
        )
    reach = np.maximum(np.abs(statistics.low), np.abs(statistics.high))[:3].max()
    largest = robot.largest_translation
    if not largest / 50 < reach < largest * 4:
        raise UserError(
            f"the action statistics '{statistics.unnorm_key}' do not fit this robot: the policy moves by up to "
            f"{reach:g} per action, the robot's training data by {largest:g}; was the policy trained for another "
            "robot, or is another --unnorm-key meant?"
        )
