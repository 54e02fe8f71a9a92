# SPDX-License-Identifier: Apache-2.0
"""Robot descriptions in the form in which people have them; axes, origins and ranges are the robots'."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

PI = np.pi


@dataclass(frozen=True)
class Joint:
    """One joint of a description; `low`, `high`, `speed`: None where it has no limit."""

    name: str
    parent: str
    child: str
    xyz: tuple[float, float, float] = (0, 0, 0)
    rpy: tuple[float, float, float] = (0, 0, 0)
    axis: tuple[float, float, float] | None = None  # None: fixed
    low: float | None = None
    high: float | None = None
    speed: float | None = None
    kind: str = "revolute"
    more: str = ""

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of the range; None: it has none."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def xml(self) -> str:
        kind = self.kind if self.axis else "fixed"
        ends = f'lower="{self.low}" upper="{self.high}"' if self.low is not None else ""
        limit = f'<limit {ends} effort="9" velocity="{self.speed}"/>' if self.speed is not None else ""
        axis = f'<axis xyz="{_text(self.axis)}"/>' if self.axis else ""
        return (
            f'<joint name="{self.name}" type="{kind}"><parent link="{self.parent}"/><child link="{self.child}"/>'
            f'<origin xyz="{_text(self.xyz)}" rpy="{_text(self.rpy)}"/>{axis}{limit}{self.more}</joint>'
        )


def _text(numbers: Sequence[float]) -> str:
    return " ".join(map(repr, map(float, numbers)))


def chain(links: Sequence[str], names: Sequence[str], rows: Sequence[tuple], **common: object) -> list[Joint]:
    """Joints from link to link: rows of xyz, rpy, axis, and smallest and largest position and speed."""
    return [
        Joint(name, parent, child, xyz, rpy, axis, low, high, speed, **common)  # type: ignore[arg-type]
        for name, parent, child, (xyz, rpy, axis, low, high, speed) in zip(
            names, links[:-1], links[1:], rows, strict=True
        )
    ]


X, Y, Z = (1, 0, 0), (0, 1, 0), (0, 0, 1)
UR5 = [
    Joint("base_joint", "world", "base_link"),
    *chain(
        [
            "base_link",
            "shoulder_link",
            "upper_arm_link",
            "forearm_link",
            "wrist_1_link",
            "wrist_2_link",
            "wrist_3_link",
        ],
        [f"{each}_joint" for each in ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")],
        [
            ((0, 0, 0.089159), (0, 0, 0), Z, -2 * PI, 2 * PI, 3.15),
            ((0, 0.13585, 0), (0, PI / 2, 0), Y, -2 * PI, 2 * PI, 3.15),
            ((0, -0.1197, 0.425), (0, 0, 0), Y, -PI, PI, 3.15),
            ((0, 0, 0.39225), (0, PI / 2, 0), Y, -2 * PI, 2 * PI, 3.2),
            ((0, 0.093, 0), (0, 0, 0), Z, -2 * PI, 2 * PI, 3.2),
            ((0, 0, 0.09465), (0, 0, 0), Y, -2 * PI, 2 * PI, 3.2),
        ],
    ),
    Joint("wrist_3_link-tool0_fixed_joint", "wrist_3_link", "tool0", (0, 0.0823, 0), (-PI / 2, 0, 0)),
]
PANDA = [
    *chain(
        [f"panda_link{i}" for i in range(8)],
        [f"panda_joint{i}" for i in range(1, 8)],
        [
            ((0, 0, 0.333), (0, 0, 0), Z, -2.8973, 2.8973, 2.175),
            ((0, 0, 0), (-PI / 2, 0, 0), Z, -1.7628, 1.7628, 2.175),
            ((0, -0.316, 0), (PI / 2, 0, 0), Z, -2.8973, 2.8973, 2.175),
            ((0.0825, 0, 0), (PI / 2, 0, 0), Z, -3.0718, -0.0698, 2.175),
            ((-0.0825, 0.384, 0), (-PI / 2, 0, 0), Z, -2.8973, 2.8973, 2.61),
            ((0, 0, 0), (PI / 2, 0, 0), Z, -0.0175, 3.7525, 2.61),
            ((0.088, 0, 0), (PI / 2, 0, 0), Z, -2.8973, 2.8973, 2.61),
        ],
    ),
    Joint("panda_joint8", "panda_link7", "panda_link8", (0, 0, 0.107)),
    Joint("panda_hand_joint", "panda_link8", "panda_hand", rpy=(0, 0, -PI / 4)),
    Joint("panda_hand_tcp_joint", "panda_hand", "tool0", (0, 0, 0.1034)),
    Joint("finger_1", "panda_hand", "left", (0, 0, 0.0584), (0, 0, 0), Y, 0.0, 0.04, 0.2, "prismatic"),
    Joint(
        *("finger_2", "panda_hand", "right", (0, 0, 0.0584), (0, 0, 0), (0, -1, 0), 0.0, 0.04, 0.2, "prismatic"),
        more='<mimic joint="finger_1"/>',
    ),
]
GEN3 = [
    *(
        replace(joint, kind="revolute" if joint.low is not None else "continuous")
        for joint in chain(
            ["base_link", *(f"link_{i}" for i in range(1, 8))],
            [f"joint_{i}" for i in range(1, 8)],
            [
                ((0, 0, 0.15643), (PI, 0, 0), Z, None, None, 1.39),
                ((0, 0.005375, -0.12838), (PI / 2, 0, 0), Z, -2.24, 2.24, 1.39),
                ((0, -0.21038, -0.006375), (-PI / 2, 0, 0), Z, None, None, 1.39),
                ((0, 0.006375, -0.21038), (PI / 2, 0, 0), Z, -2.57, 2.57, 1.39),
                ((0, -0.20843, -0.006375), (-PI / 2, 0, 0), Z, None, None, 1.22),
                ((0, 0.00017505, -0.10593), (PI / 2, 0, 0), Z, -2.09, 2.09, 1.22),
                ((0, -0.10593, -0.00017505), (-PI / 2, 0, 0), Z, None, None, 1.22),
            ],
        )
    ),
    Joint("end_effector", "link_7", "tool0", (0, 0, -0.061525), (PI, 0, 0)),
]
Z1 = [
    Joint("base_static_joint", "world", "link00"),
    *chain(
        [f"link0{i}" for i in range(7)],
        [f"joint{i}" for i in range(1, 7)],
        [
            ((0, 0, 0.0585), (0, 0, 0), Z, -2.62, 2.62, 3.14),
            ((0, 0, 0.045), (0, 0, 0), Y, 0.0, 2.97, 3.14),
            ((-0.35, 0, 0), (0, 0, 0), Y, -2.88, 0.0, 3.14),
            ((0.218, 0, 0.057), (0, 0, 0), Y, -1.52, 1.52, 3.14),
            ((0.07, 0, 0), (0, 0, 0), Z, -1.34, 1.34, 3.14),
            ((0.0492, 0, 0), (0, 0, 0), X, -2.79, 2.79, 3.14),
        ],
    ),
    Joint("gripper_static", "link06", "tool0", (0.051, 0, 0)),
]
ARMS = {"ur5": UR5, "panda": PANDA, "gen3": GEN3, "z1": Z1}


def write_urdf(path: Path, joints: Sequence[Joint], more: str = "") -> Path:
    """A URDF with what descriptions have beside kinematics: meshes that are not there, no inertia, plugins."""
    links = dict.fromkeys(link for joint in joints for link in (joint.parent, joint.child))
    mesh = '<geometry><mesh filename="{}/meshes/{}.dae" scale="1 1 1"/></geometry>'
    bodies = "".join(
        f'<link name="{link}"><visual>{mesh.format("package://robot", link)}<material name="grey"/></visual>'
        f"<collision>{mesh.format('file:///nowhere', link)}</collision></link>"
        for link in links
    )
    plugins = '<ros2_control name="arm"><joint name="x"/></ros2_control><gazebo><plugin filename="none.so"/></gazebo>'
    path.write_text(
        f'<?xml version="1.0" encoding="utf-8"?><robot name="r">{bodies}{"".join(each.xml() for each in joints)}'
        f'<transmission name="t"><joint name="{joints[1].name}"/></transmission>{plugins}{more}</robot>',
        encoding="utf-8",
    )
    return path


def moved(joints: Sequence[Joint]) -> list[Joint]:
    return [each for each in joints if each.axis is not None and each.kind != "prismatic"]
