"""Settings of the acceptance; without torch, so that a node can check its parameters before anything is loaded."""

import math
from dataclasses import dataclass

from specvla_ros.errors import UserError

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
