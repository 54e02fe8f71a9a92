# SPDX-License-Identifier: Apache-2.0
"""`specvla simulate`: runs a policy in simulation for success, latency and films."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from specvla_ros.control.convention import positions_joints
from specvla_ros.control.guard.settings import JOINT_OUTPUTS
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.run_directory import (
    REPORT_FILE,
    SUMMARY_FILE,
    RunDirectory,
    checkpoint_hashes,
    head,
    read_lines,
    write_line,
)
from specvla_ros.lab.evaluation.simulate_summary import Film, SimulateSummary, summarise_episodes, write_simulate_report
from specvla_ros.lab.jobs.hosted_engine import EngineHost, HostedEngine
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.jobs.workers import Host, Shared, share
from specvla_ros.lab.planning.device import Software
from specvla_ros.lab.planning.measure import CpuTimes, busy_machine
from specvla_ros.lab.planning.stage_times import StageTimes, read_stage_times
from specvla_ros.lab.plans import SimulatePlan, Spread
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.arms import check_actions, choose_arm
from specvla_ros.lab.simulation.commanded_arm import TOOL_COMMANDS
from specvla_ros.lab.simulation.libero import STARTS, LiberoRobot, original_of, require_libero, suite_tasks
from specvla_ros.lab.simulation.robot import SimulatedRobot, TableRobot, check_policy
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult, Rollout, tick_time
from specvla_ros.lab.simulation.tasks import choose_tasks
from specvla_ros.models.checkpoint import load_target, loader_of
from specvla_ros.models.lora import adapter_of
from specvla_ros.models.settings import ModelSettings, WeightFormat
from specvla_ros.models.target import Target

TABLE = "table"
EPISODES_FILE, FILMS = "episodes.jsonl", "films"


@dataclass(frozen=True)
class SimulateSettings:
    """The settings that decide the episodes of a simulation."""

    policy: Path  # checkpoint directory
    world: str = TABLE  # `table`, or the name of a LIBERO suite
    robot: str = TABLE_ARM.name  # the arm at the table
    follow: str = ""  # follower of the actions, one of `driven_robot.Follow`; empty: the simulator's own
    interface: str = ""  # the follower's command interface to the arm, one of `commanded_arm.COMMANDS`; empty: default
    clock: Clock = Clock.LOCKSTEP  # passage of world time during a decision
    emulate: str = ""  # the device whose stage times replace the measured ones; empty: none
    software: Software = Software.EAGER  # the kind of software that the emulated device runs
    engine: EngineSettings = field(default_factory=EngineSettings)
    time_limit: float = 1.0  # time limit of an episode, as a multiple of its task's
    model: ModelSettings = field(default_factory=ModelSettings)

    def stage_times(self) -> StageTimes | None:
        """Stage times of the emulated device with the policy's weights; None if no device is emulated."""
        if not self.emulate:
            return None
        return read_stage_times(self.emulate, self.software, WeightFormat(self.model.quantization))

    def as_json(self) -> dict[str, Any]:
        values = {"policy": str(self.policy.resolve()), "clock": self.clock.value, "software": self.software.value}
        return asdict(self) | values


@dataclass(frozen=True)
class EpisodeJob:
    """One episode to run."""

    settings: SimulateSettings
    task: str
    seed: int  # seed of the start pose
    film: Path | None = None  # the MP4 file to write; None: none


def run_job(job: EpisodeJob, host: Host | None = None) -> EpisodeResult:
    """Runs one episode; keeps the robot and any local engine for the next one in this process."""
    settings = job.settings
    engine, robot = _engine_and_robot(settings, os.getpid(), host)
    pace = tick_time(settings.stage_times())
    rollout = partial(Rollout, engine, robot, settings.clock, pace, time_limit=settings.time_limit)
    if job.film is None:
        return rollout().run(job.task, job.seed)
    emulated = f", emulated {settings.emulate}, {settings.software.value}" if settings.emulate else ""
    how = settings.clock.value + emulated
    with closing(Film(job.film, 1.0 / robot.control_dt)) as film:

        def add_picture() -> None:
            film.add(robot.look(), f"{robot.instruction}  [{how}]" + ("  done" if robot.succeeded() else ""))

        def add_action(action: Action) -> None:
            film.act(action.names, action.values)

        return rollout(add_picture, on_act=add_action).run(job.task, job.seed)


@lru_cache(maxsize=1)
def _engine_and_robot(
    settings: SimulateSettings, process: int, host: Host | None
) -> tuple[Engine | HostedEngine, SimulatedRobot]:
    """Engine and robot of a process, cached because loading takes longer than an episode."""
    engine = HostedEngine(host) if host is not None else Engine(policy_of(settings), settings.engine)
    joints = positions_joints(engine.target.unnorm_key)
    robot = make_robot(settings.world, settings.robot, settings.follow, settings.interface, joints=joints)
    check_policy(engine.target.codec, robot.action_names, robot.largest_translation)
    if isinstance(engine, Engine):
        engine.warm_up()
    return engine, robot


def host_engine(settings: SimulateSettings, workers: int) -> EngineHost:
    """Creates the engine that several workers share."""
    return EngineHost(policy_of(settings), settings.engine, workers, tick_time(settings.stage_times()))


def policy_of(settings: SimulateSettings) -> Target:
    """Loads the policy; without `unnorm_key`, with the action statistics named like the LIBERO suite.

    For LIBERO-PRO's suites, which are for evaluation only, that is the suite they derive from.
    """
    key = settings.model.unnorm_key or ("" if settings.world == TABLE else original_of(settings.world))
    return load_target(settings.policy, **vars(settings.model) | {"unnorm_key": key})


def make_robot(
    world: str, robot: str = TABLE_ARM.name, follow: str = "", interface: str = "", *, joints: bool = False
) -> SimulatedRobot:
    """Creates a world's robot; see `SimulateSettings`. Joints are always moved by the driver's control.

    Raises UserError for an interface that does not take joints.
    """
    if world != TABLE:
        return LiberoRobot()
    arm = choose_arm(robot)
    check_actions(arm, joints=joints)
    if not follow and not joints:
        return TableRobot(arm=arm)
    from specvla_ros.lab.simulation.driven_robot import DrivenRobot, Follow

    if joints and follow == Follow.PLAIN.value:
        raise UserError("the policy's actions are positions of joints, which need --follow driver or guarded")
    if joints and interface in TOOL_COMMANDS:
        raise UserError(f"the policy's actions are positions of joints: use --interface {', '.join(JOINT_OUTPUTS)}")
    if follow == Follow.GUARDED.value and not joints and interface not in ("", *TOOL_COMMANDS):
        raise UserError(
            f"--follow guarded with --interface {interface} is for policies whose actions are positions of joints: the "
            "simulated tool accelerates faster than the guard lets the joints; use --interface pose or twist"
        )
    default = "joint_trajectory_chunk" if joints else "pose"
    return DrivenRobot(arm, interface or default, Follow(follow or Follow.DRIVER), joints=joints)


def simulate(
    settings: SimulateSettings,
    plan: SimulatePlan,
    out: Path,
    on_episode: Callable[[EpisodeResult, int, int], None] = lambda result, done, wanted: None,
) -> SimulateSummary:
    """Runs episodes and writes episodes.jsonl, summary.json, report.html and films.

    A repeated call with the same settings runs the missing episodes. `on_episode` gets each new episode, the number of
    finished episodes and the total.
    """
    loader_of(settings.policy)  # what is not a checkpoint fails here rather than in a worker
    settings.stage_times()  # an unknown device too
    if plan.per_engine and settings.clock is Clock.REALTIME:
        raise UserError(f"--per-engine {plan.per_engine} needs --clock lockstep: in real time each robot has its own")
    if settings.engine.commit != "none":
        raise UserError(
            "decode.commit needs a robot that follows all actions of an answer, and a simulated one follows the first: "
            "leave it at none; python -m benchmarks.robot.mechanisms measures it on a robot that does"
        )
    if settings.world != TABLE and settings.robot != TABLE_ARM.name:
        raise UserError(f"--robot {settings.robot} needs --world table; {settings.world} has its own robot")
    if settings.world == TABLE:
        choose_arm(settings.robot).model()  # a missing package fails here rather than in a worker
    tasks = tasks_of(settings.world, plan.tasks, settings.robot)
    directory = RunDirectory(out, "simulate")
    out = directory.path
    directory.begin(settings.as_json() | checkpoint_hashes(settings.policy, settings.engine))
    done = {(each.task, each.seed): each for each in directory.resume_lines(EPISODES_FILE, episode_of)}
    wanted = [(task, plan.first_seed + i) for i in range(plan.episodes) for task in tasks]
    films = {(task, seed): out / FILMS / f"{task.replace('/', '_')}-{seed}.mp4" for task, seed in wanted}
    jobs = []
    for task, seed in (each for each in wanted if each not in done):
        film = films[task, seed] if seed - plan.first_seed < plan.films else None
        jobs.append(EpisodeJob(settings, task, seed, film))
    before = CpuTimes.now()
    with directory.reporting_errors("; finished episodes are kept, and the same command resumes"):
        (out / FILMS).mkdir(exist_ok=True)
        try:
            for result in run_episodes(directory, jobs, plan, share(partial(host_engine, settings), plan.per_engine)):
                done[result.task, result.seed] = result
                on_episode(result, sum(key in done for key in wanted), len(wanted))
        finally:
            finished = [done[key] for key in wanted if key in done]
            emulated = settings.stage_times()
            described = {"settings": settings.as_json(), "adapter": adapter_of(settings.policy), "plan": asdict(plan)}
            context = described | {
                "emulation": emulated and emulated.as_json(),
                "busy": busy_machine(before, CpuTimes.now()) or None,
                **head(),
            }
            summary = summarise_episodes(finished, context=context)
            directory.write_json(SUMMARY_FILE, summary.as_json())
            write_simulate_report(out / REPORT_FILE, summary, sorted(filter(Path.exists, films.values())))
    return summary


def run_episodes(
    directory: RunDirectory,
    jobs: Sequence[EpisodeJob],
    spread: Spread,
    shared: Shared | None = None,
    more: Mapping[str, str] | None = None,
) -> Iterator[EpisodeResult]:
    """Runs episodes; writes each to EPISODES_FILE when it ends, with the fields of `more`."""
    gpu = any(job.settings.model.device != "cpu" for job in jobs)
    with directory.append_to(EPISODES_FILE) as lines:
        results = run_jobs(
            run_job, jobs, spread, gpu=gpu, shared=shared, name=lambda job: f"{job.task} from seed {job.seed}"
        )
        for _, result in results:
            write_line(lines, {**(more or {}), **asdict(result)})
            yield result


def read_episodes(out: Path, plan: SimulatePlan | None = None) -> dict[tuple[str, int], EpisodeResult]:
    """The finished episodes of a results directory, by task and seed.

    `plan`: only its episodes, since the directory also keeps those of earlier plans.
    """
    found = {(each.task, each.seed): each for each in read_lines(out / EPISODES_FILE, episode_of)}
    if plan is None:
        return found
    seeds = range(plan.first_seed, plan.first_seed + plan.episodes)
    tasks = plan.tasks or {task for task, _ in found}
    return {(task, seed): each for (task, seed), each in found.items() if task in tasks and seed in seeds}


def episode_of(raw: dict[str, Any]) -> EpisodeResult:
    """Parses a line of EPISODES_FILE."""
    return EpisodeResult(**raw | {"latency_s": tuple(raw["latency_s"])})


def tasks_of(world: str, names: Sequence[str], robot: str = TABLE_ARM.name) -> list[str]:
    """The named tasks of a world, or all of them; at the table, those of an arm."""
    if world == TABLE:
        return [task.name for task in choose_tasks(names, choose_arm(robot).tasks)]
    known = suite_tasks(world)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"there is no task '{unknown[0]}'; the tasks of {world} are: {', '.join(known)}")
    require_libero()
    return list(names) or list(known)


def starts_of(world: str) -> int | None:
    """Number of starts of each of a world's tasks, with seeds from 0; None: any number."""
    return None if world == TABLE else STARTS
