# SPDX-License-Identifier: Apache-2.0
"""The driver's control between a policy and an arm that obeys motion commands, in simulation time.

Does the work of the nodes `driver` and `sim_robot` without topics: an evaluation on an emulated device takes minutes
instead of days.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np

from specvla_ros.control.action_space import ActionRefusedError, ActionSpace, Motion, ToolSpace
from specvla_ros.control.bounded_motion import BoundedMotion, Target, tracking_velocity
from specvla_ros.control.chunks import TrajectoryChunks
from specvla_ros.control.convention import ActionConvention, ActionFrame, StampedAction
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.gripper import Gripper, GripperSettings
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, JointSolver, UnreachableError, trajectory_point
from specvla_ros.control.joint_path import JointPath
from specvla_ros.control.joint_space import JointKinematics, JointMotion, JointSpace
from specvla_ros.control.joint_velocity import JointTracking
from specvla_ros.control.limits import JointLimits, Limits
from specvla_ros.control.pose import PoseHistory
from specvla_ros.control.robot_model import JointModel
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arm import TABLE_ARM, Arm, joint_model
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.controllers import BASE_FRAME, CONTROL_DT_S, JointTrajectory, Twist
from specvla_ros.lab.simulation.guarded_arm import ArmGuard, Passed, trajectory
from specvla_ros.lab.simulation.robot import ACTION_DT_S, IMAGE_SIZE, DisplacementFollower, TableRobot
from specvla_ros.lab.simulation.world import CONTROL_HZ

_STEPS = round(1.0 / CONTROL_HZ / CONTROL_DT_S)
# The tool of an arm whose joints are moved may touch the table: then the arm pushes against it, within its torques.
_TOUCH_M = 0.01
_PATIENCE_S = 3.0  # until the guard passes
_CHUNK_S = 0.3  # motion in a chunk before it brakes, at least


class Follow(str, Enum):
    """The follower of the policy's actions."""

    DRIVER = "driver"  # the driver's control
    GUARDED = "guarded"  # the same, and its commands pass the guard
    PLAIN = "plain"  # a plain follower, like common bridges: values / dt, added to the tool's commanded pose


def simulation_limits(arm: Arm) -> Limits:
    """Limits that allow the motions of the training data: 5 cm along an axis in 0.2 s."""
    return Limits(
        linear_speed=0.6,
        angular_speed=3.0,
        linear_acceleration=10.0,
        angular_acceleration=50.0,
        linear_jerk=500.0,
        angular_jerk=2500.0,
        workspace_min=arm.low,
        workspace_max=arm.high,
    )


def touching(limits: Limits) -> Limits:
    """The limits of a tool that may touch the table."""
    x, y, z = limits.workspace_min
    return replace(limits, workspace_min=(x, y, z - _TOUCH_M))


def _accelerating(model: JointModel, arm: Arm) -> JointModel:
    """The arm's kinematics, with half the accelerations of its own control and jerks that reach them in 0.04 s."""
    acceleration = np.array(arm.acceleration) / 2
    return replace(model, max_acceleration=acceleration, max_jerk=acceleration / 0.04)


class DrivenRobot(TableRobot):
    """An arm at the table, moved by one of `commanded_arm.COMMANDS`; see SimulatedRobot.

    `joints`: its actions are displacements of the joints and the gripper, in the order of `action_names`. The tool may
    then touch the table.
    """

    def __init__(
        self,
        arm: Arm = TABLE_ARM,
        command: str = "pose",
        follow: Follow = Follow.DRIVER,
        image_size: int = IMAGE_SIZE,
        *,
        joints: bool = False,
    ) -> None:
        super().__init__(image_size, arm)
        self._arm = arm
        self._commanded = CommandedArm(self.world, command)
        self._by_velocity, self._of_joint_velocities = command == "twist", command == "velocity_array"
        self._follow, self._of_joints = follow, joints
        self._limits, self._model = simulation_limits(arm), joint_model(self.world.model, arm)
        self._convention, stop_s = ActionConvention(ACTION_DT_S), self._limits.stop_s
        if joints:
            self.action_names = arm.action_names(of_joints=True)
            self._limits, self._model = touching(self._limits), _accelerating(self._model, arm)
            self._convention = replace(self._convention, frame=ActionFrame.JOINTS, joints=self.action_names)
            stop_s = self._model.stop_s
        self._solver = JointKinematics(self._model) if joints else JointSolver(self._model, CONTROL_DT_S)
        self._tracking = JointTracking(self._solver)
        self._chunks = TrajectoryChunks(self._solver, max(JointLimits().chunk_s, stop_s + _CHUNK_S), stop_s)
        self._send: Callable[[Target[Any]], Any] = {  # None: nothing this time
            "pose": lambda target: (BASE_FRAME, target.pose),
            "twist": lambda target: Twist(self._now_s, BASE_FRAME, target.velocity[:3], target.velocity[3:]),
            "joint_trajectory": self._trajectory,
            "joint_trajectory_chunk": self._chunk,
            "position_array": lambda target: self._solver.follow(target)[0],
            "velocity_array": lambda target: self._tracking.next(target, self._joint_positions(), CONTROL_DT_S),
        }[command]
        self._guard: ArmGuard | None = None
        if follow is Follow.GUARDED:
            self._guard = ArmGuard(arm, self._model, self._limits, command)
        self.refused: Counter[str] = Counter()

    def reset(self, task: str, seed: int) -> None:
        super().reset(task, seed)
        self._commanded.reset()
        self._now_s = 0.0
        start = self._measured()
        self._history = PoseHistory[Any]()
        fingers = self._arm.gripper
        self._fingers = Gripper(GripperSettings(open_value=fingers.open[0], closed_value=fingers.closed[0]))
        self._actions: ActionFollower[Any] = ActionFollower(
            *self._space_and_motion(), self._fingers, self._history, max_age_s=20.0
        )
        self._plain, self._sent = DisplacementFollower(1 / CONTROL_DT_S, np.ones(6)), start
        self._history.add(0.0, start)
        self._begin()
        self.refused = Counter()
        if self._guard is not None:
            self._wait_for(self._guard)

    def _begin(self) -> None:
        """Starts the motion at the measured arm."""
        self._solver.start(self._joint_positions())
        self._actions.rest_at(self._measured())
        self._chunks.start()
        self._tracking.rest()

    def _wait_for(self, guard: ArmGuard) -> None:
        guard.start(self.instruction)
        while not guard.passing:
            if self._now_s > _PATIENCE_S:
                raise UserError(f"the guard does not let the arm '{self._arm.name}' move: {guard.reason}")
            guard.act(self._now_s, self._now_s)
            self._step()

    def _space_and_motion(self) -> tuple[ActionSpace[Any], Motion[Any]]:
        if isinstance(self._solver, JointKinematics):
            motion = JointMotion(self._solver, self._model, self._limits)
            return JointSpace(self._solver, self._limits), motion
        return ToolSpace(self._limits), BoundedMotion(self._limits)

    def _joint_positions(self) -> dict[str, float]:
        return dict(zip(self._arm.joint_names, self.world.joint_state()[0].tolist(), strict=True))

    def _measured(self) -> Any:
        """The arm's place in the space of its actions."""
        return self._solver.place_of(self._joint_positions()) if self._of_joints else self.world.tool()

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        """See SimulatedRobot. Also takes an answer's first actions [n, dims], and later more of the same answer."""
        if self._follow is Follow.PLAIN:
            self._plain.take(values, self.action_dt)
            self._fingers.take(float(values[6]), self._convention.gripper)
            return
        stamp_s = round(self._now_s - age_s, 9)
        rows, partial = np.atleast_2d(values), values.ndim > 1
        self.follow(StampedAction(stamp_s, rows, self._convention, partial=partial, names=self.action_names))

    @property
    def now_s(self) -> float:
        """The time on the robot's clock, which stamps actions."""
        return self._now_s

    def follow(self, action: StampedAction) -> None:
        """Takes an action in any convention, as the driver's node does."""
        if self._guard is not None:
            self._guard.act(action.stamp_s, self._now_s)
        try:
            self._actions.take(action, self._now_s)
        except ActionRefusedError as error:
            self.refused[error.refusal.value] += 1

    def advance(self) -> None:
        for _ in range(_STEPS):
            self._step()

    def _step(self) -> None:
        self._now_s += CONTROL_DT_S
        command = None
        try:
            command = self._send(self._target())
        except UnreachableError:
            self.refused["unreachable"] += 1
            self._actions.hold(self._now_s)
            if self._of_joint_velocities:  # as the driver's output: the arm would keep the last ones
                command = self._tracking.brake(CONTROL_DT_S)
        self._obey(self._guarded(command))
        self._commanded.advance(self._now_s)
        self.moved()

    def _guarded(self, command: Any) -> Passed:
        """The commands that reach the arm. While the guard passes none, the motion stays at the measured arm."""
        if self._guard is None:
            return Passed(command, self._fingers.position)
        passed = self._guard.step(self.world, command, self._fingers.position, self._now_s)
        if not self._guard.passing:
            self.refused["guard"] += 1
            self._begin()
        return passed

    def _obey(self, passed: Passed) -> None:
        if passed.command is not None:
            self._commanded.controller.take(passed.command, self._now_s)
        if passed.gripper is not None:
            self._commanded.gripper.obey(self._commanded.gripper.array, np.array([passed.gripper]), self._now_s)

    def moved(self) -> None:
        """Measures the arm after a control step."""
        self._history.add(self._now_s, self._measured())

    def _target(self) -> Target[Any]:
        if self._follow is not Follow.PLAIN:
            target = self._actions.step(self._now_s)
            if not self._by_velocity:
                return target
            return Target(target.pose, tracking_velocity(target, self.world.tool(), self._limits))
        way = self._plain.next()[:6]
        self._sent = self._limits.clamped(self._sent.displaced(way))
        return Target(self._sent, way / CONTROL_DT_S)

    def _trajectory(self, target: Target[Any]) -> JointTrajectory:
        ahead = trajectory_point(*self._solver.follow(target))
        return trajectory(self._arm.joints, JointPath(np.array([TRAJECTORY_AHEAD_S]), ahead[None]))

    def _chunk(self, target: Target[Any]) -> JointTrajectory | None:
        path = self._chunks.next(target, self._actions, self._now_s)
        return None if path is None else trajectory(self._arm.joints, path)
