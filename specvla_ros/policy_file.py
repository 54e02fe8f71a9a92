# SPDX-License-Identifier: Apache-2.0
"""What a ROS parameter file says about a policy, for whoever runs it without a node: as the node reads it. No torch."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.settings import ModelSettings
from specvla_ros.policy_parameters import PolicyParameters, SharedParameters
from specvla_ros.settings.parameter import hint, walk, with_values
from specvla_ros.settings.profiles import merge_parameters, names_for
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings

_GROUPS = (
    "model",
    *(each.ROS_PREFIX.rstrip(".") for each in (EngineSettings, DraftSettings, AcceptanceSettings, ConventionSettings)),
)
_NEARLY = 0.8  # how alike a misspelt name is
_OF_ROS, _OF_TOPICS = ("use_sim_time", "start_type_description_service"), "qos_overrides."  # what every node takes
_SHOWN = 8  # names of other nodes
_LOG = logging.getLogger(__name__)


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
