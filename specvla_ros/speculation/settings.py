# SPDX-License-Identifier: Apache-2.0
"""Settings of speculation; without torch, so that a node can check them before anything is loaded.

What one rule or one drafter alone needs is declared in its own file, and is here as a group by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import Groups, check, groups, hint, parameter, walk
from specvla_ros.speculation.registry import DRAFTERS, RULES

CHILDREN = ("top_k", "window_mass")
NO_HEAD = "none"
DRAFT_FOLDER = "draft"
_MAX_NODES = 64  # a node's ancestors are the bits of one int64
_MAX_BINS = 254


def _rules() -> tuple[str, ...]:
    return RULES.names()


def _rule_settings() -> Mapping[str, type]:
    return RULES.settings()


def _drafter_settings() -> Mapping[str, type]:
    return DRAFTERS.settings()


@dataclass(frozen=True)
class DraftSettings:
    """Where drafted tokens come from.

    Raises:
        UserError: a value is out of range, or two do not fit together.
    """

    ROS_PREFIX: ClassVar[str] = "draft."

    head: str = parameter(
        "", "Directory of the draft head; empty: the folder `draft` of the checkpoint if there is one; none: no head."
    )
    fallback_to_ar: bool = parameter(False, "Decode plainly, with a warning, when no draft can be had.")
    top_k: int = parameter(8, "Children per node that a draft tree considers.", minimum=1, maximum=_MAX_NODES)
    # EAGLE's and Spec-VLA's code counts one less: its 4 is 5 here.
    depth: int = parameter(
        5, "Drafted tokens on a draft tree's longest path.", unit="tokens", minimum=1, maximum=_MAX_NODES - 1
    )
    nodes: int = parameter(50, "Nodes of a draft tree, the root included.", minimum=1, maximum=_MAX_NODES)
    children: str = parameter(
        "top_k",
        "How children are chosen: the likeliest (top_k), or those whose tolerance covers most of the draft's mass "
        "(window_mass).",
        choices=CHILDREN,
    )
    whole_vocabulary: bool = parameter(
        False, "The head drafts among all ids, as published, not only those that the answer may have: slower."
    )
    drafters: Groups = groups(_drafter_settings)

    def __post_init__(self) -> None:
        check(self)
        if self.beam_nodes > _MAX_NODES:
            raise UserError(
                f"draft.top_k {self.top_k} with draft.depth {self.depth} takes {self.beam_nodes} nodes in one forward "
                f"of the draft head, which holds {_MAX_NODES}: lower one of them"
            )

    def head_directory(self, checkpoint: Path) -> Path | None:
        """Where the draft head of a checkpoint is looked for; None: nowhere."""
        if self.head == NO_HEAD:
            return None
        return Path(self.head).expanduser() if self.head else checkpoint / DRAFT_FOLDER

    @property
    def beam_nodes(self) -> int:
        """Nodes that the draft head itself runs over: all depths but the last."""
        return self.top_k * (self.depth - 1)


@dataclass(frozen=True)
class AcceptanceSettings:
    """Which drafted tokens are accepted.

    Raises:
        UserError: a value is out of range, or two do not fit together.
    """

    ROS_PREFIX: ClassVar[str] = "acceptance."

    rule: str = parameter(
        "strict",
        "Which drafted tokens are accepted; composite: bin_distance for actions, strict for numbers in text, fly for "
        "other text.",
        choices=_rules,
        writable=True,
    )
    bins: tuple[int, ...] = parameter(
        (0,),
        "Tolerance of bin_distance: one number for all moving dimensions, or one for each; of digits in units of a "
        "number's last place, of FAST tokens in steps of a coefficient.",
        unit="bins",
        minimum=0,
        maximum=_MAX_BINS,
        writable=True,
    )
    tolerance_m: float = parameter(
        0.0,
        "Tolerance of bin_distance for x, y, z, in place of bins; 0: none.",
        unit="m",
        minimum=0.0,
        maximum=1.0,
        writable=True,
    )
    tolerance_rad: float = parameter(
        0.0,
        "Tolerance of bin_distance for roll, pitch, yaw, in place of bins; 0: none.",
        unit="rad",
        minimum=0.0,
        maximum=3.2,
        writable=True,
    )
    gripper_bins: int = parameter(
        0,
        "Tolerance for dimensions that the checkpoint's statistics do not scale: the gripper.",
        unit="bins",
        minimum=0,
        maximum=_MAX_BINS,
        writable=True,
    )
    rules: Groups = groups(_rule_settings)

    def __post_init__(self) -> None:
        check(self)
        if not self.bins:
            raise UserError("acceptance.bins is empty: give one number, or one per action dimension")
        if any(self.bins) and (self.tolerance_m or self.tolerance_rad):
            raise UserError(
                "acceptance.bins and acceptance.tolerance_m / tolerance_rad say the same thing: set bins, or the others"
            )


Settings = TypeVar("Settings", DraftSettings, AcceptanceSettings)


def adjusted(settings: Settings, **values: Any) -> Settings:
    """The same settings with other values.

    Args:
        settings: of drafting or acceptance.
        values: by the parameter's name without prefix: `temporal=True` is draft.temporal.

    Raises:
        UserError: there is no such parameter, or a value is out of range.
    """
    paths = {declared.name.removeprefix(settings.ROS_PREFIX): declared.path for declared in walk(settings)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in paths:
            raise UserError(f"there is no parameter '{settings.ROS_PREFIX}{name}'; {hint(name, paths)}")
        field, *inner = paths[name]
        if not inner:
            changes[field] = value
            continue
        group, attribute = inner
        groups = changes.get(field, getattr(settings, field))
        changes[field] = Groups({**groups, group: replace(groups[group], **{attribute: value})})
    return replace(settings, **changes)
