# SPDX-License-Identifier: Apache-2.0
"""From what a user asks for, in bins or in metres and radians, to the rule of a policy."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import bins_of, load_openvla
from support.random_checkpoint import write_random_checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionTokenizer
from specvla_ros.models.codecs.statistics import ActionStatistics, spread_bins, tolerance_in_bins
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.composite import Composite, number_tokens
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.lvspec import LVSpec
from specvla_ros.speculation.rules.registry import make_rule
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.settings import AcceptanceSettings, adjusted

MOVING = [True] * 6 + [False]


def statistics(ranges: list[float], mask: list[bool] | None = None) -> ActionStatistics:
    high = np.array(ranges, dtype=np.float64) / 2
    return ActionStatistics("table", -high, high, np.array(MOVING if mask is None else mask))


def bins(stats: ActionStatistics, metres: float = 0.0, radians: float = 0.0, gripper_bins: int = 0) -> tuple[int, ...]:
    return tolerance_in_bins(stats, 255, metres=metres, radians=radians, gripper_bins=gripper_bins)


def test_metres_are_for_positions_and_radians_for_rotations() -> None:
    stats = statistics([0.255, 0.51, 2.55, 0.255, 0.51, 2.55, 1])  # bins of 1 mm, 2 mm, 1 cm; the same in rad
    assert bins(stats, metres=0.02) == (20, 10, 2, 0, 0, 0, 0)
    assert bins(stats, radians=0.029) == (0, 0, 0, 29, 14, 2, 0), "rounded down"
    assert bins(stats, metres=0.02, radians=0.01, gripper_bins=3) == (20, 10, 2, 10, 5, 1, 3)


@given(st.lists(st.floats(0.01, 10), min_size=6, max_size=6), st.floats(1.0, 300.0))
def test_tokens_so_many_bins_apart_are_within_the_tolerance(ranges: list[float], widths: float) -> None:
    stats = statistics([*ranges, 1.0])
    tokenizer = ActionTokenizer(32000)
    tolerance = widths * max(ranges) / 255
    for dimension, r in enumerate(bins(stats, metres=tolerance, radians=tolerance)[:6]):
        apart = np.tile(tokenizer.decode([31999, 31999 - r, 31999 - min(r + 1, 254)])[:, None], 7)
        low, kept, beyond = stats.unnormalise(apart)[:, dimension]
        assert kept - low <= tolerance * (1 + 1e-9)
        assert r == 254 or beyond - low > tolerance * (1 - 1e-9), "one bin more would be too far"


@given(st.floats(1e-6, 1e3), st.sampled_from([0, 1, 2, 3, 4, 5]))
def test_the_least_tolerance_that_the_message_names_is_taken(width: float, dimension: int) -> None:
    ranges = [0.0] * 6 + [1.0]
    ranges[dimension] = width * 255
    stats = statistics(ranges)

    def least_bins(value: float) -> tuple[int, ...]:
        return bins(stats, metres=value) if dimension < 3 else bins(stats, radians=value)

    with pytest.raises(UserError, match=f"smaller than one bin of {stats.names[dimension]}") as refused:
        least_bins(width / 2)
    named = re.search(r"set it to (\S+) (?:m|rad) or more", str(refused.value))
    assert named
    assert least_bins(float(named[1]))[dimension] >= 1
    assert math.isclose(float(named[1]), width, rel_tol=2e-3)


def test_a_dimension_that_never_moved_is_strict_and_never_refused() -> None:
    assert bins(statistics([0.255, 0, 0.255, 0, 0, 0, 1]), metres=0.005, radians=0.1) == (5, 0, 5, 0, 0, 0, 0)


def test_no_tolerance_is_more_than_all_bins() -> None:
    assert bins(statistics([0.255] * 6 + [1]), metres=1e6) == (254, 254, 254, 0, 0, 0, 0)


def test_actions_without_units_take_bins_only() -> None:
    with pytest.raises(UserError, match=r"set acceptance\.bins instead"):
        bins(statistics([1.0] * 4, [True] * 4), metres=0.1)


def test_one_number_is_for_what_moves_and_a_list_is_as_given() -> None:
    assert spread_bins([5], MOVING, 0) == (5,) * 6 + (0,)
    assert spread_bins([5], MOVING, 2) == (5,) * 6 + (2,)
    assert spread_bins([1, 2, 3, 4, 5, 6, 7], MOVING, 0) == (1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(UserError, match=r"acceptance\.bins has 2 numbers, but the action has 7"):
        spread_bins([5, 5], MOVING, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(rule="loose"), r"acceptance\.rule is 'loose', but it must be one of: strict"),
        (dict(fly_entropy="top3"), r"acceptance\.fly_entropy"),
        (dict(bins=()), r"acceptance\.bins is empty"),
        (dict(bins=(5, -1)), r"acceptance\.bins must be 0 to 254, got -1"),
        (dict(bins=(255,)), r"acceptance\.bins must be 0 to 254, got 255"),
        (dict(gripper_bins=-1), r"acceptance\.gripper_bins"),
        (dict(tolerance_m=-0.1), r"acceptance\.tolerance_m must be 0 to 1"),
        (dict(tolerance_m=math.nan), r"acceptance\.tolerance_m .* got nan"),
        (dict(tolerance_rad=math.inf), r"acceptance\.tolerance_rad .* got inf"),
        (dict(fly_theta=math.nan), r"acceptance\.fly_theta"),
        (dict(fly_window=-1), r"acceptance\.fly_window must be 0 to 32"),
        (dict(lvspec_loose_share=1.1), r"acceptance\.lvspec_loose_share must be 0 to 1"),
        (dict(lvspec_top_n=0), r"acceptance\.lvspec_top_n"),
        (dict(lvspec_shift=-1), r"acceptance\.lvspec_shift"),
        (dict(bins=(5,), tolerance_rad=0.1), "are exclusive"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adjusted(AcceptanceSettings(), **wrong)


def test_numbers_are_the_ids_whose_text_holds_a_digit() -> None:
    words = {"move": 0, "5": 1, "x2": 2, "\u2581to": 3, "\u06632": 4}
    assert number_tokens(Tokenizer(WordLevel(words, "move")), 6).tolist() == [False, True, True, False, True, False]
    assert not number_tokens(None, 6).any()
    assert number_tokens(Tokenizer(WordLevel(words, "move")), 4).tolist() == [False, True, True, False], (
        "PaliGemma's tokenizer has an id that the model has no logit for"
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    directory = tmp_path_factory.mktemp("policy")
    write_random_checkpoint(directory, hidden_size=64, layers=1)
    return load_openvla(directory, device="cpu")


def test_settings_make_the_rule_that_they_name(policy: OpenVLATarget) -> None:
    near = spread_bins([4], bins_of(policy).statistics.mask.tolist(), 1)
    assert make_rule(AcceptanceSettings(), policy) == Strict()
    assert make_rule(AcceptanceSettings("bin_distance", (4,), gripper_bins=1), policy) == BinDistance(near)
    fly = adjusted(AcceptanceSettings("fly"), fly_theta=0.2, fly_window=3, fly_entropy="code")
    assert make_rule(fly, policy) == Fly(0.2, 3, "code")
    lvspec = adjusted(AcceptanceSettings("lvspec"), lvspec_loose_share=0.1, lvspec_top_n=2, lvspec_shift=0)
    assert make_rule(lvspec, policy) == LVSpec(0.1, 2, 0)
    composite = make_rule(adjusted(AcceptanceSettings("composite", (4,), gripper_bins=1), fly_theta=0.2), policy)
    assert isinstance(composite, Composite)
    assert (composite.action, composite.text) == (BinDistance(near), Fly(0.2, 2, "paper"))
    assert len(composite.numbers) == policy.decoder.config.vocab_size
