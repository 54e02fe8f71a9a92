# SPDX-License-Identifier: Apache-2.0
"""Registration of acceptance rules, and construction of the rule chosen by the settings.

A rule is one file: a class with `accept` (see AcceptanceRule) and a factory function, registered under the name that
`acceptance.rule` selects. Its parameters are a frozen dataclass in that file. Other packages add rules with entry
points of the group `specvla_ros.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specvla_ros.speculation.settings import RULES

if TYPE_CHECKING:
    from specvla_ros.models.target import Target
    from specvla_ros.speculation.accept import AcceptanceRule
    from specvla_ros.speculation.settings import AcceptanceSettings

rule = RULES.register


@dataclass(frozen=True)
class RuleContext:
    """Input to a rule's factory function; `bins` is the tolerance per action token."""

    settings: AcceptanceSettings
    bins: tuple[int, ...]
    target: Target

    def own(self, name: str) -> Any:
        return self.settings.rules[name]

    def rule(self, name: str) -> AcceptanceRule:
        """Makes another rule, for rules composed of others."""
        return RULES.entries()[name].make(self)


def make_rule(settings: AcceptanceSettings, target: Target) -> AcceptanceRule:
    """Makes the rule chosen by the settings for a policy; raises UserError as `bins_of` does."""
    bins = bins_of(settings, target)  # for any rule, since drafting may use the tolerance
    return RuleContext(settings, bins, target).rule(settings.rule)


def bins_of(settings: AcceptanceSettings, target: Target) -> tuple[int, ...]:
    """The tolerance in bins per action token; raises UserError if it does not fit the policy's action statistics."""
    codec = target.codec
    if settings.tolerance_m or settings.tolerance_rad:
        return codec.bins_within(
            metres=settings.tolerance_m, radians=settings.tolerance_rad, gripper_bins=settings.gripper_bins
        )
    return codec.spread_bins(settings.bins, settings.gripper_bins)
