# SPDX-License-Identifier: Apache-2.0
"""Inverse kinematics: joint positions for a tool pose, within the joints' limits, by `mink` on the robot's model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import JointModel, ToolKinematics
from specvla_ros.errors import missing_package

if TYPE_CHECKING:  # the guard has no ruckig
    from specvla_ros.control.bounded_motion import Target

# A joint_trajectory_controller starts each new trajectory at the measured joints: a point for the current time would
# always lag. So points lie this far ahead, extrapolated with the current joint speeds.
TRAJECTORY_AHEAD_S = 0.06
_SOLVER = "daqp"
# Costs against 1 for the tool's error. Redundant joints return to the initial posture, slowly; where a joint is at its
# limit of acceleration, the others would otherwise swing around it for a millimetre of the tool, and a stop of swinging
# joints moves the tool.
_POSTURE_COST, _MOTION_COST = 5e-3, 2e-2
_DAMPING = 1e-3
_GAIN = 6.0  # 1/s, error correction of acceleration-limited joints, as for tool velocities
_MAX_LAG_M = 0.05
_MAX_LAG_RAD = 0.3


class JointSolver(ToolKinematics):
    """Follows tool poses with joint positions, one control step at a time; `period_s`: nominal time between two."""

    def __init__(self, robot: JointModel, period_s: float) -> None:
        try:
            import mink
        except ModuleNotFoundError as error:
            raise missing_package(error, "requirements/robot-joints.txt") from None
        super().__init__(robot)
        self._robot, self._period_s = robot, period_s
        self._ahead: JointSolver | None = None  # solves for coming targets
        model = robot.model
        self._configuration = mink.Configuration(model)
        self._tool = mink.FrameTask(robot.tool, robot.tool_kind, 1.0, 1.0, lm_damping=_DAMPING)
        # Returning to the posture in one step oscillates about it if the joints cannot brake in one step.
        share = 1.0 if robot.max_acceleration is None else _GAIN * period_s
        self._posture = mink.PostureTask(model, _POSTURE_COST, gain=share)
        self._slow = mink.DampingTask(model, _MOTION_COST)
        # Joints outside the arm stand still; mink's limits take a speed of zero as an equality.
        free = [dof for dof in range(model.nv) if dof not in set(self._dofs.tolist())]
        self._still = mink.DofFreezingTask(model, free) if free else None
        speeds = {name: np.array([speed]) for name, speed in zip(robot.in_model, robot.max_speed, strict=True)}
        self._limits: list[Any] = [mink.ConfigurationLimit(model), mink.VelocityLimit(model, speeds)]
        self._bounds: _VelocityBounds | None = None
        if robot.max_acceleration is not None:
            self._bounds = _VelocityBounds(robot, self.ranges, self._addresses, self._dofs)
            self._limits = [self._bounds]
        self.positions = self._configuration.q[self._addresses].copy()  # float64 [n], last commanded positions

    def start(self, positions: Mapping[str, float]) -> None:
        """Starts at measured joint positions; raises UserError if one is missing or outside the joint's range."""
        q, self.positions = self._configuration.q.copy(), self._in_range(positions)
        q[self._addresses] = self.positions
        self._configuration.update(q)
        if self._bounds is not None:
            self._bounds.rest()
        self._posture.set_target(q)
        self._began = q

    def resume(
        self, positions: np.ndarray, velocities: np.ndarray, accelerations: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Continues from joints in motion, float64 [n] each; returns the state that `plan` begins at.

        The solution for a tool pose depends on the steps taken: from the last command it could lead away from them.
        """
        q, self.positions = self._configuration.q.copy(), positions
        q[self._addresses] = positions
        self._configuration.update(q)
        if self._bounds is not None:
            self._bounds.resume(velocities, accelerations)
        return positions, velocities

    def plan(self, targets: "Sequence[Target[Pose]]") -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities of the joints at coming targets, float64 [targets, n] each; see `follow`."""
        ahead = self._ahead or JointSolver(self._robot, self._period_s)
        ahead._configuration.update(self._configuration.q.copy())
        ahead._posture.set_target(self._began)
        if self._bounds is not None and ahead._bounds is not None:
            ahead._bounds.resume(*self._bounds.state)
        ahead.positions, self._ahead = self.positions, ahead
        followed = [ahead.follow(target) for target in targets]
        return np.array([positions for positions, _ in followed]), np.array([moving for _, moving in followed])

    def place_of(self, positions: Mapping[str, float]) -> Pose:
        """The tool's pose at measured joints; raises UserError if one is missing or outside its range."""
        return self.pose_of(positions)

    def follow(self, target: "Target[Pose]") -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities of the joints, float64 [n] each, one control step towards a target's pose.

        The step takes as long as the target's motion, not the loop's period: in a late loop the target has moved
        further, and a velocity over one period would be too high. The pose is in the model's world frame.

        Raises:
            UnreachableError: the pose is out of reach, or moves faster than the joints may.
        """
        import mink

        passed_s = target.passed_s or self._period_s
        aim = target.pose if self._bounds is None else self._aim(target, passed_s)
        rotation = mink.SO3.from_matrix(aim.rotation)
        self._tool.set_target(mink.SE3.from_rotation_and_translation(rotation, aim.position))
        try:
            velocity = mink.solve_ik(
                self._configuration,
                [self._tool, self._posture, self._slow],
                passed_s,
                _SOLVER,
                limits=self._limits,
                constraints=None if self._still is None else [self._still],
            )
        except mink.MinkError as error:
            raise UnreachableError(f"inverse kinematics has no solution: {error}") from None
        self._configuration.integrate_inplace(velocity, passed_s)
        self.positions = np.clip(self._configuration.q[self._addresses], *self.ranges.T)
        velocities: np.ndarray = velocity[self._dofs]
        if self._bounds is not None:
            self._bounds.moved(velocities, passed_s)
        lag_m, lag_rad = self.pose_at(self.positions).distance(target.pose)
        if lag_m > _MAX_LAG_M or lag_rad > _MAX_LAG_RAD:
            raise UnreachableError(
                f"the joints are {lag_m:.3f} m and {lag_rad:.2f} rad behind the tool's target: it is out of their "
                "reach, or faster than joints.max_speed and joints.max_acceleration allow"
            )
        return self.positions, velocities

    def _aim(self, target: "Target[Pose]", passed_s: float) -> Pose:
        """The tool's pose after a step. Errors are corrected gradually: otherwise the joints could not brake."""
        here, goes = self.pose_at(self.positions), target.velocity * passed_s
        return here.displaced(goes + _GAIN * passed_s * (here.way_to(target.pose) - goes))


class _VelocityBounds:
    """Velocity limits of the next step, for mink: from speed, acceleration, jerk, and braking before a range's end.

    Speed limits alone let the velocity jump when a joint reaches its own: by 200 rad/s² for a Panda held to 1 rad/s.
    """

    def __init__(self, robot: JointModel, ranges: np.ndarray, addresses: np.ndarray, dofs: np.ndarray) -> None:
        assert robot.max_acceleration is not None and robot.max_jerk is not None
        self._speed, self._acceleration, self._jerk = robot.max_speed, robot.max_acceleration, robot.max_jerk
        (self._low, self._high), self._addresses = ranges.T, addresses
        one_each = np.eye(robot.model.nv)[dofs]
        self._sides = np.vstack([one_each, -one_each])
        self.rest()

    def rest(self) -> None:
        self._velocity = self._accelerating = np.zeros(len(self._speed))

    @property
    def state(self) -> tuple[np.ndarray, np.ndarray]:
        """Velocities and accelerations of the last step, float64 [n] each."""
        return self._velocity, self._accelerating

    def resume(self, velocity: np.ndarray, acceleration: np.ndarray) -> None:
        """Continues from a step's velocities and accelerations."""
        self._velocity, self._accelerating = velocity, acceleration

    def moved(self, velocity: np.ndarray, passed_s: float) -> None:
        self._accelerating, self._velocity = (velocity - self._velocity) / passed_s, velocity

    def compute_qp_inequalities(self, configuration: Any, dt: float) -> Any:
        """Bounds of the joints' displacements within a step; see `mink.Limit`."""
        import mink

        at = configuration.q[self._addresses]
        most = self._fastest(self._velocity, self._accelerating, self._high - at, dt)
        least = -self._fastest(-self._velocity, -self._accelerating, at - self._low, dt)
        return mink.Constraint(G=self._sides, h=np.concatenate([np.maximum(most, least), -least]) * dt)

    def _fastest(self, velocity: np.ndarray, acceleration: np.ndarray, room: np.ndarray, dt: float) -> np.ndarray:
        """Maximum forward velocity, float64 [n]; `room`: distance to the range's end."""
        jerk, limit = self._jerk, self._acceleration
        gap = np.maximum(self._speed - velocity, 0.0)
        room = np.maximum(room - np.maximum(velocity, 0.0) * limit / jerk, 0.0)  # left once braking is in full effect
        # From the next step, the acceleration must be able to fall to zero before the speed limit is reached.
        max_rise_to_speed_limit = jerk * (np.sqrt((1.5 * dt) ** 2 + 2 * gap / jerk) - 1.5 * dt)
        max_rise = np.minimum(np.minimum(limit, acceleration + jerk * dt), max_rise_to_speed_limit)
        ends = np.minimum(np.sqrt(limit * room), room / dt)
        min_rise = np.maximum(-limit, acceleration - jerk * dt)
        return np.maximum(np.minimum(np.minimum(velocity + max_rise * dt, self._speed), ends), velocity + min_rise * dt)


def trajectory_point(positions: np.ndarray, velocities: np.ndarray) -> np.ndarray:
    """Positions in TRAJECTORY_AHEAD_S, extrapolated from the joints' current targets, float64 [n] each."""
    ahead: np.ndarray = positions + TRAJECTORY_AHEAD_S * velocities
    return ahead


def kept_in(low: np.ndarray, high: np.ndarray, positions: np.ndarray, velocities: np.ndarray) -> np.ndarray:
    """Velocities, float64 [n], whose `trajectory_point` stays between `low` and `high`; a joint outside may move back.

    A joint that still brakes before the end of its range would otherwise be sent beyond it for a moment.
    """
    low, high = np.minimum(low, positions), np.maximum(high, positions)
    kept: np.ndarray = np.clip(
        velocities, (low - positions) / TRAJECTORY_AHEAD_S, (high - positions) / TRAJECTORY_AHEAD_S
    )
    return kept


class UnreachableError(RuntimeError):
    """The joints cannot follow the tool's target."""
