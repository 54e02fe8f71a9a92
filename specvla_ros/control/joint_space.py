# SPDX-License-Identifier: Apache-2.0
"""Actions that name joint positions: their goals, and motion to them within the limits of joints, tool and workspace.

Joint policies are what people train on SO-101, ALOHA and with openpi: an action is a position of each joint, absolute
or as a displacement from where the joints were in the image. It is followed without inverse kinematics, so a redundant
arm takes the posture that the policy learnt.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ruckig import Trajectory

from specvla_ros.control.action_space import ActionRefusedError, ActionSpace, RefusalReason
from specvla_ros.control.bounded_motion import Axes, Legs, Onward, State, Target, sampled
from specvla_ros.control.convention import GRIPPER, ActionFrame, Reference, StampedAction
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Posture
from specvla_ros.control.robot_model import JointModel, ToolKinematics
from specvla_ros.errors import UserError

_FOLLOWING, _NEAR = 0.2, 0.02  # rad or m, as the tool's rotation
_TOLERANCE_M = 1e-4
_SLOWER = 1.05  # factor on the time that a tool above its speed limit needs: its path is sampled
_ROUNDING = 1e-9  # of a share of the speed limits
_TRIES = 10
# Share of its speed limit that a fast tool may have: a factor on that of braking, and its maximum.
_BRAKING_MARGIN, _MAX_OVERSPEED = 1.02, 1.04


class JointKinematics(ToolKinematics):
    """Joint targets as commands, and where the tool is at them; see `inverse_kinematics.JointSolver`."""

    def __init__(self, robot: JointModel) -> None:
        super().__init__(robot)
        self.positions = np.zeros(len(robot.joints))  # commanded last
        self._velocities = np.zeros(len(robot.joints))

    def start(self, positions: Mapping[str, float]) -> None:
        """Starts at measured joint positions; raises UserError if one is missing or outside the joint's range."""
        self.positions = self._in_range(positions)

    def follow(self, target: Target[Posture]) -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities of the joints, float64 [n] each."""
        self.positions, self._velocities = target.pose.positions, target.velocity
        return self.positions, self._velocities

    def resume(
        self, positions: np.ndarray, velocities: np.ndarray, accelerations: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The state that `plan` begins at: that of the last target, wherever the joints are."""
        return self.positions, self._velocities

    def plan(self, targets: Sequence[Target[Posture]]) -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities of the joints at coming targets, float64 [targets, n] each."""
        positions = [target.pose.positions for target in targets]
        return np.array(positions), np.array([target.velocity for target in targets])

    def place_of(self, positions: Mapping[str, float]) -> Posture:
        """The measured joints in the order of the commands; raises UserError if one is missing or out of its range."""
        return Posture(self._in_range(positions))


@dataclass(frozen=True)
class JointSpace(ActionSpace[Posture]):
    """Postures of an arm. An action that moves a joint by more than `max_step_rad` from one row to the next is refused.

    The first row counts from the posture in the image, also for absolute positions: otherwise the arm would leap at
    degrees that are taken for radians, or at another arm's action.
    """

    arm: JointKinematics
    limits: Limits
    max_step_rad: float = np.pi
    what: str = "set of joint positions"

    def check(self, action: StampedAction) -> None:
        values, names, joints = action.values, action.names, self.arm.joints
        if action.convention.frame is not ActionFrame.JOINTS:
            detail = "its values move the tool, but this driver follows joints: set action_space to tool"
            raise ActionRefusedError(RefusalReason.WRONG_SPACE, detail)
        if values.ndim != 2 or not len(values) or values.shape[1] != len(names):
            detail = f"expected values of shape [horizon, {len(names)}], got {values.shape}"
            raise ActionRefusedError(RefusalReason.WRONG_SHAPE, detail)
        twice = [name for name, count in Counter(names).items() if count > 1]
        missing = [name for name in joints if name not in names]
        unknown = [name for name in names if name not in joints and name != GRIPPER]
        found = zip(("twice", "not at all", "though joints.names lacks them"), (twice, missing, unknown), strict=True)
        if problems := [f"{', '.join(which)} {how}" for how, which in found if which]:
            detail = f"it gives {'; '.join(problems)}; its names must be those of joints.names: {', '.join(joints)}"
            raise ActionRefusedError(RefusalReason.WRONG_SHAPE, detail)

    def goals(self, action: StampedAction, begin: Posture) -> list[Posture]:
        """Displacements all count from the posture in the image; goals beyond a joint's range end at it."""
        columns = [action.names.index(name) for name in self.arm.joints]
        wanted = action.values[:, columns]
        if action.convention.reference is Reference.DELTA:
            wanted = begin.positions + wanted
        steps = np.abs(np.diff(np.vstack([begin.positions, wanted]), axis=0))
        if steps.max() > self.max_step_rad:
            row, joint = np.unravel_index(steps.argmax(), steps.shape)
            start = "the joints in its image" if row == 0 else f"row {row - 1}"
            detail = (
                f"row {row} moves '{self.arm.joints[joint]}' by {steps.max():.3f} from {start}, and the limit is "
                f"{self.max_step_rad:g} (max_step_rad); are its values in the robot's unit?"
            )
            raise ActionRefusedError(RefusalReason.TOO_LARGE, detail)
        return [Posture(row) for row in np.clip(wanted, *self.arm.ranges.T)]

    def grippers(self, action: StampedAction) -> Sequence[float | None]:
        if GRIPPER in self.arm.joints or GRIPPER not in action.names:
            return [None] * len(action.values)
        return action.values[:, action.names.index(GRIPPER)].tolist()

    def pace(self, action: StampedAction, goals: Sequence[Posture]) -> tuple[float, float] | None:
        if len(goals) < 2:
            return None  # the distance of a single goal from its image does not tell a speed
        fastest = max(one.distance(other)[1] for one, other in pairwise(goals))
        return 0.0, fastest / action.convention.dt_s

    def follows(self, sent: Posture, measured: Posture) -> bool:
        return sent.distance(measured)[1] <= _FOLLOWING

    def away(self, target: Posture, measured: Posture) -> bool:
        return target.distance(measured)[1] > _NEAR

    def motion(self, target: Target[Posture], measured: Posture) -> dict[str, str]:
        speed, away = float(np.abs(target.velocity).max()), target.pose.distance(measured)[1]
        return {"fastest joint rad/s": f"{speed:.3f}", "from target rad": f"{away:.4f}"}

    def start_problem(self, measured: Posture) -> str:
        return self.limits.start_problem(self.arm.pose_at(measured.positions).position, " by its joints")


class JointMotion:
    """Moves an arm's joints from goal to goal within the limits of the joints, the tool's speed and the workspace.

    It comes to rest at each goal unless a newer one arrives. All times are seconds on one clock, which never goes back
    between calls. See `bounded_motion.BoundedMotion`; `move_s` and the first pace are ignored.

    Raises UserError for a missing limit.
    """

    def __init__(self, arm: JointKinematics, robot: JointModel, limits: Limits) -> None:
        limits.require("motion")
        if robot.max_acceleration is None or robot.max_jerk is None:
            raise UserError(
                "action_space: joints needs joints.max_acceleration, which no robot description contains: take it from "
                "the arm's data sheet or MoveIt's joint_limits.yaml"
            )
        self._arm, self._limits = arm, limits
        self._axes = Axes(robot.max_speed, robot.max_acceleration, robot.max_jerk, math.inf)

    def rest_at(self, pose: Posture) -> None:
        self._axes.rest_at(pose.positions.copy())

    def at(self, now_s: float) -> Target[Posture]:
        state = self._axes.at(now_s)
        return Target(Posture(state.position), state.velocity)

    def brake(self, now_s: float) -> None:
        self._axes.stop(now_s)

    def copy(self) -> "JointMotion":
        other = copy(self)
        other._axes = copy(self._axes)
        return other

    def aim(
        self,
        goal: Posture,
        now_s: float,
        *,
        move_s: float = 0.0,
        turn_s: float,
        pace: tuple[float, float] = (math.inf, math.inf),
        onward: Onward[Posture] = None,
    ) -> bool:
        """Plans the motion to a goal; False if every one leaves the workspace, and the previous one then continues."""
        start, rest = self._axes.at(now_s), np.zeros_like(goal.positions)
        passing = rest if onward is None else (onward[0].positions - goal.positions) / onward[1]
        # A slow motion may swing out further than the fastest one, which brakes immediately.
        for seconds, velocity in ((turn_s, passing), (turn_s, rest), (0.0, rest)):
            legs = self._within_speed(goal.positions, start, seconds, velocity, pace[1])
            if legs and self._stays(legs, start.position):
                self._axes.follow(now_s, legs)
                return True
        return False

    def _within_speed(self, goal: np.ndarray, start: State, seconds: float, velocity: np.ndarray, pace: float) -> Legs:
        """Legs in which the tool keeps its speed limits: slower ones where the joints' limits alone do not do it.

        A tool that is already at its limit may exceed it a little on the way to any goal, as when it brakes.
        """
        allowed = 1.0
        for number in range(_TRIES):
            legs = self._axes.to(goal, start, seconds, velocity, pace)
            share = max(map(self._speed_share, legs), default=0.0)
            if share <= allowed * (1 + _ROUNDING):  # ever slower legs approach the limit: rounding must not decide
                return legs
            if number == 0:
                braking = max(map(self._speed_share, self._axes.brake(start)), default=0.0)
                allowed = min(max(1.0, _BRAKING_MARGIN * braking), _MAX_OVERSPEED)
            seconds, velocity = _SLOWER * share * legs[0].duration, velocity / share
        return ()

    def _speed_share(self, leg: Trajectory) -> float:
        """The tool's fastest motion along a leg, as a fraction of its limits."""
        poses = [self._arm.pose_at(positions) for positions in sampled([leg])]
        ways = np.linalg.norm(np.diff([pose.position for pose in poses], axis=0), axis=1)
        turns = np.linalg.norm(np.diff([pose.rotation for pose in poses], axis=0), axis=(1, 2)) / math.sqrt(2)
        step_s = max(leg.duration, 1e-9) / len(ways)
        limits = self._limits
        return float(max(ways.max() / limits.linear_speed, turns.max() / limits.angular_speed) / step_s)

    def _stays(self, legs: Legs, start: np.ndarray) -> bool:
        """True if the tool stays in the workspace or, from a start outside, goes no further out."""
        low, high = self._limits.widened(self._arm.pose_at(start).position, _TOLERANCE_M)
        places = np.array([self._arm.pose_at(positions).position for positions in sampled(legs)])
        return bool((places >= low).all() and (places <= high).all())
