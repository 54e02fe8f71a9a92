# SPDX-License-Identifier: Apache-2.0
"""Kinematics from a robot's MJCF or URDF file: joints, their ranges and frames, and the tool's pose."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from xml.etree import ElementTree

import numpy as np

from specvla_ros.control.convention import NO_NAMES
from specvla_ros.control.limits import Joints, braking_s
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError, missing_package

if TYPE_CHECKING:  # a robot that takes poses or twists and reports its tool's needs no MuJoCo
    import mujoco

_SAME_POINT_M, _SAME_POINT_RAD = 0.005, 0.03
_ENDLESS_RAD = 1e3  # finite range of a continuous joint, for code that needs a number
_KEPT = ("parent", "child", "origin", "axis", "limit")  # elements of a URDF's joint
_FRAMES = {"fusestatic": "false", "discardvisual": "true"}  # MuJoCo would fuse a fixed tool0 with its parent
_INERTIA = '<inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial>'

AnyJoints = TypeVar("AnyJoints", bound=Joints)


@dataclass(frozen=True)
class RobotModel:
    """A robot's kinematics, and the URDF data that MuJoCo drops. Joints keep their names from the file."""

    path: Path
    model: "mujoco.MjModel"
    max_speed: Mapping[str, float] = field(default_factory=dict)  # rad/s or m/s, from <limit velocity>
    endless: frozenset[str] = frozenset()  # continuous joints

    def require(self, joints: Sequence[str]) -> None:
        """Raises UserError for a joint that the file lacks, with the joints that it has."""
        known = [self.model.joint(index).name for index in range(self.model.njnt)]
        for joint in joints:
            if joint not in known:
                raise UserError(
                    f"{self.path} has no joint '{joint}'; it has: {', '.join(known) or 'none'}; set "
                    "joints.model_names to the model's names of joints.names"
                )

    def ranges(self, joints: Sequence[str]) -> np.ndarray:
        """Min and max positions of joints, float64 [n, 2]; raises UserError for a joint without a range."""
        self.require(joints)
        found = [self.model.joint(name) for name in joints]
        lacking = [each.name for each in found if not each.limited[0] and each.name not in self.endless]
        if lacking:
            names = ", ".join(f"'{name}'" for name in lacking)
            raise UserError(
                f"joint {names} of {self.path} has no range; give joints.position_min and joints.position_max, one "
                "number per joint; for a continuous joint the range of its joint_states values, such as -6.28 and 6.28"
            )
        ranges = [each.range if each.limited[0] else (-_ENDLESS_RAD, _ENDLESS_RAD) for each in found]
        return np.array(ranges, dtype=np.float64)


def load_robot_model(path: Path) -> RobotModel:
    """Loads a robot's MJCF or URDF. Only the kinematics of a URDF are read, so its meshes may be missing.

    Raises:
        UserError: the file cannot be read, is xacro, or has several roots.
    """
    try:
        import mujoco
    except ModuleNotFoundError as error:
        raise missing_package(error, "requirements/robot-joints.txt") from None
    if not path.is_file():
        raise UserError(f"joints.model: there is no file {path.absolute()}; give the absolute path of an MJCF or URDF")
    try:
        text = path.read_bytes()
        tree = _parsed(path, text)
        if tree is None or tree.tag != "robot":
            return RobotModel(path, mujoco.MjModel.from_xml_path(str(path)))
        kinematics = ElementTree.tostring(_kinematics(path, tree), "unicode")
        model = mujoco.MjModel.from_xml_string(kinematics)
    except (OSError, ValueError) as error:
        raise UserError(
            f"robot model {path} cannot be read by MuJoCo {mujoco.__version__}: {error}; an MJCF needs its mesh "
            "files, a URDF does not"
        ) from None
    joints = tree.findall("joint")
    speeds = {joint.get("name", ""): _velocity(joint) for joint in joints}
    return RobotModel(
        path,
        model,
        {name: speed for name, speed in speeds.items() if speed > 0},
        frozenset(joint.get("name", "") for joint in joints if joint.get("type") == "continuous"),
    )


def _parsed(path: Path, text: bytes) -> ElementTree.Element | None:
    """The file's XML tree; None if it is not XML, which MuJoCo reports in more detail."""
    try:
        tree = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        tree = None
    is_xacro = b"<xacro:" in text if tree is None else any("xacro}" in str(each.tag) for each in tree.iter())
    if is_xacro or path.suffix == ".xacro":
        urdf = f"{path.name.partition('.')[0]}{'' if path.suffix == '.xacro' else '_plain'}.urdf"
        raise UserError(f"robot model {path} is xacro: run `xacro {path} > {urdf}` and use that file")
    return tree


def _kinematics(path: Path, urdf: ElementTree.Element) -> ElementTree.Element:
    """Links and joints only; each link gets a dummy inertia, which MuJoCo requires."""
    links, joints = urdf.findall("link"), [each for each in urdf.findall("joint") if each.find("child") is not None]
    parents = Counter(joint.find("child").get("link") for joint in joints)  # type: ignore[union-attr]
    roots = [str(link.get("name")) for link in links if link.get("name") not in parents]
    if len(roots) != 1:
        raise UserError(
            f"robot model {path} has {len(roots)} roots ({', '.join(roots) or 'its joints form a loop'}), but must "
            "have one; join them with fixed joints, or remove links that do not belong to the robot"
        )
    made = ElementTree.Element("robot", {"name": "robot"})
    ElementTree.SubElement(ElementTree.SubElement(made, "mujoco"), "compiler", _FRAMES)
    for link in links:
        ElementTree.SubElement(made, "link", {"name": str(link.get("name"))}).append(ElementTree.fromstring(_INERTIA))
    for joint in joints:
        kept = ElementTree.SubElement(made, "joint", joint.attrib)
        dropped = ("limit",) if joint.get("type") == "continuous" else ()
        kept.extend(part for part in joint if part.tag in _KEPT and part.tag not in dropped)
    return made


def _velocity(joint: ElementTree.Element) -> float:
    """Value of <limit velocity>; 0 if there is none."""
    limit = joint.find("limit")
    try:
        speed = float(limit.get("velocity", 0.0)) if limit is not None else 0.0
    except ValueError:
        return 0.0
    return speed if np.isfinite(speed) else 0.0


@dataclass(frozen=True)
class JointModel:
    """Kinematics of an arm and its tool, with joint limits."""

    model: "mujoco.MjModel"  # compiled MJCF or URDF
    joints: tuple[str, ...]  # names of the arm's joints, in the order of the commands
    tool: str  # name of the tool's site, or of its body if no site has that name
    max_speed: np.ndarray  # float64 [n], rad/s or m/s of each joint
    model_names: tuple[str, ...] = ()  # names of the same joints in the model; empty: as `joints`
    max_acceleration: np.ndarray | None = None  # float64 [n], per s², of the commands; None: not limited
    max_jerk: np.ndarray | None = None  # float64 [n], per s³; given with the acceleration

    @property
    def in_model(self) -> tuple[str, ...]:
        return self.model_names or self.joints

    @property
    def tool_kind(self) -> str:
        """Kind of element that `tool` names: site or body."""
        import mujoco

        return "site" if mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, self.tool) >= 0 else "body"

    @property
    def stop_s(self) -> float:
        """Maximum time in seconds to stop from full speed within the joints' limits; 0 without limits."""
        if self.max_acceleration is None or self.max_jerk is None:
            return 0.0
        return max(map(braking_s, self.max_speed, self.max_acceleration, self.max_jerk))


def completed(joints: AnyJoints) -> AnyJoints:
    """Fills in missing limits from the model, if it has them; raises UserError if it cannot be read."""
    if not joints.model or joints.names == NO_NAMES or (joints.has_positions and any(joints.max_speed)):
        return joints
    robot = load_robot_model(Path(joints.model).expanduser())
    robot.require(joints.in_model)
    low, high, speeds = joints.position_min, joints.position_max, joints.max_speed
    if not joints.has_positions:
        low, high = map(tuple, robot.ranges(joints.in_model).T.tolist())
    if not any(speeds) and all(name in robot.max_speed for name in joints.in_model):
        speeds = tuple(robot.max_speed[name] for name in joints.in_model)
    return replace(joints, position_min=low, position_max=high, max_speed=speeds)


def load_joint_model(joints: Joints) -> JointModel:
    """Loads the kinematics of `joints.model`, with the given limits; see `JointModel`.

    Raises:
        UserError: the file cannot be read or lacks a joint or the tool (lists those it has); the joints are not
            named; a limit is missing.
    """
    if joints.names == NO_NAMES:
        raise UserError("joints.model needs joints.names: the arm's joints, in the order of the commands")
    if not joints.tool:
        raise UserError("joints.model needs joints.tool: the link, site or body whose pose is measured")
    robot = load_robot_model(Path(joints.model).expanduser())
    import mujoco

    model, names, tool = robot.model, joints.in_model, joints.tool
    robot.require(names)
    for name in names:
        if model.joint(name).type[0] not in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
            raise UserError(
                f"joint '{name}' of {robot.path} neither turns nor slides: it cannot be commanded as one number"
            )
    joints.require_bounds("joints.model")
    bounds = (joints.accelerations, joints.jerks) if any(joints.max_acceleration) else (None, None)
    made = JointModel(model, joints.names, tool, _speeds(joints, robot), names, *bounds)
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
    """Maximum speed of each joint, float64 [n]: as given, else from the model."""
    speeds = joints.max_speed
    if not any(speeds):
        speeds = tuple(robot.max_speed.get(name, 0.0) for name in joints.in_model)
    if len(speeds) not in (1, len(joints.names)):
        raise UserError(f"joints.max_speed has {len(speeds)} numbers for {len(joints.names)} joints; give one for each")
    if min(speeds) <= 0:
        raise UserError(
            "joints.max_speed must be set and larger than 0, or joints.model must be a URDF with <limit velocity> for "
            "every joint: joint limits have no default"
        )
    return np.broadcast_to(speeds, len(joints.names)).astype(np.float64)


class ToolKinematics:
    """Forward kinematics of the tool in the model's world frame. Joints outside the arm stay as in the file."""

    def __init__(self, robot: JointModel) -> None:
        import mujoco

        self._robot, model = robot, robot.model
        self._data = mujoco.MjData(model)
        of_site = robot.tool_kind == "site"
        self._tool_frame = self._data.site(robot.tool) if of_site else self._data.body(robot.tool)
        self._tool_body = model.site(robot.tool).bodyid[0] if of_site else self._tool_frame.id
        self._addresses = np.array([model.joint(name).qposadr[0] for name in robot.in_model])
        self._dofs = np.array([model.joint(name).dofadr[0] for name in robot.in_model])
        self._mujoco = mujoco
        joints = [model.joint(name) for name in robot.in_model]
        # float64 [n, 2], min and max joint positions; infinite if the model has none.
        self.ranges = np.array([joint.range if joint.limited[0] else (-np.inf, np.inf) for joint in joints])

    @property
    def max_speed(self) -> np.ndarray:  # float64 [n]
        return self._robot.max_speed

    @property
    def joints(self) -> tuple[str, ...]:
        return self._robot.joints

    @property
    def max_acceleration(self) -> np.ndarray | None:  # float64 [n]; None: not limited
        return self._robot.max_acceleration

    def pose_at(self, positions: np.ndarray) -> Pose:
        """The tool's pose at joint positions, float64 [n], within their ranges or not."""
        self._data.qpos[self._addresses] = positions
        self._mujoco.mj_kinematics(self._robot.model, self._data)
        return Pose(self._tool_frame.xpos.copy(), self._tool_frame.xmat.reshape(3, 3).copy())

    def tool_moves(self, positions: np.ndarray) -> np.ndarray:
        """The Jacobian, float64 [6, n]: the tool's velocity, m/s then rad/s in the world frame, per rad/s or m/s."""
        model, data = self._robot.model, self._data
        place, moves = self.pose_at(positions).position, np.zeros((6, model.nv))
        self._mujoco.mj_comPos(model, data)
        self._mujoco.mj_jac(model, data, moves[:3], moves[3:], place, self._tool_body)
        return moves[:, self._dofs]

    def pose_of(self, positions: Mapping[str, float]) -> Pose:
        """The tool's pose at measured joints; raises UserError if one is missing or outside its range."""
        return self.pose_at(self._in_range(positions))

    def mismatch(self, positions: Mapping[str, float], tool: Pose) -> str:
        """Describes how far the tool's pose at joint positions is from a measured one; empty if within sensor accuracy.

        The model's tool must be the measured point: otherwise every target is off by the distance between them.
        """
        computed = self.pose_of(positions)
        way_m, turn_rad = computed.distance(tool)
        if way_m <= _SAME_POINT_M and turn_rad <= _SAME_POINT_RAD:
            return ""
        return (
            f"joints.tool '{self._robot.tool}' is at {_text(computed)} by joint_states and the model, but the tool was "
            f"measured at {_text(tool)}: {way_m:.3f} m and {turn_rad:.3f} rad apart; set joints.tool to the point "
            "whose pose is measured, or correct joints.model, joints.names or base_frame"
        )

    def _in_range(self, positions: Mapping[str, float]) -> np.ndarray:
        """Measured joints in command order, float64 [n], clipped to their ranges if outside by at most 0.001."""
        found = []
        for name, (low, high) in zip(self._robot.joints, self.ranges, strict=True):
            if name not in positions:
                raise UserError(f"joint_states has no '{name}'; it has: {', '.join(positions)}")
            value = positions[name]
            if not low - 1e-3 <= value <= high + 1e-3:
                words = f"joint '{name}' is at {value:g}, out of its range {low:g} to {high:g}"
                raise UserError(words + unit_hint([value]))
            found.append(min(max(value, low), high))
        return np.array(found)


def unit_hint(positions: Iterable[float]) -> str:
    """A hint for measured joints that are more than a turn or a metre from zero; empty for others."""
    if all(abs(position) <= 2 * np.pi for position in positions):
        return ""
    return "; joint_states are in radians or metres: is this in degrees or millimetres?"


def _text(pose: Pose) -> str:
    x, y, z = pose.position
    return f"({x:.3f}, {y:.3f}, {z:.3f}) m"
