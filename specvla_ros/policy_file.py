# SPDX-License-Identifier: Apache-2.0
"""What a ROS parameter file says about a policy, for whoever runs it without a node: as the node reads it. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.settings import ModelSettings
from specvla_ros.settings.parameter import hint, walk, with_values
from specvla_ros.settings.profiles import merge_parameters
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings

_GROUPS = (
    "model",
    *(each.ROS_PREFIX.rstrip(".") for each in (EngineSettings, DraftSettings, AcceptanceSettings, ConventionSettings)),
)
_NEARLY = 0.8  # how alike a misspelt name is


def read_policy_file(file: Path) -> dict[str, Any]:
    """What a ROS parameter file says to the policy's node, by full name.

    UserError: the file cannot be read, or a name is nearly one of loading, decode.*, draft.*, acceptance.* and
    action.*, or in one of their groups and none.
    """
    trees = (ModelSettings(), EngineSettings(), ConventionSettings())
    known = dict.fromkeys(declared.name for tree in trees for declared in walk(tree))
    values = merge_parameters([file], {}, node="policy")
    for name in values:
        near = get_close_matches(name, known, n=1, cutoff=_NEARLY)
        if name not in known and (near or get_close_matches(name.partition(".")[0], _GROUPS, cutoff=_NEARLY)):
            raise UserError(f"parameter file {file}: there is no parameter '{name}'; {hint(name, known)}")
    return values


def model_settings(values: Mapping[str, Any], given: Mapping[str, Any]) -> ModelSettings:
    """Settings from values by full name, of which others are passed over, and from fields, which win.

    UserError: a value that is not allowed.
    """
    names = {declared.name for declared in walk(ModelSettings())}
    return replace(with_values(ModelSettings(), {n: value for n, value in values.items() if n in names}), **given)
