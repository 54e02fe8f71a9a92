# SPDX-License-Identifier: Apache-2.0
"""The policy node's parameters, those of each of several robots, and what a file says of them. Needs no torch."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.messages.synchronizer import TOLERANCE_S
from specvla_ros.models.settings import ModelSettings
from specvla_ros.settings.parameter import hint, parameter, section, walk, with_values
from specvla_ros.settings.profiles import merge_parameters, names_for
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings

ALL_NUMBERS = ("all",)
# The others that are not writable are read in configure.
READ_IN_ACTIVATE = ("image_transport", "image_reliability", "sync_tolerance_s", "state_names")
ONE_ROBOT = ("",)
_NAMESPACE = re.compile(r"[A-Za-z][A-Za-z0-9_]*(/[A-Za-z][A-Za-z0-9_]*)*")
_GROUPS = (
    "model",
    *(each.ROS_PREFIX.rstrip(".") for each in (EngineSettings, DraftSettings, AcceptanceSettings, ConventionSettings)),
)
_NEARLY = 0.8  # how alike a misspelt name is
_OF_ROS, _OF_TOPICS = ("use_sim_time", "start_type_description_service"), "qos_overrides."  # what every node takes
_SHOWN = 8  # names of other nodes
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RobotParameters:
    """What is one robot's own: what it sees, is told, and does with an action."""

    image_transport: str = parameter(
        "auto",
        "Which image topics to subscribe to: image (raw), image/compressed, or both (auto). One spares bandwidth.",
        choices=("auto", "raw", "compressed"),
        basic=True,
    )
    image_reliability: str = parameter(
        "auto",
        "QoS of the image subscriptions. auto: reliable where every publisher of the topic offers that, so that large "
        "images are not lost for one packet; it follows publishers that come later.",
        choices=("auto", "best_effort", "reliable"),
    )
    sync_tolerance_s: float = parameter(
        TOLERANCE_S,
        "How far the stamps of the other cameras' images and of the robot's state may lie from the first camera's, for "
        "a policy that looks at several.",
        unit="s",
        minimum=0.0,
        maximum=10.0,
    )
    state_names: tuple[str, ...] = parameter(
        ALL_NUMBERS,
        "Names of the numbers of the topic `state` that the policy reads, in its order; all: those that its checkpoint "
        "names, or else every one, in the first message's order.",
    )
    instruction: str = parameter(
        "", "What the robot shall do until the topic `instruction` says otherwise.", basic=True
    )
    action: ConventionSettings = section(ConventionSettings)
    base_frame: str = parameter(
        "base_link",
        "Name of the robot's base frame, the frame_id of the actions: their displacements are in it.",
        basic=True,
    )
    max_future_s: float = parameter(
        0.1,
        "How far an image's stamp may lie ahead of this node's clock.",
        unit="s",
        minimum=0.0,
        maximum=3600.0,
        writable=True,
    )


@dataclass(frozen=True)
class SharedParameters:
    """Every parameter of the node `<robot>/policy`, a robot's part of a policy node that serves several."""

    robot: RobotParameters = section(RobotParameters)
    budget_s: float = parameter(
        0.0,
        "In which an image should be answered, from its arrival on: of the robots' images that wait, that with the "
        "earliest deadline is begun.",
        unit="s",
        minimum=0.0,
        maximum=60.0,
        writable=True,
    )
    priority: int = parameter(
        0,
        "Images of robots with a higher one are begun first, whatever the budgets.",
        minimum=-100,
        maximum=100,
        writable=True,
    )


@dataclass(frozen=True)
class PolicyParameters:
    """Every parameter of the policy node; the descriptions are those that `ros2 param describe` shows."""

    checkpoint: str = parameter("", "Directory of the policy's checkpoint, see docs/reference/policies.md.", basic=True)
    model: ModelSettings = section(ModelSettings)
    robots: tuple[str, ...] = parameter(
        ONE_ROBOT,
        "Names of the robots that share this policy; each has a node of its own, `<robot>/policy`, with its topics, "
        "diagnostics and lifecycle. Empty: one robot, and this node is its own.",
    )
    robot: RobotParameters = section(RobotParameters)
    diagnostics_period_s: float = parameter(1.0, "Time between two diagnostics.", unit="s", minimum=0.05, maximum=60.0)
    engine: EngineSettings = section(EngineSettings, max_image_age_s=1.0)

    def check(self) -> None:
        """Raises UserError for what is wrong and can be told before anything is loaded."""
        if not self.checkpoint.strip():
            raise UserError(
                "parameter 'checkpoint' is empty; set it to the directory of a policy's checkpoint, "
                "for example checkpoint:=/data/openvla-7b"
            )
        if self.model.action_head:
            self.engine.check_action_head()

    @property
    def decoding(self) -> EngineSettings:
        """The engine's settings, with room for every robot."""
        return replace(self.engine, streams=max(self.engine.streams, len(self.robots)))


def check_robots(names: tuple[str, ...]) -> None:
    """Raises UserError for a name that cannot be a namespace, or stands there twice."""
    if names == ONE_ROBOT:
        return
    wrong = next((name for name in names if not _NAMESPACE.fullmatch(name) or names.count(name) > 1), None)
    if wrong is not None or not names:
        raise UserError(
            f"parameter 'robots' has {wrong!r}: give each robot a name of its own, of letters, digits and "
            "underscores, such as robots:=[left,right]"
        )


def read_policy_file(file: Path) -> dict[str, Any]:
    """What a ROS parameter file says to the policy's node, by full name.

    A section of all nodes (`/**`) may hold names of others: how many are left to them is logged.

    UserError: the file cannot be read; or a name that the policy does not have stands in a section of its own, is
    nearly one of its names, or is in one of their groups.
    """
    read = [declared.name for tree in (ModelSettings, EngineSettings, ConventionSettings) for declared in walk(tree())]
    known = {declared.name: None for tree in (PolicyParameters, SharedParameters) for declared in walk(tree())}
    values, own = merge_parameters([file], {}, node="policy"), names_for(file, "policy")
    others = []
    for name in values:
        if name in known or name in _OF_ROS or name.startswith(_OF_TOPICS):
            continue
        near = get_close_matches(name, read, n=1, cutoff=_NEARLY)
        if near or name in own or get_close_matches(name.partition(".")[0], _GROUPS, cutoff=_NEARLY):
            raise UserError(f"parameter file {file}: there is no parameter '{name}'; {hint(name, known)}")
        others.append(name)
    if others:
        them = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
        _LOG.warning(
            "parameter file %s: %d names are none of the policy's, left to other nodes: %s", file, len(others), them
        )
    return values


def model_settings(values: Mapping[str, Any], given: Mapping[str, Any]) -> ModelSettings:
    """Settings from values by full name, of which others are passed over, and from fields, which win.

    UserError: a value that is not allowed.
    """
    names = {declared.name for declared in walk(ModelSettings())}
    return replace(with_values(ModelSettings(), {n: value for n, value in values.items() if n in names}), **given)
