# SPDX-License-Identifier: Apache-2.0
"""How far a policy's clock is ahead of the robot's, from the actions that come back: NTP's on-wire protocol.

An image leaves with the robot's clock as its stamp (T1), arrives (T2) and is answered (T3) by the policy's clock, and
its action arrives by the robot's (T4). The offset is ((T2 - T1) + (T3 - T4)) / 2, and wrong by at most half of what
both ways take, since neither takes less than nothing (RFC 5905, sections 8 and 10: of the newest samples that with
the shortest way counts).
"""

from collections import deque
from dataclasses import dataclass

_SAMPLES = 8  # NTP's clock filter


@dataclass(frozen=True, order=True)
class Offset:
    """An estimate; those of shorter ways compare as smaller.

    Args:
        error_s: by how much it can be wrong.
        ahead_s: of the policy's clock before the robot's.
    """

    error_s: float
    ahead_s: float

    @property
    def apart(self) -> bool:
        """Whether the clocks differ for certain."""
        return abs(self.ahead_s) > self.error_s


class ClockOffset:
    """Estimates the offset of the newest actions."""

    def __init__(self) -> None:
        self._samples: deque[Offset] = deque(maxlen=_SAMPLES)

    def add(self, *, receive_s: float, latency_s: float, age_s: float) -> None:
        """Takes an action in.

        Args:
            receive_s: image's stamp to its arrival at the policy, on the policy's clock: T2 - T1.
            latency_s: image's stamp to the action's publication, on the policy's clock: T3 - T1.
            age_s: image's stamp to the action's arrival, on the robot's clock: T4 - T1.
        """
        back_s = age_s - latency_s
        self._samples.append(Offset(error_s=(receive_s + back_s) / 2, ahead_s=(receive_s - back_s) / 2))

    @property
    def best(self) -> Offset | None:
        """The estimate with the smallest error; None of none."""
        return min(self._samples, default=None)
