# SPDX-License-Identifier: Apache-2.0
"""Joint positions that take a tool to a pose, within the joints' ranges and speeds, by `mink` on the robot's model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from specvla_ros.control.robot_model import JointModel, ToolKinematics
from specvla_ros.errors import missing_package

if TYPE_CHECKING:  # the guard has no ruckig
    from specvla_ros.control.bounded_motion import Target

# A joint_trajectory_controller begins each new trajectory at the measured joints: a point of the present would stay
# behind for ever. So a point lies this far ahead, where the joints get at their present speeds.
TRAJECTORY_AHEAD_S = 0.06
_SOLVER = "daqp"
_POSTURE_COST = 1e-3  # against 1 for the tool: what the pose leaves free stays near the posture at the start
_DAMPING = 1e-3
_MAX_LAG_M = 0.05
_MAX_LAG_RAD = 0.3


class JointSolver(ToolKinematics):
    """Follows tool poses with joint positions, one control step at a time; `period_s`: between two that are in time."""

    def __init__(self, robot: JointModel, period_s: float) -> None:
        try:
            import mink
        except ModuleNotFoundError as error:
            raise missing_package(error, "requirements/robot-joints.txt") from None
        super().__init__(robot)
        self._period_s = period_s
        model = robot.model
        self._configuration = mink.Configuration(model)
        self._tool = mink.FrameTask(robot.tool, robot.tool_kind, 1.0, 1.0, lm_damping=_DAMPING)
        self._posture = mink.PostureTask(model, _POSTURE_COST)
        # What is no joint of the arm stands still: mink's limits take a speed of zero as an equality.
        free = [dof for dof in range(model.nv) if dof not in set(self._dofs.tolist())]
        self._still = mink.DofFreezingTask(model, free) if free else None
        speeds = {name: np.array([speed]) for name, speed in zip(robot.in_model, robot.max_speed, strict=True)}
        self._limits = [mink.ConfigurationLimit(model), mink.VelocityLimit(model, speeds)]

    @property
    def positions(self) -> np.ndarray:
        """float64 [n], where the joints were sent last."""
        at: np.ndarray = self._configuration.q[self._addresses].copy()
        return at

    @property
    def max_speed(self) -> np.ndarray:  # float64 [n]
        return self._robot.max_speed

    def start(self, positions: Mapping[str, float]) -> None:
        """Begins at measured joint positions; raises UserError where one is missing or out of the joint's range."""
        q = self._configuration.q.copy()
        q[self._addresses] = self._in_range(positions)
        self._configuration.update(q)
        self._posture.set_target(q)

    def follow(self, target: "Target") -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities of the joints, float64 [n] each, one control step towards a target's pose.

        The step takes as long as the target's motion did, whatever the loop's period: in a late loop the target has
        gone further, and a velocity over one period would be too high. The pose is in the model's world frame.

        Raises:
            UnreachableError: it is out of reach, or faster than the joints may go.
        """
        import mink

        pose, passed_s = target.pose, target.passed_s or self._period_s
        rotation = mink.SO3.from_matrix(pose.rotation)
        self._tool.set_target(mink.SE3.from_rotation_and_translation(rotation, pose.position))
        try:
            velocity = mink.solve_ik(
                self._configuration,
                [self._tool, self._posture],
                passed_s,
                _SOLVER,
                limits=self._limits,
                constraints=None if self._still is None else [self._still],
            )
        except mink.MinkError as error:
            raise UnreachableError(f"inverse kinematics has no solution: {error}") from None
        self._configuration.integrate_inplace(velocity, passed_s)
        lag = self._tool.compute_error(self._configuration)
        lag_m, lag_rad = float(np.linalg.norm(lag[:3])), float(np.linalg.norm(lag[3:]))
        if lag_m > _MAX_LAG_M or lag_rad > _MAX_LAG_RAD:
            raise UnreachableError(
                f"the joints are {lag_m:.3f} m and {lag_rad:.2f} rad behind the tool's target: it is out of their "
                "reach, or faster than joints.max_speed allows"
            )
        return self.positions, velocity[self._dofs]


def trajectory_point(positions: np.ndarray, velocities: np.ndarray) -> np.ndarray:
    """Where joints get to within TRAJECTORY_AHEAD_S; float64 [n] each, the joints' present targets."""
    ahead: np.ndarray = positions + TRAJECTORY_AHEAD_S * velocities
    return ahead


class UnreachableError(RuntimeError):
    """The joints cannot follow the tool's target."""
