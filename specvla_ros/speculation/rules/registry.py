"""From settings to the rule that they describe for a policy."""

from specvla_ros.models.target import Target
from specvla_ros.speculation.accept import AcceptanceRule
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.composite import Composite, number_tokens
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.lvspec import LVSpec
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.settings import AcceptanceSettings


def make_rule(settings: AcceptanceSettings, policy: Target) -> AcceptanceRule:
    """The rule.

    Raises:
        UserError: the tolerance does not fit the policy's action statistics.
    """
    bins = bins_of(settings, policy)  # whatever the rule: drafting may count on the tolerance
    if settings.rule == "strict":
        return Strict()
    if settings.rule == "fly":
        return Fly(settings.fly_theta, settings.fly_window, settings.fly_entropy)
    if settings.rule == "lvspec":
        return LVSpec(settings.lvspec_loose_share, settings.lvspec_top_n, settings.lvspec_shift)
    near = BinDistance(bins)
    if settings.rule == "bin_distance":
        return near
    text = Fly(settings.fly_theta, settings.fly_window, settings.fly_entropy)
    numbers = number_tokens(policy.tokenizer, policy.decoder.config.vocab_size)
    return Composite(near, text, numbers.to(policy.decoder.device))


def bins_of(settings: AcceptanceSettings, policy: Target) -> tuple[int, ...]:
    """Tolerance in bins per action dimension.

    Raises:
        UserError: it does not fit the policy's action statistics.
    """
    codec = policy.codec
    if settings.tolerance_m or settings.tolerance_rad:
        return codec.bins_within(
            metres=settings.tolerance_m, radians=settings.tolerance_rad, gripper_bins=settings.gripper_bins
        )
    return codec.spread_bins(settings.bins, settings.gripper_bins)
