# SPDX-License-Identifier: Apache-2.0
"""When an answer is complete, with and without text before the actions."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.statistics import ActionStatistics


def codec(dims: int, max_text: int = 0) -> BinsCodec:
    """Action ids 100 to 355."""
    statistics = ActionStatistics("test", -np.ones(dims), np.ones(dims), np.ones(dims, dtype=bool))
    return BinsCodec(ActionTokenizer(356), statistics, max_text)


PLAIN = codec(7)
REASONING = codec(3, max_text=5)
ENDED = replace(REASONING, end_ids=frozenset({9}))


def end_step_by_step(answer: BinsCodec, tokens: list[int]) -> int:
    """What a plain decoder would find, one token at a time."""
    for n in range(1, len(tokens) + 1):
        actions = 0
        for token in tokens[:n]:
            actions = actions + 1 if not answer.max_text or 100 <= token < 356 else 0
        whole = tokens[n - 1] in answer.end_ids if answer.end_ids else actions == answer.dims
        if n == answer.max_tokens or whole:
            return n
    return 0


def test_without_text_any_token_counts() -> None:
    assert PLAIN.end([1] * 6, 0) == 0
    assert PLAIN.end([1] * 8, 6) == 7
    assert PLAIN.remaining([1, 2]) == 5
    assert PLAIN.position([1, 2]) == 2


def test_text_ends_with_the_first_whole_action() -> None:
    tokens = [5, 6, 120, 121, 122, 9]
    assert REASONING.end(tokens, 0) == 5
    assert REASONING.action_tokens(tokens[:5]) == (120, 121, 122)
    assert [REASONING.position(tokens[:n]) for n in range(7)] == [0, 0, 0, 1, 2, 3, 0]
    assert [REASONING.remaining(tokens[:n]) for n in range(5)] == [8, 7, 6, 2, 1]


def test_text_without_an_end_is_cut() -> None:
    assert REASONING.end([5] * 20, 0) == REASONING.max_tokens == 8


def test_an_answer_with_an_end_must_hold_one_whole_action_before_it() -> None:
    good = [5, 6, 120, 121, 122, 9]
    assert ENDED.end(good, 0) == 6 and not ENDED.problem(good)
    assert (ENDED.text_tokens(good), ENDED.action_tokens(good)) == ((5, 6), (120, 121, 122))
    assert [ENDED.remaining(good[:n]) for n in range(6)] == [9, 8, 7, 3, 2, 4]
    assert [ENDED.in_text(good[:n]) for n in range(6)] == [True, True, True, False, False, True]
    for wrong in ([5, 120, 121, 9], [5, 120, 121, 122, 123, 9], [5, 120, 121, 122, 5, 9], [9], [5] * 9):
        assert ENDED.end(wrong, 0) == len(wrong) and ENDED.problem(wrong)


@given(st.lists(st.sampled_from([5, 9, 120, 121]), max_size=12), st.data())
def test_any_split_finds_the_same_end(tokens: list[int], data: st.DataObject) -> None:
    for answer in (PLAIN, REASONING, ENDED):
        expected = end_step_by_step(answer, tokens)
        known, found = 0, 0
        while known < len(tokens) and not found:
            upto = data.draw(st.integers(known + 1, len(tokens)))
            found = answer.end(tokens[:upto], known)
            known = upto
        assert found == expected
