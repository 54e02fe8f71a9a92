# SPDX-License-Identifier: Apache-2.0
"""When an answer is complete, with and without text before the actions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.models.codecs.bins import ActionStatistics, ActionTokenizer, BinsCodec


def codec(dims: int, max_text: int = 0) -> BinsCodec:
    """Action ids 100 to 355."""
    statistics = ActionStatistics("test", -np.ones(dims), np.ones(dims), np.ones(dims, dtype=bool))
    return BinsCodec(ActionTokenizer(356), statistics, max_text)


PLAIN = codec(7)
REASONING = codec(3, max_text=5)


def end_step_by_step(answer: BinsCodec, tokens: list[int]) -> int:
    """What a plain decoder would find, one token at a time."""
    for n in range(1, len(tokens) + 1):
        actions = 0
        for token in tokens[:n]:
            actions = actions + 1 if not answer.max_text or 100 <= token < 356 else 0
        if n == answer.dims + answer.max_text or actions == answer.dims:
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


@given(st.lists(st.sampled_from([5, 120, 121]), max_size=12), st.data())
def test_any_split_finds_the_same_end(tokens: list[int], data: st.DataObject) -> None:
    for answer in (PLAIN, REASONING):
        expected = end_step_by_step(answer, tokens)
        known, found = 0, 0
        while known < len(tokens) and not found:
            upto = data.draw(st.integers(known + 1, len(tokens)))
            found = answer.end(tokens[:upto], known)
            known = upto
        assert found == expected
