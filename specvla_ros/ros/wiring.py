# SPDX-License-Identifier: Apache-2.0
"""How nodes are connected to a robot, and when launch files change a lifecycle node's state. Needs no launch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from specvla_ros.errors import UserError

COMMANDS = ("pose", "twist", "joint_trajectory", "joint_positions", "gripper", "gripper_trajectory")
Remaps = list[tuple[str, str]]


@dataclass(frozen=True)
class RobotTopics:
    """A robot's topics, and the names by which the nodes between it and a policy know them."""

    tool_pose: str = "tool_pose"
    joint_states: str = "joint_states"
    instruction: str = "instruction"
    # Where the guard sends to, by a name of COMMANDS; what is not named stays on `guard/…`.
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def driver(self) -> Remaps:
        return [*self._inputs, ("guard_state", "guard/state")]

    @property
    def guard(self) -> Remaps:
        return [
            *self._inputs,
            ("instruction", self.instruction),
            *((f"command/{name}", f"driver/{name}") for name in COMMANDS),
            *self.live_view,
        ]

    @property
    def live_view(self) -> Remaps:
        """But for the camera."""
        return [(f"guard/{name}", topic) for name, topic in self.commands.items()]

    @property
    def _inputs(self) -> Remaps:
        return [("action", "policy/action"), ("tool_pose", self.tool_pose), ("joint_states", self.joint_states)]


def image_remappings(name: str, topic: str) -> Remaps:
    """Those of a camera's raw topic and the compressed one below it."""
    return [(name, topic), (f"{name}/compressed", f"{topic}/compressed")]


def sensor_remappings(text: str) -> Remaps:
    """Those of `sensor_topics`: NAME=TOPIC of further cameras and of the state, comma-separated."""
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


def unused_pictures(max_image_age_s: float, max_action_age_s: float) -> str:
    """Why a policy computes actions that nobody follows, in words; empty: it does not."""
    if max_image_age_s <= max_action_age_s:
        return ""
    return (
        f"the policy's max_image_age_s is {max_image_age_s:g} s, but max_action_age_s of driver and guard is "
        f"{max_action_age_s:g} s: actions of older pictures are computed and refused; raise max_action_age_s in the "
        "robot's file, or lower max_image_age_s"
    )


class Step(Enum):
    """What the launch file does next."""

    NOTHING = "nothing"
    CONFIGURE = "configure"
    ACTIVATE = "activate"
    FAILED = "failed"  # tell it, or end the launch


class Autostart:
    """Configures and activates a node once for each start of its process; whoever changes its state later has it alone.

    A node that was shut down by hand stays unconfigured when its process starts again.
    """

    def __init__(self) -> None:
        self._configuring = False  # for the launch, not by hand
        self._begun = False
        self._shut_down = False

    @property
    def waiting(self) -> bool:
        """Whether `configure` was requested, and the node has not begun with it."""
        return self._configuring and not self._begun

    def process_started(self) -> Step:
        """Its process runs, for the first time or again."""
        if self._shut_down:
            return Step.NOTHING
        self._configuring, self._begun = True, False
        return Step.CONFIGURE

    def state_changed(self, start: str, goal: str) -> Step:
        """The node went from one state to another; names as in lifecycle_msgs/State."""
        self._begun |= goal == "configuring"
        self._shut_down |= goal == "finalized"
        if start != "configuring" or not self._configuring:
            return Step.NOTHING
        self._configuring = False
        return Step.ACTIVATE if goal == "inactive" else Step.FAILED

    def process_ended(self, code: int) -> Step:
        starting, self._configuring = self._configuring, False
        return Step.FAILED if code and starting else Step.NOTHING
