# SPDX-License-Identifier: Apache-2.0
"""A tolerance as users write it: 2mm,1.1deg, or 5bins, or strict."""

import math
import re
from dataclasses import dataclass

from specvla_ros.errors import UserError
from specvla_ros.speculation.settings import AcceptanceSettings

_STRICT = ("0", "strict")
_PART = re.compile(r"([0-9.]+)\s*(mm|deg|bins?)")
_EXAMPLE = "write it as 2mm,1.1deg, or 2mm, or 1deg, or 5bins"


@dataclass(frozen=True, order=True)
class Tolerance:
    """How far an action token may be from the target's own choice; of two, the one with more mm is the larger.

    Args:
        mm: of x, y, z; 0: strict.
        degrees: of roll, pitch, yaw; 0: strict.
        bins: of every moving dimension, in place of the others.
    """

    mm: float = 0.0
    degrees: float = 0.0
    bins: int = 0

    @staticmethod
    def parse(text: str) -> "Tolerance":
        """Reads one; `0` and `strict` are none.

        Raises:
            UserError: it cannot be read.
        """
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
                raise UserError(f"'{text}' is no tolerance; {_EXAMPLE}")
            found[unit] = number
        if "bin" in found and (len(found) > 1 or not found["bin"].is_integer()):
            raise UserError(f"'{text}' is no tolerance: bins are whole, and stand alone; {_EXAMPLE}")
        return Tolerance(found.get("mm", 0.0), found.get("deg", 0.0), int(found.get("bin", 0)))

    @property
    def acceptance(self) -> AcceptanceSettings:
        """As the engine takes it."""
        if self == Tolerance():
            return AcceptanceSettings()
        if self.bins:
            return AcceptanceSettings("bin_distance", bins=(self.bins,))
        metres, radians = round(self.mm * 1e-3, 9), round(math.radians(self.degrees), 6)
        return AcceptanceSettings("bin_distance", tolerance_m=metres, tolerance_rad=radians)

    def __str__(self) -> str:
        parts = [(self.mm, "mm"), (self.degrees, "deg"), (self.bins, "bins")]
        return ",".join(f"{number:g}{unit}" for number, unit in parts if number) or _STRICT[1]
