# SPDX-License-Identifier: Apache-2.0
"""Joint positions that take a tool to a pose, within the joints' ranges and speeds, by `mink` on the robot's model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specvla_ros.control.limits import Joints
from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import RobotModel, load_robot_model
from specvla_ros.errors import UserError, missing_package

if TYPE_CHECKING:  # only joint outputs need them: a robot that takes poses or twists has neither, nor has the guard
    import mujoco

    from specvla_ros.control.bounded_motion import Target

# A joint_trajectory_controller begins each new trajectory at the measured joints: a point of the present would stay
# behind for ever. So a point lies this far ahead, where the joints get at their present speeds.
TRAJECTORY_AHEAD_S = 0.06
_SOLVER = "daqp"
_POSTURE_COST = 1e-3  # against 1 for the tool: what the pose leaves free stays near the posture at the start
_DAMPING = 1e-3
_MAX_LAG_M = 0.05
_MAX_LAG_RAD = 0.3
_SAME_POINT_M, _SAME_POINT_RAD = 0.005, 0.03


@dataclass(frozen=True)
class JointModel:
    """A robot's kinematics."""

    model: "mujoco.MjModel"  # compiled MJCF or URDF
    joints: tuple[str, ...]  # names of the arm's joints, in the order of the commands
    tool: str  # name of the tool's site, or body where no site has that name
    max_speed: np.ndarray  # float64 [n], rad/s or m/s of each joint
    model_names: tuple[str, ...] = ()  # of the same joints in the model; empty: as `joints`

    @property
    def in_model(self) -> tuple[str, ...]:
        return self.model_names or self.joints

    @property
    def tool_kind(self) -> str:
        """What `tool` names: site or body."""
        import mujoco

        return "site" if mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, self.tool) >= 0 else "body"


def load_joint_model(joints: Joints, tool: str) -> JointModel:
    """The kinematics of `joints.model`, within the limits that are given; see `JointModel`.

    Raises:
        UserError: the file cannot be read, or has no such joint or tool, with those that it has; a limit is missing.
    """
    try:
        import mink  # noqa: F401 (what follows the poses)
        import mujoco
    except ModuleNotFoundError as error:
        raise missing_package(error, "requirements/robot-joints.txt") from None
    robot = load_robot_model(Path(joints.model).expanduser())
    model, names = robot.model, joints.in_model
    robot.require(names)
    for name in names:
        if model.joint(name).type[0] not in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
            raise UserError(
                f"joint '{name}' of {robot.path} neither turns nor slides: it cannot be commanded as one number"
            )
    made = JointModel(model, joints.names, tool, _speeds(joints, robot), names)
    if mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, tool) < 0 and made.tool_kind == "body":
        sites = [model.site(index).name for index in range(model.nsite)]
        bodies = [model.body(index).name for index in range(model.nbody)]
        raise UserError(
            f"{robot.path} has no site or body '{tool}'; sites: {', '.join(sites) or 'none'}; bodies: "
            f"{', '.join(bodies)}"
        )
    if joints.has_positions:
        joints.require_positions("joints.model")
        for name, *ends in zip(names, joints.position_min, joints.position_max, strict=True):
            model.joint(name).range, model.jnt_limited[model.joint(name).id] = ends, True
    return made


def _speeds(joints: Joints, robot: RobotModel) -> np.ndarray:
    """Largest speed of each joint, float64 [n]: as given, or the model's."""
    speeds = joints.max_speed
    if not any(speeds):
        speeds = tuple(robot.max_speed.get(name, 0.0) for name in joints.in_model)
    if len(speeds) not in (1, len(joints.names)):
        raise UserError(f"joints.max_speed has {len(speeds)} numbers for {len(joints.names)} joints; give one for each")
    if min(speeds) <= 0:
        raise UserError(
            "joints.max_speed must be set, larger than 0, or joints.model be a URDF with <limit velocity> for every "
            "joint: a joint's limit has no default"
        )
    return np.broadcast_to(speeds, len(joints.names)).astype(np.float64)


class JointSolver:
    """Follows tool poses with joint positions, one control step at a time; `period_s`: between two that are in time."""

    def __init__(self, robot: JointModel, period_s: float) -> None:
        import mink

        self._robot, self._period_s = robot, period_s
        model = robot.model
        self._configuration = mink.Configuration(model)
        self._measured = mink.Configuration(model)
        self._positions = np.array([model.joint(name).qposadr[0] for name in robot.in_model])
        self._dofs = np.array([model.joint(name).dofadr[0] for name in robot.in_model])
        self._tool = mink.FrameTask(robot.tool, robot.tool_kind, 1.0, 1.0, lm_damping=_DAMPING)
        self._posture = mink.PostureTask(model, _POSTURE_COST)
        # What is no joint of the arm stands still: mink's limits take a speed of zero as an equality.
        free = [dof for dof in range(model.nv) if dof not in set(self._dofs.tolist())]
        self._still = mink.DofFreezingTask(model, free) if free else None
        speeds = {name: np.array([speed]) for name, speed in zip(robot.in_model, robot.max_speed, strict=True)}
        self._limits = [mink.ConfigurationLimit(model), mink.VelocityLimit(model, speeds)]

    @property
    def ranges(self) -> np.ndarray:
        """float64 [n, 2], the joints' smallest and largest positions; infinite where the model has none."""
        joints = [self._robot.model.joint(name) for name in self._robot.in_model]
        return np.array([joint.range if joint.limited[0] else (-np.inf, np.inf) for joint in joints])

    @property
    def positions(self) -> np.ndarray:
        """float64 [n], where the joints were sent last."""
        at: np.ndarray = self._configuration.q[self._positions].copy()
        return at

    @property
    def max_speed(self) -> np.ndarray:  # float64 [n]
        return self._robot.max_speed

    def start(self, positions: Mapping[str, float]) -> None:
        """Begins at measured joint positions; raises UserError where one is missing or out of the joint's range."""
        q = self._configured(positions)
        self._configuration.update(q)
        self._posture.set_target(q)

    def pose_of(self, positions: Mapping[str, float]) -> Pose:
        """The tool's pose at joint positions, in the model's world frame; raises UserError as `start` does."""
        self._measured.update(self._configured(positions))
        transform = self._measured.get_transform_frame_to_world(self._robot.tool, self._robot.tool_kind)
        return Pose(transform.translation().copy(), transform.rotation().as_matrix().copy())

    def mismatch(self, positions: Mapping[str, float], tool: Pose) -> str:
        """How the tool's pose at joint positions differs from a measured one, in words; empty: within what sensors do.

        The model's tool must be the point whose pose is measured: else every target is off by what lies between them.
        """
        computed = self.pose_of(positions)
        way_m, turn_rad = computed.distance(tool)
        if way_m <= _SAME_POINT_M and turn_rad <= _SAME_POINT_RAD:
            return ""
        return (
            f"joints.tool '{self._robot.tool}' is at {_text(computed)} by joint_states and the model, but the tool was "
            f"measured at {_text(tool)}: {way_m:.3f} m and {turn_rad:.3f} rad apart; set joints.tool to the point "
            "whose pose is measured, or mend joints.model, joints.names or base_frame"
        )

    def _configured(self, positions: Mapping[str, float]) -> np.ndarray:
        q: np.ndarray = self._configuration.q.copy()
        for name, address, (low, high) in zip(self._robot.joints, self._positions, self.ranges, strict=True):
            if name not in positions:
                raise UserError(f"joint_states has no '{name}'; it has: {', '.join(positions)}")
            value = positions[name]
            if not low - 1e-3 <= value <= high + 1e-3:
                raise UserError(f"joint '{name}' is at {value:g}, out of its range {low:g} to {high:g}")
            q[address] = min(max(value, low), high)
        return q

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


def _text(pose: Pose) -> str:
    x, y, z = pose.position
    return f"({x:.3f}, {y:.3f}, {z:.3f}) m"


def trajectory_point(positions: np.ndarray, velocities: np.ndarray) -> np.ndarray:
    """Where joints get to within TRAJECTORY_AHEAD_S; float64 [n] each, the joints' present targets."""
    ahead: np.ndarray = positions + TRAJECTORY_AHEAD_S * velocities
    return ahead


class UnreachableError(RuntimeError):
    """The joints cannot follow the tool's target."""
