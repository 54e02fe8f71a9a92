# SPDX-License-Identifier: Apache-2.0
"""Jobs whose first worker is killed in the middle of one of them."""

import os
import signal
from pathlib import Path

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Outcome
from specvla_ros.lab.evaluation import replay_bags, simulate
from specvla_ros.lab.evaluation.replay_bags import BagJob, ReplaySettings, replay_bag
from specvla_ros.lab.evaluation.simulate import EpisodeJob, SimulateSettings, run_job
from specvla_ros.lab.jobs.hosted_engine import EngineHost
from specvla_ros.lab.simulation.rollout import EpisodeResult
from specvla_ros.lab.training.draft_features import ShardJob, make_shard


def replay_bag_dying_once(job: BagJob) -> str:
    """Replays; the first worker at the bag `b` is killed at its twentieth tick after warm-up."""
    if job.out.name == "b":
        _kill_once(job.out.parent / ".died")
    return replay_bag(job)


def run_job_dying_once(job: EpisodeJob) -> EpisodeResult:
    """Runs an episode; the first worker at that of seed 1 is killed at its twentieth tick after warm-up."""
    if job.seed == 1:
        assert job.film is not None
        _kill_once(job.film.parents[1] / ".died")
    return run_job(job)


def simulating_host_dying_once(mark: Path, settings: SimulateSettings, workers: int) -> EngineHost:
    """The engine that workers share; the first one is killed at its twentieth tick after warm-up."""
    _kill_once(mark)
    return simulate.host_engine(settings, workers)


def replaying_host_dying_once(mark: Path, settings: ReplaySettings, workers: int) -> EngineHost:
    """As `simulating_host_dying_once`."""
    _kill_once(mark)
    return replay_bags.host_engine(settings, workers)


def make_shard_dying_once(job: ShardJob) -> int:
    """Makes a shard; the first worker at the second one is killed at its beginning."""
    mark = job.path.parent / ".died"
    if job.path.stem == "shard-00001" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return make_shard(job)


def _kill_once(mark: Path) -> None:
    if mark.exists():
        return
    mark.touch()
    real, done = Engine.tick, 0

    def tick(engine: Engine) -> list[Outcome]:
        nonlocal done
        done += engine.warm_up_s > 0
        if done == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(engine)

    Engine.tick = tick  # type: ignore[method-assign, assignment]
