# SPDX-License-Identifier: Apache-2.0
"""An arm at the table, and our own, made of primitives.

The base frame is the world's. An arm's base is at its origin, but that of the SO-101 is nearer to the objects. Its site
`pinch` is the tool's frame: between the fingertips, z out of the fingers, which open along y.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from specvla_ros.control.convention import ACTION_NAMES, GRIPPER
from specvla_ros.control.robot_model import JointModel
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.tasks import TABLE_AREA, TASKS, Area, Task

WRIST_CAMERA = "wrist"
_TABLE = Path(__file__).parent / "assets" / "table.xml"


@dataclass(frozen=True)
class Gripper:
    """Two fingers that open and close."""

    joints: tuple[str, ...]  # names of the driven joints
    actuators: tuple[str, ...]  # their position actuators, in the same order
    open: tuple[float, ...]  # joint positions, metres or radians
    closed: tuple[float, ...]
    pads: tuple[str, str]  # geoms that touch a held object; y is their thin side


@dataclass(frozen=True)
class Arm:
    """An arm with its gripper."""

    name: str  # for the command line, parameters and files
    build: Callable[[], mujoco.MjSpec]  # makes the arm alone, at the origin of its base frame
    joints: tuple[str, ...]  # names, from the base
    motors: tuple[str, ...]  # torque actuators, in the same order; the model holds their limits
    speed: tuple[float, ...]  # maximum joint speeds, rad/s
    acceleration: tuple[float, ...]  # maximum joint accelerations under its own control, rad/s²
    home: tuple[float, ...]  # joint positions with the tool above the table, radians; of most pointing down
    low: tuple[float, float, float]  # minimum and maximum of the tool's reachable goals, x y z in metres
    high: tuple[float, float, float]
    gripper: Gripper
    tasks: tuple[Task, ...] = TASKS
    area: Area = TABLE_AREA  # where its tasks' things lie

    @property
    def takes_poses(self) -> bool:
        """False if it has too few joints to bring its tool into any orientation: its actions are of the joints."""
        return len(self.joints) >= 6

    @property
    def joint_names(self) -> tuple[str, ...]:
        """The joints in joint states: the arm's, then the fingers'."""
        return (*self.joints, *self.gripper.joints)

    def action_names(self, *, of_joints: bool) -> tuple[str, ...]:
        """Names of an action's values: of the joints and the gripper, or of the tool."""
        return (*self.joints, GRIPPER) if of_joints else ACTION_NAMES

    def model(self) -> mujoco.MjModel:
        """Compiles the table with this arm.

        Raises:
            UserError: MuJoCo cannot compile it, or the package with the arm's model is missing.
        """
        with self._compiling():
            scene = mujoco.MjSpec.from_file(str(_TABLE))
            if self.build is not _table_arm:  # the table's file already holds our arm
                scene.delete(scene.body("link0"))
                scene.option.timestep = 0.002  # the grippers' links are too light for our arm's 5 ms
                scene.attach(self.build(), frame=scene.worldbody.add_frame(), prefix="")
            _look_from_the_wrist(scene)
            return scene.compile()

    def kinematics(self) -> str:
        """The arm alone as MJCF, without shapes: joints, masses and the site `pinch`. Raises like `model`."""
        with self._compiling():
            spec = self.build()
            for geom in list(spec.geoms):
                # A body without explicit inertia keeps its shapes: they give its mass.
                if geom.parent.explicitinertial or geom.type == mujoco.mjtGeom.mjGEOM_MESH:
                    spec.delete(geom)
            for asset in [*spec.meshes, *spec.materials]:
                spec.delete(asset)
            spec.compile()
            return str(spec.to_xml())

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError) as error:
            raise UserError(
                f"the model of the robot '{self.name}' cannot be compiled by MuJoCo {mujoco.__version__} ({error})"
            ) from None


def joint_indices(model: mujoco.MjModel, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Indices of joints in `qpos` and in `qvel`, int [joints] each."""
    joints = [model.joint(name) for name in names]
    return np.array([joint.qposadr[0] for joint in joints]), np.array([joint.dofadr[0] for joint in joints])


def joint_model(model: mujoco.MjModel, arm: Arm) -> JointModel:
    """The arm's kinematics in a world's model."""
    return JointModel(model, arm.joints, "pinch", np.array(arm.speed))


def _look_from_the_wrist(scene: mujoco.MjSpec) -> None:
    """Adds a camera beside the hand that looks along the fingers and moves with them."""
    pinch = scene.site("pinch")
    camera = pinch.parent.add_camera(name=WRIST_CAMERA, pos=[0.07, 0, -0.13], xyaxes=[0, 1, 0, 0.94, 0, 0.34], fovy=60)
    camera.set_frame(pinch.parent.add_frame(pos=pinch.pos, quat=pinch.quat))


def _table_arm() -> mujoco.MjSpec:
    spec = mujoco.MjSpec.from_file(str(_TABLE))
    for body in list(spec.worldbody.bodies):
        if body.name != "link0":
            spec.delete(body)
    for extra in [*spec.worldbody.geoms, *spec.cameras, *spec.lights]:
        spec.delete(extra)
    return spec


LOW, HIGH = (0.30, -0.30, 0.015), (0.78, 0.30, 0.30)
DOWN = (0.0, 0.15, 0.0, -2.2, 0.0, 2.35, 0.785)
SEVEN = tuple(f"joint{i}" for i in range(1, 8))
# https://frankaemika.github.io/docs/control_parameters.html, "Limits for Panda"
PANDA_SPEED = (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61)
PANDA_ACCELERATION = (15.0, 7.5, 10.0, 12.5, 15.0, 20.0, 20.0)

TABLE_ARM = Arm(
    name="table",
    build=_table_arm,
    joints=SEVEN,
    motors=SEVEN,
    speed=PANDA_SPEED,  # its link lengths are the Panda's
    acceleration=PANDA_ACCELERATION,
    home=DOWN,
    low=LOW,  # the pinch site is 4 mm above the fingertips at the lowest
    high=HIGH,
    gripper=Gripper(
        joints=("left_finger", "right_finger"),
        actuators=("left_finger", "right_finger"),
        open=(0.05, 0.05),
        closed=(0.0, 0.0),
        pads=("left_pad", "right_pad"),
    ),
)
