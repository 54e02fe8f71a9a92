# SPDX-License-Identifier: Apache-2.0
"""The simulated table: physics, the arm's control, state and images.

The arm's convention is robosuite's OSC_POSE, which LIBERO uses too: three translations (±1 is ±0.05 m) and three
rotations (axis-angle, ±1 is ±0.5 rad) per control step in the base frame, then the gripper (+1 closes, -1 opens), at
20 Hz.
"""

import atexit
import logging
import weakref
from collections.abc import Callable

import mujoco
import numpy as np

from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation import require_gl
from specvla_ros.lab.simulation.arm import TABLE_ARM, Arm, joint_indices
from specvla_ros.lab.simulation.tasks import CUBES, DISTRACTORS, Layout, WorldState

_log = logging.getLogger(__name__)
# Otherwise MuJoCo writes its warnings to a file in the working directory.
mujoco.set_mju_user_warning(lambda message: _log.warning("MuJoCo: %s", message))

FRONT_CAMERA = "front"
POSITION_SCALE_M, ROTATION_SCALE_RAD = 0.05, 0.5
SCALE = np.array([POSITION_SCALE_M] * 3 + [ROTATION_SCALE_RAD] * 3)
CONTROL_HZ = 20
_STIFFNESS = 1500.0  # [1/s²]; critically damped: the hand lags its goal by 50 ms
_NULLSPACE_STIFFNESS = 20.0
# Maximum lead of the goal over the hand: against an obstacle the goal must not run away and then jump.
_LEAD_M, _LEAD_RAD = 0.06, 0.4
_OFF_TABLE_M = 5.0
_MOVABLE = (*CUBES, "block", *DISTRACTORS)


class SimulationDiverged(RuntimeError):
    """The physics produced a non-finite value; the episode is void."""


class OscPose:
    """Operational-space control: moves the pinch site to `goal`, which each control step displaces within reach.

    Torques follow Khatib (1987), "A unified approach for motion and force control of robot manipulators", section III:
    the task-space inertia decouples the directions.
    """

    def __init__(self, model: mujoco.MjModel, arm: Arm) -> None:
        self._model = model
        self._low, self._high = np.array(arm.low), np.array(arm.high)
        self._site = model.site("pinch").id
        self._positions, self._dofs = joint_indices(model, arm.joints)
        self._limit = np.array([model.actuator(name).ctrlrange[1] for name in arm.motors])
        self._arm_controls = np.array([model.actuator(name).id for name in arm.motors])
        self._fingers = np.array([model.actuator(name).id for name in arm.gripper.actuators])
        self._open, self._closed = np.array(arm.gripper.open), np.array(arm.gripper.closed)
        self._jacobian = np.zeros((6, model.nv))
        self._inertia = np.zeros((model.nv, model.nv))

    def reset(self, data: mujoco.MjData) -> None:
        """Sets the goal to the current pose and opens the gripper."""
        self.goal = Pose(data.site_xpos[self._site].copy(), data.site_xmat[self._site].reshape(3, 3).copy())
        self._rest = data.qpos[self._positions].copy()
        data.ctrl[self._fingers] = self._open

    def displace(self, data: mujoco.MjData, action: np.ndarray) -> None:
        """Moves the goal by one control step's action, float [7], clipped to [-1, 1]."""
        action = np.clip(action, -1.0, 1.0)
        goal = self.goal.displaced(SCALE * action[:6])
        position = data.site_xpos[self._site]
        lead = np.clip(goal.position, position - _LEAD_M, position + _LEAD_M)
        rotation = data.site_xmat[self._site].reshape(3, 3)
        turn = rotation_vector(goal.rotation @ rotation.T)
        size = np.linalg.norm(turn)
        wanted = rotation_matrix(turn * (_LEAD_RAD / size)) @ rotation if size > _LEAD_RAD else goal.rotation
        self.goal = Pose(np.clip(lead, self._low, self._high), wanted)
        data.ctrl[self._fingers] = self._closed if action[6] > 0 else self._open

    def apply(self, data: mujoco.MjData) -> None:
        """Sets the arm's torques for the next physics step."""
        model, jacobian = self._model, self._jacobian
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], self._site)
        mujoco.mj_fullM(model, self._inertia, data.qM)
        j = jacobian[:, self._dofs]
        inertia = self._inertia[np.ix_(self._dofs, self._dofs)]
        velocity = data.qvel[self._dofs]
        inverse_j = np.linalg.solve(inertia, j.T)
        task_inertia = np.linalg.inv(j @ inverse_j + 1e-6 * np.eye(6))
        rotation = data.site_xmat[self._site].reshape(3, 3)
        error = np.concatenate(
            [self.goal.position - data.site_xpos[self._site], rotation_vector(self.goal.rotation @ rotation.T)]
        )
        force = task_inertia @ (_STIFFNESS * error - 2 * _STIFFNESS**0.5 * (j @ velocity))
        posture = _NULLSPACE_STIFFNESS * (self._rest - data.qpos[self._positions])
        posture -= 2 * _NULLSPACE_STIFFNESS**0.5 * velocity
        free = inertia @ (posture - inverse_j @ (task_inertia @ (j @ posture)))
        torque = j.T @ force + free + data.qfrc_bias[self._dofs]
        data.ctrl[self._arm_controls] = np.clip(torque, -self._limit, self._limit)


class World:
    """One table with one arm; not thread-safe.

    Raises UserError if the package with the arm's model is missing, or if MuJoCo cannot compile the model.
    """

    def __init__(self, arm: Arm = TABLE_ARM) -> None:
        self.arm = arm
        self.model = arm.model()
        # Otherwise a diverged world silently resets to its initial state.
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self.data = mujoco.MjData(self.model)
        self._osc = OscPose(self.model, arm)
        self._camera = self.model.camera(FRONT_CAMERA)
        self._camera_position = self._camera.pos.copy()
        self._camera_quaternion = self._camera.quat.copy()

    @property
    def time_s(self) -> float:
        return float(self.data.time)

    def reset(self, layout: Layout) -> None:
        mujoco.mj_resetData(self.model, self.data)
        for name, value in zip(self.arm.joint_names, (*self.arm.home, *self.arm.gripper.open), strict=True):
            self.data.joint(name).qpos = value
        for body in _MOVABLE:
            self._place(body, layout.poses.get(body, (_OFF_TABLE_M + len(body), 0.0, -0.4, 0.0)))
        self._dress(layout)
        mujoco.mj_forward(self.model, self.data)
        self._osc.reset(self.data)
        if layout.hand is not None:
            self._move_hand_to(layout.hand)
        self.data.time = 0.0

    def control_step(self, action: np.ndarray) -> None:
        """Runs one OSC_POSE step of 50 ms; `action` is float [7] in [-1, 1], see the module's docstring."""
        if not np.isfinite(action).all():
            raise SimulationDiverged("the arm was given an action that is not finite")
        self._osc.displace(self.data, action)
        self.advance(self._osc.apply, 1.0 / CONTROL_HZ)

    def advance(self, apply: Callable[[mujoco.MjData], None], seconds: float) -> None:
        """Advances the physics; `apply` sets the motors before each physics step."""
        for _ in range(round(seconds / self.model.opt.timestep)):
            apply(self.data)
            mujoco.mj_step(self.model, self.data)
        if not (np.isfinite(self.data.qpos).all() and np.isfinite(self.data.qvel).all()):
            raise SimulationDiverged(f"the physics diverged at {self.time_s:.2f} s")

    @property
    def goal(self) -> Pose:
        return self._osc.goal

    def tool(self) -> Pose:
        """The tool's pose in the base frame."""
        site = self.data.site("pinch")
        return Pose(site.xpos.copy(), site.xmat.reshape(3, 3).copy())

    def state(self) -> WorldState:
        tool = self.tool()
        return WorldState(
            hand=tool.position,
            rotation=tool.rotation,
            opening=self.opening(),
            positions={body: self.data.body(body).xpos.copy() for body in _MOVABLE},
            yaws={body: float(np.arctan2(*self.data.body(body).xmat[[3, 0]])) for body in _MOVABLE},
        )

    def joint_state(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities, float64 [joints] each, in the order of the arm's `joint_names`: rad or metres."""
        joints = [self.data.joint(name) for name in self.arm.joint_names]
        return np.array([j.qpos[0] for j in joints]), np.array([j.qvel[0] for j in joints])

    def opening(self) -> float:
        """The distance between the fingers, metres."""
        left, right = self.arm.gripper.pads
        apart = np.linalg.norm(self.data.geom(left).xpos - self.data.geom(right).xpos)
        return float(apart - self.model.geom(left).size[1] - self.model.geom(right).size[1])

    def _place(self, body: str, pose: tuple[float, float, float, float]) -> None:
        x, y, z, yaw = pose
        quaternion = np.array([np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])
        if body == "block":
            self.model.body(body).pos[:] = x, y, z
            self.model.body(body).quat[:] = quaternion
            return
        joint = self.model.joint(int(self.model.body(body).jntadr[0]))
        self.data.qpos[joint.qposadr[0] : joint.qposadr[0] + 7] = x, y, z, *quaternion

    def _dress(self, layout: Layout) -> None:
        for name, rgb in layout.colours.items():
            self.model.geom(name).rgba[:3] = rgb
        self._camera.pos[:] = self._camera_position + layout.camera_shift
        turn = np.zeros(4)
        angle = float(np.linalg.norm(layout.camera_turn))
        mujoco.mju_axisAngle2Quat(turn, layout.camera_turn / max(angle, 1e-12), angle)
        mujoco.mju_mulQuat(self._camera.quat, self._camera_quaternion, turn)
        lamp = self.model.light("lamp")
        lamp.dir[:] = layout.lamp_direction / np.linalg.norm(layout.lamp_direction)
        lamp.diffuse[:] = layout.lamp
        self.model.vis.headlight.ambient[:] = layout.ambient

    def _move_hand_to(self, goal: np.ndarray) -> None:
        # Moved by the controller itself, so that the arm starts in a posture that it reaches in use.
        for _ in range(2 * CONTROL_HZ):
            away = goal - self.data.site("pinch").xpos
            self.control_step(np.array([*np.clip(away / 0.05, -0.6, 0.6), 0, 0, 0, -1.0]))
            if np.linalg.norm(away) < 0.004:
                return


def pointing_down(yaw: float) -> np.ndarray:
    """Rotation [3, 3] of a hand that points straight down, with its fingers opening across `yaw`."""
    return rotation_matrix(np.array([0.0, 0.0, yaw])) @ np.diag([1.0, -1.0, -1.0])


def upright_error(rotation: np.ndarray, yaw: float) -> np.ndarray:
    """Rotation vector [3] that turns a hand to point straight down."""
    return rotation_vector(pointing_down(yaw) @ rotation.T)


class Camera:
    """Renders the table's cameras. Only usable in the thread that made it: an OpenGL context cannot be shared."""

    def __init__(self, world: World, width: int, height: int) -> None:
        backend = require_gl()
        self._world = world
        try:
            self._renderer = mujoco.Renderer(world.model, height, width)
        except Exception as error:  # each backend raises its own exceptions
            raise UserError(
                f"MuJoCo cannot render with MUJOCO_GL={backend} ({error}); set MUJOCO_GL to osmesa (CPU) or egl (GPU), "
                "and install libosmesa6 or the GPU's driver"
            ) from None
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._free = weakref.finalize(self, _free, self._renderer)
        # The OpenGL library registered its exit handler when MuJoCo was imported, so it runs after this one. MuJoCo
        # would free the renderer only after that, and fail.
        atexit.register(self._free)

    def render(self, name: str = FRONT_CAMERA) -> np.ndarray:
        """A camera's current image, uint8 [height, width, 3], RGB."""
        self._renderer.update_scene(self._world.data, name)
        return self._renderer.render().copy()

    def close(self) -> None:
        self._free()


def _free(renderer: mujoco.Renderer) -> None:
    # Rendering makes this camera's context current. Freeing under another camera's context would delete that camera's
    # textures, and its images would be garbage from then on.
    renderer.render()
    renderer.close()
