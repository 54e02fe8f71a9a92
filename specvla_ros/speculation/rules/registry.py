# SPDX-License-Identifier: Apache-2.0
"""Registration of acceptance rules, and how the settings' choice is made.

A rule is one file: a class with `accept` (see AcceptanceRule) and a function that makes it, registered under the name
that `acceptance.rule` then takes. Its own parameters are a frozen dataclass in that file. Another package adds one with
an entry point of the group `specvla_ros.rules`.
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
    """Input to the function that makes a rule; `bins` is the tolerance per action token."""

    settings: AcceptanceSettings
    bins: tuple[int, ...]
    target: Target

    def own(self, name: str) -> Any:
        return self.settings.rules[name]

    def rule(self, name: str) -> AcceptanceRule:
        """Another rule, for one that is made of others."""
        return RULES.entries()[name].make(self)


def make_rule(settings: AcceptanceSettings, target: Target) -> AcceptanceRule:
    """The rule that settings describe for a policy; raises UserError as `bins_of` does."""
    bins = bins_of(settings, target)  # whatever the rule: drafting may count on the tolerance
    return RuleContext(settings, bins, target).rule(settings.rule)


def bins_of(settings: AcceptanceSettings, target: Target) -> tuple[int, ...]:
    """Tolerance in bins per action token; raises UserError if it does not fit the policy's action statistics."""
    codec = target.codec
    if settings.tolerance_m or settings.tolerance_rad:
        return codec.bins_within(
            metres=settings.tolerance_m, radians=settings.tolerance_rad, gripper_bins=settings.gripper_bins
        )
    return codec.spread_bins(settings.bins, settings.gripper_bins)
