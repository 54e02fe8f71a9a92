# SPDX-License-Identifier: Apache-2.0
"""Parameters of the policy node and of each of its robots, and reading them from files. Needs no torch."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from specvla_ros.control.convention import ConventionSettings, known_dataset
from specvla_ros.control.joint_parts import TOLERANCE_S
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError, together
from specvla_ros.models.settings import ModelSettings
from specvla_ros.settings.parameter import hint, parameter, section, walk, with_values
from specvla_ros.settings.profiles import merge_parameters, names_for
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings

ALL_NUMBERS = ("all",)
# Other non-writable parameters are read in configure.
READ_IN_ACTIVATE = ("image_transport", "image_reliability", "sync_tolerance_s", "state_names")
ONE_ROBOT = ("",)
_NAMESPACE = re.compile(r"[A-Za-z][A-Za-z0-9_]*(/[A-Za-z][A-Za-z0-9_]*)*")
_GROUPS = (
    "model",
    *(each.ROS_PREFIX.rstrip(".") for each in (EngineSettings, DraftSettings, AcceptanceSettings, ConventionSettings)),
)
_NEARLY = 0.8  # similarity above which a name counts as misspelt
_OF_ROS, _OF_TOPICS = ("use_sim_time", "start_type_description_service"), "qos_overrides."  # parameters of every node
_SHOWN = 8  # other nodes' names shown in the warning
_LOG = logging.getLogger(__name__)
Progress = Callable[[str, float], None]  # what is being done, and the share that is done
T = TypeVar("T")


@dataclass(frozen=True)
class RobotParameters:
    """Parameters of one robot: its inputs and the meaning of its actions."""

    image_transport: str = parameter(
        "auto",
        "Image topics to subscribe to: image (raw), image/compressed, or both (auto). A single one saves bandwidth.",
        choices=("auto", "raw", "compressed"),
        basic=True,
    )
    image_reliability: str = parameter(
        "auto",
        "QoS of the image subscriptions. auto: reliable if every publisher of the topic offers it, so that one lost "
        "packet does not lose a large image; adapts when publishers appear later.",
        choices=("auto", "best_effort", "reliable"),
    )
    sync_tolerance_s: float = parameter(
        TOLERANCE_S,
        "Maximum difference between the first camera's stamp and those of the other cameras and the robot's state, for "
        "a policy with several inputs.",
        unit="s",
        minimum=0.0,
        maximum=10.0,
    )
    state_names: tuple[str, ...] = parameter(
        ALL_NUMBERS,
        "Names of the values of topic `state` that the policy reads, in its order. all: the names in its checkpoint, "
        "or else every value in the first message's order.",
    )
    instruction: str = parameter("", "The robot's task until a message on topic `instruction` replaces it.", basic=True)
    action: ConventionSettings = section(ConventionSettings)
    base_frame: str = parameter(
        "base_link",
        "The robot's base frame: the frame_id of the actions, in which their displacements are given.",
        basic=True,
    )
    max_future_s: float = parameter(
        0.1,
        "Maximum time by which an image's stamp may be ahead of this node's clock.",
        unit="s",
        minimum=0.0,
        maximum=3600.0,
        writable=True,
    )


@dataclass(frozen=True)
class SharedParameters:
    """All parameters of the node `<robot>/policy`, one robot's part of a policy node that serves several."""

    robot: RobotParameters = section(RobotParameters)
    budget_s: float = parameter(
        0.0,
        "Deadline for answering an image, counted from its arrival. Among the robots' waiting images the earliest "
        "deadline is served first.",
        unit="s",
        minimum=0.0,
        maximum=60.0,
        writable=True,
    )
    priority: int = parameter(
        0,
        "Images of robots with a higher priority are served first, whatever their budgets.",
        minimum=-100,
        maximum=100,
        writable=True,
    )


@dataclass(frozen=True)
class PolicyParameters:
    """All parameters of the policy node; `ros2 param describe` shows the descriptions."""

    checkpoint: str = parameter("", "Directory of the policy's checkpoint, see docs/reference/policies.md.", basic=True)
    model: ModelSettings = section(ModelSettings)
    robots: tuple[str, ...] = parameter(
        ONE_ROBOT,
        "Names of the robots that share this policy; each gets its own node `<robot>/policy` with topics, diagnostics "
        "and lifecycle. Empty: one robot, served by this node itself.",
    )
    robot: RobotParameters = section(RobotParameters)
    diagnostics_period_s: float = parameter(1.0, "Time between two diagnostics.", unit="s", minimum=0.05, maximum=60.0)
    engine: EngineSettings = section(EngineSettings, max_image_age_s=1.0)

    def check(self) -> None:
        """Checks everything that can be checked before loading; raises UserError."""
        if not self.checkpoint.strip():
            raise UserError(
                "parameter 'checkpoint' is empty; set it to the directory of a policy's checkpoint, "
                "for example checkpoint:=/data/openvla-7b"
            )
        if self.model.action_head:
            self.engine.check_action_head()

    @property
    def decoding(self) -> EngineSettings:
        """The engine's settings, with at least one stream per robot."""
        return replace(self.engine, streams=max(self.engine.streams, len(self.robots)))


def check_robots(names: tuple[str, ...]) -> None:
    """Raises UserError for a duplicate name or one that is not a valid namespace."""
    if names == ONE_ROBOT:
        return
    wrong = next((name for name in names if not _NAMESPACE.fullmatch(name) or names.count(name) > 1), None)
    if wrong is not None or not names:
        raise UserError(
            f"parameter 'robots' has {wrong!r}: give each robot a unique name of letters, digits and underscores, "
            "such as robots:=[left,right]"
        )


def read_policy_file(file: Path) -> dict[str, Any]:
    """Reads the policy node's values from a ROS parameter file, by full name.

    Other nodes' names in the section for all nodes (`/**`) are skipped and counted in a warning. Raises UserError if
    the file cannot be read, or an unknown name is in the policy's own section, resembles one of its names, or is in one
    of its groups.
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
        _LOG.warning("parameter file %s: skipped %d names that are not policy parameters: %s", file, len(others), them)
    return values


def model_settings(values: Mapping[str, Any], given: Mapping[str, Any]) -> ModelSettings:
    """Builds model settings from `values` by full name, ignoring other names, overridden by the fields in `given`.

    Raises UserError for an invalid value.
    """
    names = {declared.name for declared in walk(ModelSettings())}
    return replace(with_values(ModelSettings(), {n: value for n, value in values.items() if n in names}), **given)


def load_complete(
    load: Callable[[Progress], T],
    progress: Progress,
    checkpoint: Path,
    model: ModelSettings,
    action: ConventionSettings | None,
) -> T:
    """Loads a checkpoint that reads instructions and, with `action`, publishes actions.

    Raises one UserError with everything that is missing, before weights are read.
    """
    missing = _lacking(checkpoint, model, action)

    def begin(what: str, fraction: float) -> None:
        if missing:
            raise UserError(missing)
        progress(what, fraction)

    try:
        loaded = load(begin)
        begin("", 1.0)
    except UserError as error:
        raise UserError("; and ".join(dict.fromkeys(filter(None, (str(error), missing))))) from None
    return loaded


def _columns(norm_stats: Mapping[str, Any], unnorm_key: str) -> tuple[str, ...] | None:
    """Names of an action's values; None if the statistics are missing or malformed, which loading reports."""
    from specvla_ros.models.codecs.statistics import select_statistics

    try:
        return select_statistics(norm_stats, unnorm_key).names
    except UserError:
        return None


def _lacking(checkpoint: Path, model: ModelSettings, action: ConventionSettings | None) -> str:
    """Describes what an OpenVLA checkpoint lacks; empty: nothing. Loading reports the faults of other families."""
    from specvla_ros.models.families.openvla.config import read_config
    from specvla_ros.models.tokenizer import require_tokenizer

    try:
        config = read_config(checkpoint)
    except UserError:
        return ""
    hint = "it is needed to read instructions: copy it from the model that was fine-tuned"
    checks: list[Callable[[], Any]] = [partial(require_tokenizer, checkpoint, hint)]
    if action is not None:
        datasets = [model.unnorm_key] if model.unnorm_key else [*config.norm_stats]
        dt_s = None if config.action_codec == "bins" else 1.0  # other codecs' files may give it
        known = [key for key in datasets if known_dataset(key) is not None]
        key = (known or datasets or [""])[0]
        checks.append(partial(action.convention, key, dt_s, _columns(config.norm_stats, key)))
    try:
        together(*checks)
    except UserError as error:
        return str(error)
    return ""
