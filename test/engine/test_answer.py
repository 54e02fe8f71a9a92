"""When an answer is complete, with and without text before the actions."""

from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.speculation.accept import ActionIds

ACTIONS = ActionIds(first=100, stop=356, bins=255)
PLAIN = AnswerFormat(7, ACTIONS)
REASONING = AnswerFormat(3, ACTIONS, max_text=5)


def end_step_by_step(answer: AnswerFormat, tokens: list[int]) -> int:
    """What a plain decoder would find, one token at a time."""
    for n in range(1, len(tokens) + 1):
        actions = 0
        for token in tokens[:n]:
            actions = actions + 1 if not answer.max_text or 100 <= token < 356 else 0
        if n == answer.action_dim + answer.max_text or actions == answer.action_dim:
            return n
    return 0


def test_without_text_any_token_counts() -> None:
    assert PLAIN.end([1] * 6, 0) == 0
    assert PLAIN.end([1] * 8, 6) == 7
    assert PLAIN.missing([1, 2]) == 5
    assert PLAIN.place([1, 2]) == 2


def test_text_ends_with_the_first_whole_action() -> None:
    tokens = [5, 6, 120, 121, 122, 9]
    assert REASONING.end(tokens, 0) == 5
    assert REASONING.action(tokens[:5]) == (120, 121, 122)
    assert [REASONING.place(tokens[:n]) for n in range(7)] == [0, 0, 0, 1, 2, 3, 0]
    assert [REASONING.missing(tokens[:n]) for n in range(5)] == [8, 7, 6, 2, 1]


def test_text_without_an_end_is_cut() -> None:
    assert REASONING.end([5] * 20, 0) == REASONING.longest == 8


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
