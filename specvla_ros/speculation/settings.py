"""Settings of speculation; without torch, so that a node can check them before anything is loaded."""

import math
from dataclasses import dataclass

from specvla_ros.errors import UserError

CHILDREN = ("top_k", "window_mass")
NO_HEAD = "none"
LEAST_IMAGE_SHARE = 0.001
_MOST_NODES = 64  # a node's ancestors are the bits of one int64


@dataclass(frozen=True)
class DraftSettings:
    """Where drafted tokens come from.

    Args:
        head: directory of the draft head; empty: the folder `draft` of the checkpoint if there is one; `none`: no head.
        fallback_to_ar: decode plainly, with a warning, when no draft can be had.
        top_k: children per node that are considered.
        depth: drafted tokens on the longest path. EAGLE's and Spec-VLA's code counts one less: its 4 is 5 here.
        nodes: of the tree, the root included.
        children: `top_k`, the likeliest; `window_mass`, those whose tolerance covers most of the draft's mass.
        temporal: draft the previous action too, held and extrapolated.
        prompt_lookup_tokens: drafted by looking the last tokens up in prompt and answer; 0: none.
        self_tokens: drafted by the target itself with a share of the image; 0: none.
        self_image_share: of the image's tokens that the target drafts with.

    Raises:
        UserError: a value is out of range, or two do not fit together.
    """

    head: str = ""
    fallback_to_ar: bool = False
    top_k: int = 8
    depth: int = 5
    nodes: int = 50
    children: str = "top_k"
    temporal: bool = False
    prompt_lookup_tokens: int = 0
    self_tokens: int = 0
    self_image_share: float = 0.1

    def __post_init__(self) -> None:
        if self.children not in CHILDREN:
            raise UserError(f"draft.children is '{self.children}', but it must be one of: {', '.join(CHILDREN)}")
        for name, low, high in (("top_k", 1, 64), ("depth", 1, 63), ("nodes", 1, _MOST_NODES)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"draft.{name} must be {low} to {high}, got {getattr(self, name)}")
        for name in ("prompt_lookup_tokens", "self_tokens"):
            if not 0 <= getattr(self, name) < _MOST_NODES:
                raise UserError(f"draft.{name} must be 0 to {_MOST_NODES - 1}, got {getattr(self, name)}")
        if not LEAST_IMAGE_SHARE <= self.self_image_share <= 1:
            raise UserError(f"draft.self_image_share must be {LEAST_IMAGE_SHARE} to 1, got {self.self_image_share}")
        if self.beam_nodes > _MOST_NODES:
            raise UserError(
                f"draft.top_k {self.top_k} with draft.depth {self.depth} takes {self.beam_nodes} nodes in one forward "
                f"of the draft head, which holds {_MOST_NODES}: lower one of them"
            )

    @property
    def beam_nodes(self) -> int:
        """Nodes that the draft head itself runs over: all levels but the last."""
        return self.top_k * (self.depth - 1)


RULES = ("strict", "bin_distance", "fly", "lvspec", "composite")
ENTROPIES = ("paper", "code")
_MOST_BINS = 254


@dataclass(frozen=True)
class AcceptanceSettings:
    """Which drafted tokens are taken.

    Args:
        rule: one of RULES; `composite`: bin_distance for actions, strict for numbers in text, fly for other text.
        bins: tolerance of bin_distance: one number for all moving dimensions, or one per dimension.
        tolerance_m: for x, y, z in metres, in place of `bins`; 0: none.
        tolerance_rad: for roll, pitch, yaw in radians, in place of `bins`; 0: none.
        gripper_bins: for dimensions that the checkpoint's statistics do not scale.
        fly_theta, fly_window, fly_entropy: see Fly.
        lvspec_loose_share, lvspec_top_n, lvspec_shift: see LVSpec.

    Raises:
        UserError: a value is out of range, or two do not fit together.
    """

    rule: str = "strict"
    bins: tuple[int, ...] = (0,)
    tolerance_m: float = 0.0
    tolerance_rad: float = 0.0
    gripper_bins: int = 0
    fly_theta: float = 0.3
    fly_window: int = 2
    fly_entropy: str = "paper"
    lvspec_loose_share: float = 0.3
    lvspec_top_n: int = 8
    lvspec_shift: int = 1

    def __post_init__(self) -> None:
        _choice("acceptance.rule", self.rule, RULES)
        _choice("acceptance.fly_entropy", self.fly_entropy, ENTROPIES)
        if not self.bins:
            raise UserError("acceptance.bins is empty: give one number, or one per action dimension")
        for name, value, low, high in (
            *(("bins", each, 0, _MOST_BINS) for each in self.bins),
            ("gripper_bins", self.gripper_bins, 0, _MOST_BINS),
            ("tolerance_m", self.tolerance_m, 0, math.inf),
            ("tolerance_rad", self.tolerance_rad, 0, math.inf),
            ("fly_theta", self.fly_theta, 0, math.inf),
            ("fly_window", self.fly_window, 1, math.inf),
            ("lvspec_loose_share", self.lvspec_loose_share, 0, 1),
            ("lvspec_top_n", self.lvspec_top_n, 1, math.inf),
            ("lvspec_shift", self.lvspec_shift, 0, math.inf),
        ):
            if not low <= value <= high or math.isinf(value):
                most = f" to {high}" if high < math.inf else " or more"
                raise UserError(f"acceptance.{name} must be {low}{most}, got {value}")
        if any(self.bins) and (self.tolerance_m or self.tolerance_rad):
            raise UserError(
                "acceptance.bins and acceptance.tolerance_m / tolerance_rad say the same thing: set bins, or the others"
            )


def _choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} is '{value}', but it must be one of: {', '.join(known)}")
