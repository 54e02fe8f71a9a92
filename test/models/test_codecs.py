# SPDX-License-Identifier: Apache-2.0
"""Actions in bins and their statistics, held against plain readings: where an answer ends, and what it stands for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.statistics import (
    ActionStatistics,
    select_statistics,
    spread_bins,
    tolerance_in_bins,
)

VOCAB, BINS, DIMS, END = 100, 11, 3, 2
TOKENIZER = ActionTokenizer(VOCAB, BINS)
LOW, HIGH = np.array([-0.2, 0.0, 0.0]), np.array([0.2, 1.0, 1.0])
STATISTICS = ActionStatistics("here", LOW, HIGH, np.array([True, True, False]))
PLAIN = BinsCodec(TOKENIZER, STATISTICS)
TEXT = BinsCodec(TOKENIZER, STATISTICS, max_text=4)
ENDED = BinsCodec(TOKENIZER, STATISTICS, max_text=4, end_ids=frozenset({END}))
WORD, FIRST = 7, VOCAB - BINS


def test_the_last_ids_are_the_lowest_values() -> None:
    assert [TOKENIZER.is_action(i) for i in (FIRST - 1, FIRST, VOCAB - 1, VOCAB)] == [False, True, True, False]
    assert PLAIN.action_ids.first == FIRST and PLAIN.action_ids.stop == VOCAB and PLAIN.action_ids.bins == BINS - 1
    centres = [-1 + (2 * i + 1) / (BINS - 1) for i in range(BINS - 1)]
    assert TOKENIZER.decode(range(VOCAB - 1, FIRST, -1)) == pytest.approx(centres)
    assert TOKENIZER.decode([FIRST, 0, VOCAB + 5]) == pytest.approx([centres[-1], centres[-1], centres[0]])
    for i, centre in enumerate(centres):
        assert TOKENIZER.encode(np.array(centre)) == VOCAB - 1 - i
    assert TOKENIZER.encode(np.array([-9.0, 9.0])).tolist() == [VOCAB - 1, FIRST]


def test_an_action_is_scaled_but_where_it_is_masked() -> None:
    tokens = (VOCAB - 1, VOCAB - 5, VOCAB - 10)  # centres -0.9, -0.1, 0.9
    assert PLAIN.decode(tokens) == pytest.approx(np.array([[-0.18, 0.45, 0.9]]))
    assert PLAIN.encode(PLAIN.decode(tokens)) == tokens
    assert PLAIN.bound([1, 2, 1]) == pytest.approx(np.array([[0.04, 0.2, 0.2]]))
    assert (PLAIN.horizon, PLAIN.dims, PLAIN.max_tokens, TEXT.max_tokens, ENDED.max_tokens) == (1, 3, 3, 7, 8)


def test_statistics_turn_values_there_and_back() -> None:
    switched = replace(STATISTICS, switches=(2,))
    assert switched.unnormalise(np.array([1.0, 0.0, 0.5])).tolist() == pytest.approx([0.2, 0.5, 0.0])
    assert switched.unnormalise(np.array([-1.0, -1.0, 0.6])).tolist() == pytest.approx([-0.2, 0.0, 1.0])
    assert STATISTICS.normalise(np.array([0.2, 0.25, 0.7])).tolist() == pytest.approx([1.0, -0.5, 0.7])
    still = replace(STATISTICS, high=np.array([-0.2, 1.0, 1.0]))
    assert still.normalise(np.array([-0.2, 1.0, 0.0])).tolist() == [0.0, 1.0, 0.0]
    assert STATISTICS.names == ("dim_0", "dim_1", "dim_2")


def test_where_an_answer_ends() -> None:
    action = (FIRST, FIRST + 1, FIRST + 2)
    assert [PLAIN.end(action, known) for known in range(3)] == [3, 3, 3]
    assert PLAIN.end(action[:2], 0) == 0 and PLAIN.end((*action, FIRST), 0) == 3
    assert TEXT.end((WORD, WORD, *action, WORD), 0) == 5 and TEXT.end((FIRST, WORD, *action), 0) == 5
    assert TEXT.end((WORD,) * 9, 0) == 7 and TEXT.end((WORD,) * 6, 0) == 0
    assert ENDED.end((WORD, *action, END, WORD), 0) == 5 and ENDED.end((WORD, *action), 0) == 0
    assert ENDED.end((WORD,) * 9, 0) == 8


def test_what_is_text_and_what_is_the_action() -> None:
    action = (FIRST, FIRST + 1, FIRST + 2)
    assert TEXT.text_tokens((WORD, 8, *action)) == (WORD, 8) and TEXT.action_tokens((WORD, 8, *action)) == action
    assert ENDED.text_tokens((WORD, *action, END)) == (WORD,) and ENDED.action_tokens((WORD, *action, END)) == action
    assert [TEXT.position(answer) for answer in ((), (WORD,), (WORD, FIRST), (WORD, FIRST, FIRST))] == [0, 0, 1, 2]
    assert PLAIN.position((WORD, WORD)) == 2
    assert [TEXT.in_text(answer) for answer in ((), (FIRST,), action[:2], action, (FIRST, WORD))] == [
        *(True, False, False),
        *(True, True),
    ]
    assert not PLAIN.in_text(())
    assert TEXT.legal_ids(()) is None and TEXT.legal_ids((FIRST,)) == PLAIN.legal_ids(()) == range(FIRST, VOCAB)


@pytest.mark.parametrize(
    ("codec", "answer", "rest"),
    [
        (PLAIN, (), 3),
        (PLAIN, (FIRST,), 2),
        (TEXT, (), 7),
        (TEXT, (WORD,), 6),
        (TEXT, (WORD, FIRST), 2),
        (TEXT, (WORD,) * 4 + (FIRST, FIRST), 1),
        (ENDED, (WORD, FIRST), 3),
        (ENDED, (WORD,) * 6 + (FIRST,), 1),
    ],
)
def test_how_many_tokens_may_follow(codec: BinsCodec, answer: tuple[int, ...], rest: int) -> None:
    assert codec.remaining(answer) == rest


def test_what_is_wrong_with_an_answer_is_said() -> None:
    action = (FIRST, FIRST + 1, FIRST + 2)
    assert PLAIN.problem(action) == "" == ENDED.problem((WORD, *action, END))
    assert PLAIN.problem((FIRST, WORD, 8)) == f"token {WORD} is not an action token"
    assert "has no end token after 4 tokens" in ENDED.problem((WORD, *action))
    assert "ends with 2 action tokens instead of 3" in ENDED.problem((WORD, FIRST, FIRST, END))
    assert "ends with 4 action tokens" in ENDED.problem((FIRST, *action, END))
    assert PLAIN.with_text(5).max_text == 5 and ENDED.with_text(1).max_text == 1
    with pytest.raises(UserError, match=r"set decode\.max_reasoning_tokens"):
        ENDED.with_text(0)


ARM = ActionStatistics(
    "arm", np.full(7, -0.1), np.array([0.1, 0.1, -0.1, 0.9, 0.9, 0.9, 0.9]), np.array([True] * 6 + [False])
)


def test_tolerances_are_whole_bins_of_each_dimension() -> None:
    found = tolerance_in_bins(ARM, 100, metres=0.005, radians=0.01, gripper_bins=4)
    assert found == (2, 2, 0, 1, 1, 1, 4), "a bin is 2 mm and 0.01 rad; z never moves"
    assert tolerance_in_bins(ARM, 100, metres=9.0, radians=0.0, gripper_bins=0) == (99, 99, 0, 0, 0, 0, 0)
    assert tolerance_in_bins(ARM, 100, metres=0.002, radians=0.0, gripper_bins=0)[0] == 1
    with pytest.raises(UserError, match=r"tolerance_m 0\.001 m is smaller than one bin of x: set it to 0\.00200?1? m"):
        tolerance_in_bins(ARM, 100, metres=0.001, radians=0.0, gripper_bins=0)
    with pytest.raises(UserError, match=r"tolerance_rad 0\.001 rad is smaller than one bin of roll: set it to 0\.01"):
        tolerance_in_bins(ARM, 100, metres=0.0, radians=0.001, gripper_bins=0)
    with pytest.raises(UserError, match="3 dimensions without units"):
        tolerance_in_bins(STATISTICS, 100, metres=0.1, radians=0.1, gripper_bins=0)


def test_radians_are_not_for_a_gripper_that_the_statistics_scale() -> None:
    scaled = replace(ARM, mask=np.ones(7, bool), high=np.array([0.1, 0.1, -0.1, 0.9, 0.9, 0.9, 9.9]))
    found = tolerance_in_bins(scaled, 100, metres=0.005, radians=0.01, gripper_bins=4)
    assert found == (2, 2, 0, 1, 1, 1, 4), "nor is it refused, though a bin of the gripper is larger"


def test_one_tolerance_is_for_all_dimensions_that_move() -> None:
    moves = [True, False, True]
    assert spread_bins([5], moves, 2) == (5, 2, 5) and spread_bins([1, 2, 3], moves, 9) == (1, 2, 3)
    with pytest.raises(UserError, match="has 2 numbers, but the action has 3 dimensions"):
        spread_bins([1, 2], moves, 0)


def of(**action: Any) -> dict[str, Any]:
    return {"set": {"action": {"q01": [-1, 0], "q99": [1, 2]} | action}}


def test_statistics_are_read_or_refused() -> None:
    found = select_statistics(of(), "")
    assert (found.unnorm_key, found.low.tolist(), found.high.tolist()) == ("set", [-1, 0], [1, 2])
    assert found.mask.tolist() == [True, True] and select_statistics(of(mask=[True, False]), "set").mask.tolist() == [
        True,
        False,
    ]
    assert found.names == ("dim_0", "dim_1") and select_statistics(of(names=["a", "b"]), "").names == ("a", "b")
    assert select_statistics({"set_no_noops": of()["set"], "other": {}}, "set").unnorm_key == "set_no_noops"
    assert select_statistics(of(q01=[1e6, 0], q99=[1e6, 0]), "").low[0] == 1e6
    for given, key, why in (
        (of() | {"other": {}}, "", "has statistics of 2 datasets; set unnorm_key to one of: other, set"),
        ({}, "", "has statistics of 0 datasets"),
        (of(), "sett", "unnorm_key 'sett' is not in this checkpoint; it has: set"),
        ({"set": []}, "", "needs the lists q01 and q99"),
        ({"set": {"action": {"q01": [0]}}}, "", "needs the lists q01 and q99"),
        (of(mask=[1, 0]), "", "must be a list of true and false"),
        (of(mask=[True]), "", "must be lists of the same length"),
        (of(names=["a", 1]), "", "must be a list of names"),
        (of(names=["a"]), "", "must be 2 distinct names"),
        (of(names=["a", "a"]), "", "must be 2 distinct names"),
        (of(q01=[], q99=[], mask=[]), "", "must be lists of the same length"),
        (of(q01=[2, 0]), "", "with q01 <= q99"),
        (of(q99=[1e6 + 1, 2]), "", "finite and at most 1e"),
        (of(q01="-1"), "", "must be a list of numbers"),
    ):
        with pytest.raises(UserError, match=why):
            select_statistics(given, key)
