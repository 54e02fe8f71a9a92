# SPDX-License-Identifier: Apache-2.0
"""Remappings between nodes and robot, and the launch files' autostart logic. Does not import launch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from specvla_ros.control.guard.settings import Output
from specvla_ros.errors import UserError

_MOTION = dict.fromkeys(each.topic for each in Output if each is not Output.NONE)
COMMANDS = (*_MOTION, "gripper", "gripper_trajectory")
Remaps = list[tuple[str, str]]


@dataclass(frozen=True)
class RobotTopics:
    """A robot's topics, and how the nodes between robot and policy are remapped to them."""

    tool_pose: str = "tool_pose"
    joint_states: str = "joint_states"
    instruction: str = "instruction"
    # Topics of the guard's commands, by a name of COMMANDS; the others stay on `guard/…`.
    commands: Mapping[str, str] = field(default_factory=dict)
    action: str = "policy/action"

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
        """Remappings of the live view, except the camera's."""
        return [(f"guard/{name}", topic) for name, topic in self.commands.items()]

    @property
    def _inputs(self) -> Remaps:
        return [("action", self.action), ("tool_pose", self.tool_pose), ("joint_states", self.joint_states)]


def image_remappings(name: str, topic: str) -> Remaps:
    """Remappings of a camera's raw topic and of the compressed topic below it."""
    return [(name, topic), (f"{name}/compressed", f"{topic}/compressed")]


def sensor_remappings(text: str) -> Remaps:
    """Remappings from `sensor_topics`: NAME=TOPIC of further cameras and of the state, comma-separated."""
    remappings: Remaps = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, topic = (each.strip() for each in part.partition("="))
        if not (name and equals and topic):
            raise UserError(
                f"invalid entry '{part}' in sensor_topics: expected NAME=TOPIC, comma-separated, such as "
                "wrist=/wrist/image_raw,state=/joint_states"
            )
        remappings += [(name, topic)] if name == "state" else image_remappings(f"{name}/image", topic)
    return remappings


def refused_images_warning(max_image_age_s: float, max_action_age_s: float) -> str:
    """Warning if a policy computes actions that driver or guard then refuse; empty if it does not."""
    if 0 < max_image_age_s <= max_action_age_s:
        return ""
    limit = f"{max_image_age_s:g} s" if max_image_age_s else "0, which sets none"
    return (
        f"the policy's max_image_age_s is {limit}, but max_action_age_s of driver and guard is "
        f"{max_action_age_s:g} s: actions from older images are computed and then refused; raise max_action_age_s in "
        f"the robot's file, or limit max_image_age_s to {max_action_age_s:g} s"
    )


class Step(Enum):
    """The launch file's next action."""

    NOTHING = "nothing"
    CONFIGURE = "configure"
    ACTIVATE = "activate"
    FAILED = "failed"  # log the failure, or end the launch


class Autostart:
    """Configures and activates a node once for each start of its process. Later state changes are left to the user.

    A node that was shut down by hand stays unconfigured when its process starts again.
    """

    def __init__(self) -> None:
        self._configuring = False  # requested by the launch, not by hand
        self._begun = False
        self._shut_down = False

    @property
    def waiting(self) -> bool:
        """True if `configure` was requested and the node has not started it."""
        return self._configuring and not self._begun

    def process_started(self) -> Step:
        """Handles the first start or a restart of the process."""
        if self._shut_down:
            return Step.NOTHING
        self._configuring, self._begun = True, False
        return Step.CONFIGURE

    def state_changed(self, start: str, goal: str) -> Step:
        """Handles a change of the node's state; names as in lifecycle_msgs/State."""
        self._begun |= goal == "configuring"
        self._shut_down |= goal == "finalized"
        if start != "configuring" or not self._configuring:
            return Step.NOTHING
        self._configuring = False
        return Step.ACTIVATE if goal == "inactive" else Step.FAILED

    def process_ended(self, code: int) -> Step:
        starting, self._configuring = self._configuring, False
        return Step.FAILED if code and starting else Step.NOTHING
