"""Settings of speculation; without torch, so that a node can check them before anything is loaded."""

from dataclasses import dataclass
from typing import ClassVar

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter

CHILDREN = ("top_k", "window_mass")
NO_HEAD = "none"
RULES = ("strict", "bin_distance", "fly", "lvspec", "composite")
ENTROPIES = ("paper", "code")
_MAX_NODES = 64  # a node's ancestors are the bits of one int64
_MAX_BINS = 254


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
    temporal: bool = parameter(False, "Draft the previous action too, held and extrapolated.")
    prompt_lookup_tokens: int = parameter(
        0,
        "Tokens drafted by looking the last ones up in prompt and answer; 0: none. For policies that write text.",
        unit="tokens",
        minimum=0,
        maximum=_MAX_NODES - 1,
    )
    self_tokens: int = parameter(
        0,
        "Tokens drafted by the policy itself with few image tokens, a forward each; 0: none. For policies that write "
        "text.",
        unit="tokens",
        minimum=0,
        maximum=_MAX_NODES - 1,
    )
    self_image_share: float = parameter(
        0.1, "Share of the image's tokens that draft.self_tokens are drafted with.", minimum=0.001, maximum=1.0
    )

    def __post_init__(self) -> None:
        check(self)
        if self.beam_nodes > _MAX_NODES:
            raise UserError(
                f"draft.top_k {self.top_k} with draft.depth {self.depth} takes {self.beam_nodes} nodes in one forward "
                f"of the draft head, which holds {_MAX_NODES}: lower one of them"
            )

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
        choices=RULES,
        writable=True,
    )
    bins: tuple[int, ...] = parameter(
        (0,),
        "Tolerance of bin_distance: one number for all moving dimensions, or one for each.",
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
    fly_theta: float = parameter(
        0.3, "FLy: entropy from which on a mismatch may be deferred.", minimum=0.0, maximum=10.0, writable=True
    )
    fly_window: int = parameter(
        2,
        "FLy: tokens after a mismatch that must agree.",
        unit="tokens",
        minimum=1,
        maximum=32,
        writable=True,
    )
    fly_entropy: str = parameter(
        "paper",
        "FLy: which entropy: as its paper defines it, or as its code computes it.",
        choices=ENTROPIES,
        writable=True,
    )
    lvspec_loose_share: float = parameter(
        0.3,
        "LVSpec: share of the drafted tokens, those that depend least on the image, that are accepted as they are.",
        minimum=0.0,
        maximum=1.0,
        writable=True,
    )
    lvspec_top_n: int = parameter(
        8, "LVSpec: image tokens whose similarity is averaged.", minimum=1, maximum=4096, writable=True
    )
    lvspec_shift: int = parameter(
        1,
        "LVSpec: positions by which a drafted token may be off.",
        unit="tokens",
        minimum=0,
        maximum=16,
        writable=True,
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.bins:
            raise UserError("acceptance.bins is empty: give one number, or one per action dimension")
        if any(self.bins) and (self.tolerance_m or self.tolerance_rad):
            raise UserError(
                "acceptance.bins and acceptance.tolerance_m / tolerance_rad say the same thing: set bins, or the others"
            )
