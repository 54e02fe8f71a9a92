# SPDX-License-Identifier: Apache-2.0
"""Settings of speculation. Needs no torch, so that a node can check them before loading anything.

Each rule and drafter declares its settings in its own file; they appear here as a group with its name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import Groups, check, groups, hint, parameter, replaced, walk
from specvla_ros.settings.registry import Registry

# The rules and drafters of this package, by name; other packages add theirs through entry points.
RULES = Registry(
    "specvla_ros.rules",
    [f"specvla_ros.speculation.rules.{name}" for name in ("strict", "bin_distance", "fly", "lvspec", "composite")],
)
# Drafters take nodes of a tree in their order; a drafter that takes all remaining nodes comes last.
DRAFTERS = Registry(
    "specvla_ros.drafters",
    [
        f"specvla_ros.speculation.drafters.{name}"
        for name in ("chunk_shift", "temporal", "prompt_lookup", "self_drafter", "model_drafter", "eagle")
    ],
)

CHILDREN = ("top_k", "window_mass")
NO_HEAD = "none"
DRAFT_FOLDER = "draft"
_MAX_NODES = 64  # a node's ancestors are the bits of one int64
_MAX_BINS = 254


def branch_rank(hidden: int) -> int:
    """Rank of what a path changes in the states, `hidden` wide, of a head that drafts in one forward."""
    return max(1, hidden // 4)


@dataclass(frozen=True)
class DraftSettings:
    """The sources of drafted tokens. Raises UserError if a value is out of range or two values conflict."""

    ROS_PREFIX: ClassVar[str] = "draft."

    head: str = parameter(
        "",
        "Directory of the draft head; empty: the checkpoint's `draft` folder if it exists; none: no head.",
        basic=True,
    )
    fallback_to_ar: bool = parameter(False, "Decode plainly, with a warning, if no drafter is available.")
    top_k: int = parameter(8, "Number of children considered per node of a draft tree.", minimum=1, maximum=_MAX_NODES)
    # EAGLE's and Spec-VLA's code counts one less: 4 there is 5 here.
    depth: int = parameter(
        5, "Max drafted tokens on a path of a draft tree.", unit="tokens", minimum=1, maximum=_MAX_NODES - 1
    )
    nodes: int = parameter(50, "Max nodes of a draft tree, root included.", minimum=1, maximum=_MAX_NODES, basic=True)
    children: str = parameter(
        "top_k",
        "How children are chosen: the most likely tokens (top_k), or those whose tolerance windows together cover most "
        "of the draft's probability (window_mass).",
        choices=CHILDREN,
    )
    whole_vocabulary: bool = parameter(
        False, "Let the head draft from all ids, as published, instead of only those possible in an answer; slower."
    )
    drafters: Groups = groups(DRAFTERS.settings)

    def __post_init__(self) -> None:
        check(self)
        if self.beam_nodes > _MAX_NODES:
            raise UserError(
                f"draft.top_k {self.top_k} with draft.depth {self.depth} takes {self.beam_nodes} nodes in one forward "
                f"of the draft head, but the maximum is {_MAX_NODES}: lower one of them"
            )

    def head_directory(self, checkpoint: Path) -> Path | None:
        """The directory to search for a checkpoint's draft head; None for no head."""
        if self.head == NO_HEAD:
            return None
        return Path(self.head).expanduser() if self.head else checkpoint / DRAFT_FOLDER

    @property
    def beam_nodes(self) -> int:
        """Number of nodes that the draft head itself processes: all depths but the last."""
        return self.top_k * (self.depth - 1)


@dataclass(frozen=True)
class AcceptanceSettings:
    """The conditions for accepting drafted tokens. Raises UserError as DraftSettings does."""

    ROS_PREFIX: ClassVar[str] = "acceptance."

    rule: str = parameter(
        "strict",
        "Acceptance rule for drafted tokens. strict: only the policy's own choice, so that only rounding may change an "
        "answer (decode.mode). composite: bin_distance for actions, strict for numbers in text, fly for other text.",
        choices=RULES.names,
        writable=True,
        basic=True,
    )
    bins: tuple[int, ...] = parameter(
        (0,),
        "Tolerance of bin_distance: one number for all motion dimensions, or one per dimension. For digits in units of "
        "a number's last place, for FAST tokens in steps of a coefficient.",
        unit="bins",
        minimum=0,
        maximum=_MAX_BINS,
        writable=True,
    )
    tolerance_m: float = parameter(
        0.0,
        "Tolerance of bin_distance for x, y, z, instead of bins; 0: none.",
        unit="m",
        minimum=0.0,
        maximum=1.0,
        writable=True,
        basic=True,
    )
    tolerance_rad: float = parameter(
        0.0,
        "Tolerance of bin_distance for roll, pitch, yaw, instead of bins; 0: none.",
        unit="rad",
        minimum=0.0,
        maximum=3.2,
        writable=True,
        basic=True,
    )
    gripper_bins: int = parameter(
        0,
        "Tolerance for the gripper, and for dimensions not scaled by the checkpoint's statistics.",
        unit="bins",
        minimum=0,
        maximum=_MAX_BINS,
        writable=True,
    )
    rules: Groups = groups(RULES.settings)

    def __post_init__(self) -> None:
        check(self)
        if not self.bins:
            raise UserError("acceptance.bins is empty: give one number, or one per action dimension")
        if any(self.bins) and (self.tolerance_m or self.tolerance_rad):
            raise UserError(
                "acceptance.bins and acceptance.tolerance_m / tolerance_rad are exclusive: set bins, or the others"
            )


Settings = TypeVar("Settings", DraftSettings, AcceptanceSettings)


def adjusted(settings: Settings, **values: Any) -> Settings:
    """Returns the settings with values changed, by parameter name without prefix: `temporal=True` is draft.temporal.

    Raises UserError if there is no such parameter or a value is out of range.
    """
    paths = {declared.name.removeprefix(settings.ROS_PREFIX): declared.path for declared in walk(settings)}
    for name in values:
        if name not in paths:
            raise UserError(f"there is no parameter '{settings.ROS_PREFIX}{name}'; {hint(name, paths)}")
    made: Settings = replaced(settings, {paths[name]: value for name, value in values.items()})
    return made


_STRICT = ("0", "strict")
_PART = re.compile(r"([0-9.]+)\s*(mm|deg|bins?)")
_EXAMPLE = "write it as 2mm,1.1deg, or 2mm, or 1deg, or 5bins"


@dataclass(frozen=True, order=True)
class Tolerance:
    """Max distance of an action token from the target's own choice; tolerances are ordered by mm first."""

    mm: float = 0.0  # for x, y, z; 0: strict
    degrees: float = 0.0  # for roll, pitch, yaw
    bins: int = 0  # for every motion dimension, instead of both

    @staticmethod
    def parse(text: str) -> "Tolerance":
        """Parses a tolerance; `0` and `strict` mean none. Raises UserError for any other invalid text."""
        if not isinstance(text, str):
            raise UserError(f"a tolerance must be a string, got {text!r}; {_EXAMPLE}")
        if text.strip() in _STRICT:
            return Tolerance()
        found: dict[str, float] = {}
        for part in text.replace(" ", "").split(","):
            match = _PART.fullmatch(part)
            try:
                number = float(match[1]) if match else math.nan
            except ValueError:
                number = math.nan
            unit = match[2].removesuffix("s") if match else ""
            if not number > 0 or unit in found:
                raise UserError(f"invalid tolerance '{text}'; {_EXAMPLE}")
            found[unit] = number
        if "bin" in found and (len(found) > 1 or not found["bin"].is_integer()):
            raise UserError(f"invalid tolerance '{text}': bins must be a whole number without other parts; {_EXAMPLE}")
        return Tolerance(found.get("mm", 0.0), found.get("deg", 0.0), int(found.get("bin", 0)))

    @property
    def acceptance(self) -> AcceptanceSettings:
        if self == Tolerance():
            return AcceptanceSettings()
        if self.bins:
            return AcceptanceSettings("bin_distance", bins=(self.bins,))
        metres, radians = round(self.mm * 1e-3, 9), round(math.radians(self.degrees), 6)
        return AcceptanceSettings("bin_distance", tolerance_m=metres, tolerance_rad=radians)

    def __str__(self) -> str:
        parts = [(self.mm, "mm"), (self.degrees, "deg"), (self.bins, "bins")]
        return ",".join(f"{number:g}{unit}" for number, unit in parts if number) or _STRICT[1]


def _spec_vla(r: int) -> dict[str, Any]:
    """Spec-VLA, section 5.1 and table 4: r bins for every token including the gripper's, 50 nodes, top-8.

    The tree depth is 4 in the text and 5 in the table, since its code counts the root's children as depth 0. The text
    does not say which ids are drafted; the code takes the most likely of all.
    """
    tree = {"draft.top_k": 8, "draft.depth": 5, "draft.nodes": 50}
    children = {"draft.children": "top_k", "draft.whole_vocabulary": True}
    rule = {"acceptance.rule": "bin_distance", "acceptance.bins": (r,), "acceptance.gripper_bins": r}
    return {**rule, **tree, **children}


def _fly(k: int) -> dict[str, Any]:
    """FLy: W = 6, theta = 0.3, and a chain of K tokens from a draft model, itself accelerated by prompt lookup.

    The text does not say how many tokens a lookup drafts; 10 is prompt lookup decoding's own number.
    """
    numbers = {"acceptance.fly_theta": 0.3, "acceptance.fly_window": 6, "acceptance.fly_entropy": "paper"}
    return {"acceptance.rule": "fly", **numbers, **_chain(k), "draft.model_lookup_tokens": 10}


def _lvspec() -> dict[str, Any]:
    """LVSpec, section 4: lambda = 0.7, N = 10, K = 10, and an unbounded position shift.

    Its two drafters, a smaller model (Std.-SD) and the target itself (Self-SD), see a tenth of the image's tokens,
    evenly spaced. The drafter and the smaller model's directory are set in addition to the preset. A model loaded by
    `draft.model` sees the whole image.
    """
    numbers = {"acceptance.lvspec_loose_share": 0.7, "acceptance.lvspec_top_n": 10, "acceptance.lvspec_shift": 63}
    pruned = {"draft.self_image_share": 0.1, "draft.self_keep": "uniform"}
    return {"acceptance.rule": "lvspec", **numbers, **_chain(10), **pruned}


def _chain(k: int) -> dict[str, Any]:
    return {"draft.head": "none", "draft.nodes": 1 + k, "draft.model_tokens": k}


# The papers' values of parameters, by full name. They are separate from a rule's defaults, which are chosen for robots.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "spec-vla-paper": _spec_vla(9),
    "spec-vla-paper-long": _spec_vla(5),  # LIBERO-Long
    "fly-paper": _fly(15),  # a 70B target
    "fly-paper-405b": _fly(25),
    "lvspec-paper": _lvspec(),
}
