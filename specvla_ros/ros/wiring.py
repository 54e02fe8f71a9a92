# SPDX-License-Identifier: Apache-2.0
"""How policy, driver, guard and live view are connected to a robot: what launch files and the demo share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specvla_ros.errors import UserError

COMMANDS = ("pose", "twist", "joint_trajectory", "joint_positions", "gripper", "gripper_trajectory")
Remaps = list[tuple[str, str]]


@dataclass(frozen=True)
class RobotTopics:
    """A robot's topics, and the names by which the nodes between it and a policy know them.

    Args:
        tool_pose: its tool's measured pose.
        joint_states: its joints.
        instruction: what it is told to do.
        commands: where the guard sends to, by a name of COMMANDS; what is not named stays on `guard/…`.
    """

    tool_pose: str = "tool_pose"
    joint_states: str = "joint_states"
    instruction: str = "instruction"
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def driver(self) -> Remaps:
        """Of the driver."""
        return [*self._inputs, ("guard_passing", "guard/passing")]

    @property
    def guard(self) -> Remaps:
        """Of the guard."""
        return [
            *self._inputs,
            ("instruction", self.instruction),
            *((f"command/{name}", f"driver/{name}") for name in COMMANDS),
            *self._sent,
        ]

    @property
    def live_view(self) -> Remaps:
        """Of the live view, but for the camera."""
        return self._sent

    @property
    def _inputs(self) -> Remaps:
        return [
            ("action", "policy/action"),
            ("tool_pose", self.tool_pose),
            ("joint_states", self.joint_states),
        ]

    @property
    def _sent(self) -> Remaps:
        return [(f"guard/{name}", topic) for name, topic in self.commands.items()]


def image_remappings(name: str, topic: str) -> Remaps:
    """Of a camera's raw topic and the compressed one below it."""
    return [(name, topic), (f"{name}/compressed", f"{topic}/compressed")]


def sensor_remappings(text: str) -> Remaps:
    """Those of `sensor_topics`: NAME=TOPIC of further cameras and of the state, comma-separated.

    Raises:
        UserError: it is written otherwise.
    """
    remappings: Remaps = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, topic = (each.strip() for each in part.partition("="))
        if not (name and equals and topic):
            raise UserError(
                f"sensor_topics has '{part}', but it must be NAME=TOPIC, comma-separated, such as "
                "wrist=/wrist/image_raw,state=/joint_states"
            )
        remappings += [(name, topic)] if name == "state" else image_remappings(f"{name}/image", topic)
    return remappings
