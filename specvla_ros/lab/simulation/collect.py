# SPDX-License-Identifier: Apache-2.0
"""Demonstrations by scripted experts, with noise in the motion but not in the recorded actions.

An expert uses only the current state, as the policy uses one image: it keeps no phase of its own.
In most episodes the expert decides again after 0.05 s to 0.2 s, so that a policy that runs faster than its training
data has seen half-closed fingers. Each moment is also labelled with the actions of the other tasks' experts: the same
image under another instruction trains the policy to follow the instruction.

Noise follows DART (Laskey et al. 2017, arXiv 1703.09327): states off the expert's path, with the expert's correction.
With a policy it is DAgger (Ross et al. 2011, arXiv 1011.0686): the policy acts at 20 actions per second, and the expert
labels. At random the expert acts for a while, which leads out of states in which the policy would stand still forever.

With `joints` the arm is moved by its joints, as in teleoperation with a leader arm: noise and policy act on the joints,
and the recorded actions are the joints' goals, not their displacements.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.demonstrations import (
    PARTIAL,
    DemonstrationRecord,
    Hindsight,
    recorded_options,
    write_demonstration,
)
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.plans import CollectPlan
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.arms import choose_arm
from specvla_ros.lab.simulation.driven_robot import DrivenRobot
from specvla_ros.lab.simulation.joint_goals import JointGoals
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.tasks import (
    BLOCK_TOP_M,
    CUBE_HALF_M,
    CUBES,
    DEMONSTRATION_FIRST_SEED,
    Task,
    WorldState,
    choose_tasks,
)
from specvla_ros.lab.simulation.world import SimulationDiverged, upright_error

if TYPE_CHECKING:  # torch, which a worker without a policy does not need
    from specvla_ros.engine.engine import Engine

_NOISE = np.array([0.012, 0.012, 0.012, 0.02, 0.02, 0.04, 0.0])  # metres and radians per action, at full noise
_JOINT_NOISE = 0.015  # radians per action of each joint; at the tool about as much
_NOISE_LEVELS = (0.0, 0.5, 1.0)
_SHOVE_CHANCE = 0.04
_SHOVE_M, _SHOVE_RAD = 0.04, 0.05
_FLIP_CHANCE = 0.08
_LIES_M = 0.01  # a cube at most this far above the table counts as lying on it
_HASTY_SHARE = 0.7
_POLICY_SHARE = 0.7  # share of the turns
_TURN_STEPS = (10, 41)  # length of a turn in steps of 0.05 s: minimum, and maximum + 1
_AFTER_SUCCESS = 3  # frames after success, so that the policy also knows what to do when it is done


@dataclass(frozen=True)
class Demonstration:
    """One episode to record."""

    robot: str
    task: str
    seed: int
    directory: Path
    plan: CollectPlan


@dataclass(frozen=True)
class CollectResult:
    """Episode counts of a collection."""

    wanted: int  # requested episodes
    kept: int  # episodes on disk
    new: int  # episodes on disk that this call recorded
    failed: int  # episodes not kept: the expert did not succeed, or the simulation diverged


def collect(
    out: Path, plan: CollectPlan, on_progress: Callable[[int, int], None] = lambda done, wanted: None
) -> CollectResult:
    """Records demonstrations as bags `TASK-SEED`, or `ROBOT-TASK-SEED`; existing bags are kept.

    `on_progress` is called with the number of episodes done and wanted. Raises UserError if an existing bag was
    recorded with other options.
    """
    robots = [choose_arm(name) for name in plan.robots or (TABLE_ARM.name,)]
    tasks = {arm.name: choose_tasks(plan.tasks, arm.tasks) for arm in robots}
    for arm in robots:
        if not (plan.joints or arm.takes_poses):
            raise UserError(f"the tool of the robot '{arm.name}' does not reach every pose: add --joints")
        arm.model()  # reports a missing package here rather than in a worker
    first = DEMONSTRATION_FIRST_SEED if plan.first_seed is None else plan.first_seed
    # One robot after the other: a process caches only its last robot.
    wanted = [
        Demonstration(robot, task.name, seed, out / bag_name(robot, task.name, seed), plan)
        for robot in tasks
        for seed in range(first, first + plan.episodes)
        for task in tasks[robot]
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be created: {error.strerror}") from None
    for partial in out.glob(f".*{PARTIAL}"):  # left by a killed process
        shutil.rmtree(partial, ignore_errors=True)
    jobs = [job for job in wanted if not job.directory.exists()]
    for job in wanted:
        if (before := recorded_options(job.directory)) not in ("", options_of(plan)):
            raise UserError(
                f"{job.directory} was recorded with other options: {before}, not {options_of(plan)}; choose another "
                "--out or --seed"
            )
    kept, new = len(wanted) - len(jobs), 0
    results = run_jobs(demonstrate_and_record, jobs, plan, name=lambda job: job.directory.name)
    for done, (_, succeeded) in enumerate(results, start=1):
        new += succeeded
        on_progress(len(wanted) - len(jobs) + done, len(wanted))
    return CollectResult(len(wanted), kept + new, new, len(jobs) - new)


def options_of(plan: CollectPlan) -> str:
    """The options that decide what an episode's bag holds, as text that YAML does not quote."""
    words = [f"noise={plan.noise:g}"]
    words += ["joints"] if plan.joints else []
    words += ["all_sensors"] if plan.all_sensors else []
    words += [f"policy={re.sub('[^A-Za-z0-9_.-]', '_', plan.policy.name)}"] if plan.policy is not None else []
    return ",".join(words)


def demonstrate_and_record(job: Demonstration) -> bool:
    """Records one demonstration; returns False and keeps nothing if the expert fails.

    If a policy acts, its failures are kept too: every label is the expert's.
    """
    robot, plan = _robot(job.robot, os.getpid(), job.plan.joints), job.plan
    expert = _Expert(robot)
    rng = np.random.default_rng([job.seed, sum(map(ord, job.task))])
    robot.reset(job.task, job.seed)
    images: list[np.ndarray] = []
    further: dict[str, list[np.ndarray]] = {camera: [] for camera in robot.cameras[1:] if plan.all_sensors}
    states: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    tasks = robot.world.arm.tasks
    others: list[tuple[Task, list[np.ndarray]]] = [(task, []) for task in tasks if task.name != job.task]
    times_s: list[float] = []
    per_action = round(robot.action_dt / robot.control_dt)
    disturbed = _Disturbed(rng, plan.noise, per_action, of_joints=plan.joints)
    actor = disturbed if plan.policy is None else _PolicyInTurn(rng, job, robot, disturbed)
    passed, after = 0, 0
    try:
        while after < _AFTER_SUCCESS:
            if passed >= robot.max_steps * per_action:
                if plan.policy is None:
                    return False
                break
            state = robot.state()
            action = expert.act(robot.task, state)
            for task, labels in others:
                labels.append(expert.label(expert.act(task, state)))
            images.append(robot.look())
            for camera, seen in further.items():
                seen.append(robot.look(camera))
            states.append(robot.feel())
            actions.append(expert.label(action))
            times_s.append(passed * robot.control_dt)
            lies = state.positions[robot.task.cube][2] < CUBE_HALF_M + _LIES_M
            done, lasting = actor.act(action, lies=lies, robot=robot, passed=passed)
            robot.take(done)
            for _ in range(lasting):
                robot.advance()
            passed += lasting
            after += bool(after) or robot.succeeded()
    except SimulationDiverged:
        return False
    try:
        hindsight = {task.name: Hindsight(task.instruction, labels) for task, labels in others}
        record = DemonstrationRecord(
            images,
            actions,
            robot.instruction,
            times_s,
            hindsight,
            cameras=further,
            state_names=robot.state_names if plan.all_sensors or plan.joints else (),
            states=states,
            action_names=robot.action_names if plan.joints else (),
            options=options_of(plan),
        )
        write_demonstration(job.directory, record)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        raise UserError(
            f"{job.directory} cannot be written: {error.strerror}. "
            + ("Free some space, or choose another --out; " if full else "")
            + "everything recorded so far is kept, and the same command resumes from there"
        ) from None
    return True


class _Expert:
    """The tasks' expert in the robot's space of actions."""

    def __init__(self, robot: TableRobot) -> None:
        self._robot, arm = robot, robot.world.arm
        of_joints = robot.action_names != ACTION_NAMES
        self._goals, self._joints = JointGoals(robot.world.model, arm) if of_joints else None, len(arm.joints)

    def act(self, task: Task, state: WorldState) -> np.ndarray:
        """The action that the robot takes."""
        action = demonstrate(task, state)
        return action if self._goals is None else self._goals.displacement(action, self._positions())

    def label(self, action: np.ndarray) -> np.ndarray:
        """The action as it is recorded."""
        return action if self._goals is None else action + np.append(self._positions(), 0.0)

    def _positions(self) -> np.ndarray:
        return self._robot.feel()[: self._joints]


class _Disturbed:
    """Disturbs the expert's actions by noise, shoves and inverted gripper commands.

    `noise` is the collection's level, from which each episode's is drawn. `per_action`: control steps of an action.
    """

    def __init__(self, rng: np.random.Generator, noise: float, per_action: int, *, of_joints: bool) -> None:
        self._rng = rng
        self._level = noise * rng.choice(_NOISE_LEVELS)
        self._per_action = per_action
        self._of_joints = of_joints
        self._hasty = rng.random() < _HASTY_SHARE
        self._shove, self._shoves_left, self._flips_left = np.zeros(3), 0, 0

    def act(self, action: np.ndarray, *, lies: bool, **_: object) -> tuple[np.ndarray, int]:
        """The disturbed action and its number of steps; `lies`: the cube lies on the table."""
        rng, level, joints = self._rng, self._level, len(action) - 1
        noise = np.append(np.full(joints, _JOINT_NOISE), 0.0) if self._of_joints else _NOISE
        shoved, shove = (joints, _SHOVE_RAD) if self._of_joints else (3, _SHOVE_M)
        disturbed = action + level * rng.normal(size=len(action)) * noise
        if self._shoves_left == 0 and rng.random() < _SHOVE_CHANCE:
            self._shove, self._shoves_left = level * rng.uniform(-shove, shove, shoved), int(rng.integers(1, 4))
        if self._shoves_left:
            disturbed[:shoved] += self._shove
            self._shoves_left -= 1
        if self._flips_left == 0 and lies and rng.random() < level * _FLIP_CHANCE:
            self._flips_left = int(rng.integers(1, 4))
        if self._flips_left:
            disturbed[-1] = 1.0 - disturbed[-1]
            self._flips_left -= 1
        return disturbed, int(rng.integers(1, self._per_action + 1)) if self._hasty else self._per_action


class _PolicyInTurn:
    """A policy that acts at every step, alternating with the disturbed expert."""

    def __init__(self, rng: np.random.Generator, job: Demonstration, robot: TableRobot, expert: _Disturbed) -> None:
        assert job.plan.policy is not None
        self._rng, self._expert = rng, expert
        self._engine = _engine(job.plan.policy, robot, os.getpid())
        self._engine.reset()
        self._turn_ends, self._policy_acts = 0, False

    def act(self, action: np.ndarray, *, lies: bool, robot: TableRobot, passed: int) -> tuple[np.ndarray, int]:
        """Does the same as `_Disturbed.act`; `passed`: steps of the episode so far."""
        if passed >= self._turn_ends:
            self._turn_ends = passed + int(self._rng.integers(*_TURN_STEPS))
            self._policy_acts = bool(self._rng.random() < _POLICY_SHARE)
        if not self._policy_acts:
            return self._expert.act(action, lies=lies)
        return _decided(self._engine, robot, stamp_ns=passed + 1), 1


def bag_name(robot: str, task: str, seed: int) -> str:
    """The name of a demonstration's bag; the default arm is not named."""
    return ("" if robot == TABLE_ARM.name else f"{robot}-") + f"{task}-{seed:07d}"


def _decided(engine: "Engine", robot: TableRobot, *, stamp_ns: int) -> np.ndarray:
    """The policy's action; zero motion with an open gripper if it has none."""
    from specvla_ros.engine.outcome import Action
    from specvla_ros.lab.simulation.rollout import observe

    outcome = engine.act(observe(robot, engine.target, robot.instruction, stamp_ns))
    return outcome.values if isinstance(outcome, Action) else np.append(np.zeros(len(robot.action_names) - 1), 1.0)


@lru_cache(maxsize=1)
def _engine(policy: Path, robot: TableRobot, process: int) -> "Engine":
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.settings import EngineSettings
    from specvla_ros.lab.simulation.rollout import check_senses
    from specvla_ros.models.checkpoint import load_target

    engine = Engine(load_target(policy, device="cpu"), EngineSettings("ar"))
    check_senses(engine.target, robot)
    return engine


@lru_cache(maxsize=1)
def _robot(name: str, process: int, joints: bool) -> TableRobot:
    """One robot per process: making its OpenGL context takes longer than an episode."""
    arm = choose_arm(name)
    return DrivenRobot(arm, "position_array", joints=True) if joints else TableRobot(arm=arm)


MAX_STEP_M = 0.05
_MAX_TURN_RAD = 0.2
_TOLERATED_RAD = 0.08
_OPEN, _CLOSE = 1.0, 0.0
_CRUISE_M = 0.11
_BEHIND_M = 0.062
_PUSH_HEIGHT_M = 0.022
_CREEP_M = 0.005
_OVER_M = 0.012  # of a tool that points, above the cube
_LOW_CRUISE_M = 0.04  # above that
_OPENED_M = 0.075  # fingers further apart than this are open


def demonstrate(task: Task, state: WorldState) -> np.ndarray:
    """The expert's action, float64 [7]: metres and radians over 0.2 s, base frame; gripper 1 opens, 0 closes."""
    if _in_the_way(task, state):  # release it and move up
        move, gripper = np.array([0.0, 0.0, 0.05]), _OPEN
    else:
        move, gripper = {"lift": _lift, "push": _push, "put": _put, "point": _point}[task.verb](task, state)
    near = np.linalg.norm((state.positions[task.cube] - state.hand)[:2]) < 0.08
    yaw = state.yaws[task.cube] if near and task.verb != "push" else 0.0
    turn = upright_error(state.rotation, yaw)
    # Small tilts are harmless and invisible in the image: correcting them would only add label noise.
    turn = np.where(np.abs(turn) < _TOLERATED_RAD, 0.0, np.clip(turn, -_MAX_TURN_RAD, _MAX_TURN_RAD))
    return np.array([*np.clip(move, -MAX_STEP_M, MAX_STEP_M), *turn, gripper])


def _in_the_way(task: Task, state: WorldState) -> bool:
    """Checks whether a wrong cube is between the fingers, as after a change of instruction."""
    if task.verb == "point":  # with closed fingers
        return False
    for cube in CUBES:
        away = state.hand - state.positions[cube]
        between = np.abs(away[:2]).max() < 0.03 and -0.02 < away[2] < 0.045
        if between and (cube != task.cube or task.verb == "push"):
            return True
    return False


def _lift(task: Task, state: WorldState) -> tuple[np.ndarray, float]:
    if holds(state, task.cube):
        # Lateral motion as on the way down. If it were exactly 0, plain decoding would lift wherever the hand is
        # roughly above the cube: each token that is certain in the lift and vague on the way favours the lift.
        return np.array([*(state.positions[task.cube] - state.hand)[:2], 0.05]), _CLOSE
    return _grasp(state, task.cube)


def _put(task: Task, state: WorldState) -> tuple[np.ndarray, float]:
    cube, block = state.positions[task.cube], state.positions["block"]
    over = block[:2] - cube[:2]
    distance = float(np.linalg.norm(over))
    placed = distance < 0.03 and cube[2] < BLOCK_TOP_M + CUBE_HALF_M + 0.015
    if placed:  # release it and move up
        return np.array([0.0, 0.0, 0.05 if state.opening > _OPENED_M else 0.01]), _OPEN
    if not holds(state, task.cube):
        return _grasp(state, task.cube)
    height = BLOCK_TOP_M + CUBE_HALF_M + 0.008 + _funnel(distance - 0.01, 3.0)
    # No lateral motion until the cube is above the objects on the table.
    clear = np.clip((state.hand[2] - 0.05) / 0.03, 0.0, 1.0) if distance > 0.06 else 1.0
    return np.array([*(over * clear), height - state.hand[2]]), _CLOSE


def _push(task: Task, state: WorldState) -> tuple[np.ndarray, float]:
    cube, hand = state.positions[task.cube], state.hand
    behind, aside = (cube - hand)[:2]
    ready = abs(aside) < 0.012 and 0.03 < behind < _BEHIND_M + 0.03
    if ready and hand[2] < _PUSH_HEIGHT_M + 0.012:
        return np.array([0.05, aside, _PUSH_HEIGHT_M - hand[2]]), _CLOSE
    away = np.array([behind - _BEHIND_M, aside])
    height = _PUSH_HEIGHT_M + _funnel(float(np.linalg.norm(away)) - 0.008, 3.0)
    return np.array([*_limited(away), height - hand[2]]), _CLOSE


def _point(task: Task, state: WorldState) -> tuple[np.ndarray, float]:
    away = state.positions[task.cube] - state.hand
    distance = float(np.linalg.norm(away[:2]))
    height = CUBE_HALF_M + _OVER_M + min(_funnel(distance - 0.01, 2.0), _LOW_CRUISE_M)
    return np.array([*_limited(away[:2]), away[2] + height]), _CLOSE


def _grasp(state: WorldState, cube: str) -> tuple[np.ndarray, float]:
    away = state.positions[cube] - state.hand
    distance = float(np.linalg.norm(away[:2]))
    bottom = max(state.positions[cube][2], CUBE_HALF_M)
    # Fingers that started to close keep closing: a policy with 1 cm of error in height must not open them again.
    closing = state.opening < _OPENED_M
    if distance < 0.018 and state.hand[2] < bottom + (0.026 if closing else 0.012):
        # Moves up already: a policy that sees no change between "closed, not yet up" and "closed, up" stands still.
        return np.array([*away[:2], _CREEP_M]), _CLOSE
    height = bottom + _funnel(distance - 0.008, 3.0)
    return np.array([*_limited(away[:2]), height - state.hand[2]]), _OPEN


def _funnel(distance: float, slope: float) -> float:
    """Height above the goal at a horizontal distance: the hand descends along a cone, never from the side."""
    return float(np.clip(slope * distance, 0.0, _CRUISE_M - CUBE_HALF_M))


def _limited(away: np.ndarray) -> np.ndarray:
    return away * min(1.0, MAX_STEP_M / max(float(np.linalg.norm(away)), 1e-9))


def holds(state: WorldState, cube: str) -> bool:
    """Checks whether the fingers are closed around the cube."""
    away = np.abs(state.positions[cube] - state.hand)
    return bool(away[:2].max() < 0.02 and away[2] < 0.03 and 0.044 < state.opening < 0.062)
