# SPDX-License-Identifier: Apache-2.0
"""A robot's model file, MJCF or URDF, as kinematics: joints, their ranges and frames."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np

from specvla_ros.errors import UserError, missing_package

if TYPE_CHECKING:  # a robot that takes poses or twists has no MuJoCo
    import mujoco

_ENDLESS_RAD = 1e3  # the range of a joint that turns without end, for who needs a number
_KEPT = ("parent", "child", "origin", "axis", "limit")  # of a URDF's joint
_FRAMES = {"fusestatic": "false", "discardvisual": "true"}  # MuJoCo would fuse a fixed tool0 with its parent
_INERTIA = '<inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial>'


@dataclass(frozen=True)
class RobotModel:
    """A robot's kinematics, and what MuJoCo does not keep of a URDF; joints by their names in the file."""

    path: Path
    model: "mujoco.MjModel"
    max_speed: Mapping[str, float] = field(default_factory=dict)  # rad/s or m/s, of <limit velocity>
    endless: frozenset[str] = frozenset()  # joints that turn without end

    def require(self, joints: Sequence[str]) -> None:
        """Raises UserError for a joint that the file does not have, with those that it has."""
        known = [self.model.joint(index).name for index in range(self.model.njnt)]
        for joint in joints:
            if joint not in known:
                raise UserError(
                    f"{self.path} has no joint '{joint}'; it has: {', '.join(known) or 'none'}; joints.model_names "
                    "says how the model calls each of joints.names"
                )

    def ranges(self, joints: Sequence[str]) -> np.ndarray:
        """float64 [n, 2], joints' smallest and largest positions; raises UserError for one without a range."""
        self.require(joints)
        found = []
        for name in joints:
            joint = self.model.joint(name)
            if not joint.limited[0] and name not in self.endless:
                raise UserError(
                    f"joint '{name}' of {self.path} has no range; give joints.position_min and joints.position_max"
                )
            found.append(joint.range if joint.limited[0] else (-_ENDLESS_RAD, _ENDLESS_RAD))
        return np.array(found, dtype=np.float64)


def load_robot_model(path: Path) -> RobotModel:
    """Reads a robot's MJCF or URDF; of a URDF the kinematics alone, so that its meshes need not be there.

    Raises:
        UserError: the file cannot be read, is xacro, or has several roots.
    """
    try:
        import mujoco
    except ModuleNotFoundError as error:
        raise missing_package(error, "requirements/robot-joints.txt") from None
    try:
        text = path.read_bytes()
        tree = _parsed(path, text)
        if tree is None or tree.tag != "robot":
            return RobotModel(path, mujoco.MjModel.from_xml_path(str(path)))
        kinematics = ElementTree.tostring(_kinematics(path, tree), "unicode")
        model = mujoco.MjModel.from_xml_string(kinematics)
    except (OSError, ValueError) as error:
        raise UserError(f"robot model {path} cannot be read by MuJoCo {mujoco.__version__}: {error}") from None
    joints = tree.findall("joint")
    speeds = {joint.get("name", ""): _velocity(joint) for joint in joints}
    return RobotModel(
        path,
        model,
        {name: speed for name, speed in speeds.items() if speed > 0},
        frozenset(joint.get("name", "") for joint in joints if joint.get("type") == "continuous"),
    )


def _parsed(path: Path, text: bytes) -> ElementTree.Element | None:
    """The file's tree; None: it is no XML, of which MuJoCo knows more to say."""
    try:
        tree = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        tree = None
    is_xacro = b"<xacro:" in text if tree is None else any("xacro}" in str(each.tag) for each in tree.iter())
    if is_xacro or path.suffix == ".xacro":
        urdf = f"{path.name.partition('.')[0]}{'' if path.suffix == '.xacro' else '_plain'}.urdf"
        raise UserError(f"robot model {path} is xacro: run `ros2 run xacro xacro {path} > {urdf}` and name that file")
    return tree


def _kinematics(path: Path, urdf: ElementTree.Element) -> ElementTree.Element:
    """Links and joints alone; each link gets an inertia, which MuJoCo wants and kinematics do without."""
    links, joints = urdf.findall("link"), [each for each in urdf.findall("joint") if each.find("child") is not None]
    parents = Counter(joint.find("child").get("link") for joint in joints)  # type: ignore[union-attr]
    roots = [str(link.get("name")) for link in links if link.get("name") not in parents]
    if len(roots) != 1:
        raise UserError(
            f"robot model {path} has {len(roots)} roots ({', '.join(roots) or 'its joints form a loop'}), and a robot "
            "has one; join them with fixed joints, or remove what is no part of the robot"
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
    """Of <limit velocity>; 0: it has none."""
    limit = joint.find("limit")
    try:
        speed = float(limit.get("velocity", 0.0)) if limit is not None else 0.0
    except ValueError:
        return 0.0
    return speed if np.isfinite(speed) else 0.0
