# SPDX-License-Identifier: Apache-2.0
"""The simulated table: physics, state and images."""

import atexit
import logging
import weakref
from collections.abc import Callable

import mujoco
import numpy as np

from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation import require_gl
from specvla_ros.lab.simulation.arms import TABLE_ARM, Arm
from specvla_ros.lab.simulation.osc import CONTROL_HZ, OscPose
from specvla_ros.lab.simulation.tasks import CUBES, DISTRACTORS, Layout, WorldState

_log = logging.getLogger(__name__)
# Otherwise MuJoCo writes its warnings to a file in whatever directory the process runs in.
mujoco.set_mju_user_warning(lambda message: _log.warning("MuJoCo: %s", message))

FRONT_CAMERA = "front"
_OFF_TABLE_M = 5.0
_MOVABLE = (*CUBES, "block", *DISTRACTORS)


class SimulationDiverged(RuntimeError):
    """The physics gave a value that is not finite; the episode is void."""


class World:
    """One table with one arm. Not to be shared between threads.

    Raises:
        UserError: the package with the arm's model is missing, or MuJoCo cannot compile it.
    """

    def __init__(self, arm: Arm = TABLE_ARM) -> None:
        self.arm = arm
        self.model = arm.model()
        # Otherwise a diverged world silently starts again from its first state.
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self.data = mujoco.MjData(self.model)
        self._osc = OscPose(self.model, arm)
        self._camera = self.model.camera(FRONT_CAMERA)
        self._camera_position = self._camera.pos.copy()
        self._camera_quaternion = self._camera.quat.copy()

    @property
    def time_s(self) -> float:
        """Simulated seconds since the reset."""
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
        self._move_hand_to(layout.hand)
        self.data.time = 0.0

    def control_step(self, action: np.ndarray) -> None:
        """One OSC_POSE step of 50 ms: float [7] in [-1, 1], see `osc`."""
        if not np.isfinite(action).all():
            raise SimulationDiverged("an action that is not finite was given to the arm")
        self._osc.displace(self.data, action)
        self.advance(self._osc.apply, 1.0 / CONTROL_HZ)

    def advance(self, apply: Callable[[mujoco.MjData], None], seconds: float) -> None:
        """Lets time pass; `apply` sets the motors before each physics step."""
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
        """Positions and velocities, float64 [joints] each, in the order of the arm's `joint_names`: rad, or metres."""
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
        # By the controller itself, so that the arm's posture is one that it reaches in use.
        for _ in range(2 * CONTROL_HZ):
            away = goal - self.data.site("pinch").xpos
            self.control_step(np.array([*np.clip(away / 0.05, -0.6, 0.6), 0, 0, 0, -1.0]))
            if np.linalg.norm(away) < 0.004:
                return


def upright_error(rotation: np.ndarray, yaw: float) -> np.ndarray:
    """Rotation vector [3] that turns a hand to point straight down with its fingers opening across `yaw`."""
    down = rotation_matrix(np.array([0.0, 0.0, yaw])) @ np.diag([1.0, -1.0, -1.0])
    return rotation_vector(down @ rotation.T)


class Camera:
    """Draws what the table's cameras see. Belongs to the thread that made it: an OpenGL context cannot be shared."""

    def __init__(self, world: World, width: int, height: int) -> None:
        backend = require_gl()
        self._world = world
        try:
            self._renderer = mujoco.Renderer(world.model, height, width)
        except Exception as error:  # each backend raises its own kind
            raise UserError(
                f"MuJoCo cannot draw with MUJOCO_GL={backend} ({error}); set MUJOCO_GL to osmesa (CPU) or egl (GPU), "
                "and install libosmesa6 or the GPU's driver"
            ) from None
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._free = weakref.finalize(self, _free, self._renderer)
        # The OpenGL library's own exit handler was registered with MuJoCo's import and runs after this one; MuJoCo's
        # attempt comes after that, and fails.
        atexit.register(self._free)

    def render(self, name: str = FRONT_CAMERA) -> np.ndarray:
        """A camera's present image, uint8 [height, width, 3], RGB."""
        self._renderer.update_scene(self._world.data, name)
        return self._renderer.render().copy()

    def close(self) -> None:
        self._free()


def _free(renderer: mujoco.Renderer) -> None:
    # A render makes this camera's context the current one. Freed under another camera's, that camera's textures would
    # be deleted, and its images garbage from then on.
    renderer.render()
    renderer.close()
