"""Limits that a replay must keep."""

import math
from dataclasses import dataclass, fields

from specvla_ros.errors import UserError


@dataclass(frozen=True)
class Thresholds:
    """Limits; None: not checked.

    Args:
        max_p95_latency_s: of the image in this process to its action.
        max_drop_fraction: frames without an action, of all frames, 0 to 1.
        max_bin_distance: mean over frames and dimensions of the distance to the recorded action, in bins: a dimension
            has 255 of them, so that metres, radians and gripper weigh the same.
        min_action_rate_hz: actions per second of decoding.

    Raises:
        UserError: a limit is negative, not finite, or a fraction above 1.
    """

    max_p95_latency_s: float | None = None
    max_drop_fraction: float | None = None
    max_bin_distance: float | None = None
    min_action_rate_hz: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            limit = getattr(self, each.name)
            if limit is not None and not (math.isfinite(limit) and limit >= 0):
                raise UserError(f"the limit {each.name} must be a number from 0 on, got {limit}")
        if self.max_drop_fraction is not None and self.max_drop_fraction > 1:
            raise UserError(f"the limit max_drop_fraction is a fraction from 0 to 1, got {self.max_drop_fraction}")
