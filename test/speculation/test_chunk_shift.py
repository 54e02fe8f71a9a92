# SPDX-License-Identifier: Apache-2.0
"""Chunk shift: what is drafted after so many actions have passed, for each codec of chunks; and it changes no token."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.random_qwen_vl import SHAPES, add_vla0, write_qwen_vl

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.training.artifacts import fit_fast_tokenizer
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.speculation.drafters.chunk_shift import ChunkShiftDrafter
from specvla_ros.speculation.drafters.registry import DraftInput, FinishedAnswer, NewRows
from specvla_ros.speculation.settings import DraftSettings, adjusted
from specvla_ros.speculation.tree import with_branches

HORIZON, DIMS, END = 8, 3, 40
STATISTICS = ActionStatistics("", np.full(DIMS, -1.0), np.full(DIMS, 1.0), np.ones(DIMS, dtype=bool))
SECOND = 10**9


def chunks(seed: int, count: int) -> list[np.ndarray]:
    """Smooth ones, so that a tokenizer has something to learn."""
    generator = np.random.default_rng(seed)
    time = np.linspace(0, 1, HORIZON)[:, None]
    starts, slopes = generator.uniform(-0.5, 0.5, (2, count, 1, DIMS))
    return [start + slope * time for start, slope in zip(starts, slopes, strict=True)]


DIGITS = DigitsCodec(tuple(range(10)), 10, frozenset({END}), STATISTICS, HORIZON, bins=1000, limit=999)
FITTED_ON = [  # wide enough, and of every length of standing still, so that all that is shifted below can be written
    np.concatenate((2 * chunk[passed:], np.repeat(2 * chunk[-1:], passed, axis=0)))
    for chunk in chunks(0, 400)
    for passed in range(HORIZON)
]
FAST = FastCodec(
    fit_fast_tokenizer(FITTED_ON, vocab_size=256), STATISTICS, HORIZON, 300, frozenset({END}), beginning=(50, 51)
)
CODECS: dict[str, Codec] = {"digits": DIGITS, "fast": FAST}


def answer_of(codec: Codec, chunk: np.ndarray) -> tuple[int, ...]:
    beginning = FAST.beginning if codec is FAST else ()
    return (*beginning, *codec.encode(chunk), END)


def drafter_after(codec: Codec, chunk: np.ndarray, *, step_s: float = 0.1) -> tuple[ChunkShiftDrafter, tuple[int, ...]]:
    drafter, answer = ChunkShiftDrafter(codec, step_s), answer_of(codec, chunk)
    drafter.observe(FinishedAnswer(1, answer, codec.action_tokens(answer), stamp_ns=SECOND))
    return drafter, answer


@pytest.mark.parametrize("name", CODECS)
@given(seed=st.integers(0, 1000), passed=st.integers(0, 12))
def test_the_chunk_before_is_shifted_by_what_has_passed(name: str, seed: int, passed: int) -> None:
    codec = CODECS[name]
    (chunk,) = chunks(seed, 1)
    drafter, answer = drafter_after(codec, chunk)
    drafted = drafter.answer(1, SECOND + passed * SECOND // 10)
    known = codec.decode(codec.action_tokens(answer))
    steps = min(passed, HORIZON - 1)
    held = np.concatenate((known[steps:], np.repeat(known[-1:], steps, axis=0)))
    assert drafted == answer_of(codec, held)
    if not passed:
        assert drafted == answer
    assert not drafter.answer(2, SECOND), "another epoch"
    drafter.forget()
    assert not drafter.answer(1, SECOND)


def test_without_a_step_one_action_passes_from_picture_to_picture() -> None:
    (chunk,) = chunks(3, 1)
    drafter, _ = drafter_after(DIGITS, chunk, step_s=0.0)
    decoded = DIGITS.decode(DIGITS.encode(chunk))
    assert drafter.answer(1, 99 * SECOND) == answer_of(DIGITS, np.concatenate((decoded[1:], decoded[-1:])))


def test_the_newest_of_several_in_flight_stays() -> None:
    first, second = chunks(4, 2)
    drafter, _ = drafter_after(DIGITS, second)
    older = answer_of(DIGITS, first)
    drafter.observe(FinishedAnswer(1, older, DIGITS.action_tokens(older), stamp_ns=SECOND - 1))
    assert drafter.answer(1, SECOND) == answer_of(DIGITS, second)


def test_of_an_answer_that_was_ended_early_the_chunk_before_says_the_rest() -> None:
    before, newest = (DIGITS.decode(DIGITS.encode(chunk)) for chunk in chunks(5, 2))
    answer = answer_of(DIGITS, newest)
    spaces = [i for i, token in enumerate(answer) if token == 10]
    broken_off = answer[: spaces[2 * DIMS] + 2]  # two actions, and a number that is begun
    ended = FinishedAnswer(1, broken_off, broken_off, stamp_ns=SECOND + SECOND // 10, whole=False)
    drafter, _ = drafter_after(DIGITS, before)
    drafter.observe(ended)
    wanted = np.concatenate((newest[:2], before[3:], before[-1:]))
    assert drafter.answer(1, ended.stamp_ns) == answer_of(DIGITS, wanted)
    alone = ChunkShiftDrafter(DIGITS, 0.1)
    alone.observe(ended)
    held = np.concatenate((newest[:2], np.repeat(newest[1:2], HORIZON - 2, axis=0)))
    assert alone.answer(1, ended.stamp_ns) == answer_of(DIGITS, held)[:-1], "its end was never seen"


def test_steps_are_rounded_and_a_clock_that_goes_back_passes_none() -> None:
    (chunk,) = chunks(3, 1)
    drafter, _ = drafter_after(DIGITS, chunk)
    after = [drafter.answer(1, SECOND + step * SECOND // 10) for step in range(3)]
    for passed_s, steps in ((-0.3, 0), (0.04, 0), (0.06, 1), (0.14, 1), (0.16, 2)):
        assert drafter.answer(1, SECOND + round(passed_s * SECOND)) == after[steps]


def test_each_robot_is_drafted_its_own_chunk() -> None:
    left, right = chunks(4, 2)
    drafter = ChunkShiftDrafter(DIGITS, 0.1)
    for stream, chunk in (("left", left), ("right", right)):
        answer = answer_of(DIGITS, chunk)
        drafter.observe(FinishedAnswer(1, answer, DIGITS.action_tokens(answer), stream=stream, stamp_ns=SECOND))
    for stream, chunk in (("right", right), ("left", left)):
        answer = answer_of(DIGITS, chunk)
        assert drafter.answer(1, SECOND, stream) == answer
        alone, _ = drafter_after(DIGITS, chunk)
        begun = "".join({10: " "}.get(token, str(token)) for token in answer[:6])
        assert drafted(drafter, begun, stream=stream) == drafted(alone, begun)
    assert drafter.answer(1, SECOND, "third") == ()
    assert drafted(drafter, begun, stream="third") == drafted(ChunkShiftDrafter(DIGITS, 0.1), begun)
    drafter.forget("left")
    assert not drafter.answer(1, SECOND, "left") and drafter.answer(1, SECOND, "right")


@pytest.mark.parametrize("name", CODECS)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 200))
def test_a_committed_beginning_of_its_own_goes_on_where_it_ends(name: str, seed: int, cut: int) -> None:
    codec = CODECS[name]
    drafter, answer = drafter_after(codec, chunks(seed, 1)[0])
    begun = answer[: cut % len(answer)]
    assert codec.resume(answer, begun) == len(begun)
    request = DraftInput(
        slot=0,
        prefix_len=9,
        new=NewRows(torch.zeros(1, 4), torch.zeros(1, 4)),
        root=torch.tensor(begun[-1] if begun else 0),
        max_depth=60,
        position=0,
        epoch=1,
        answer=begun,
        observation=Observation(np.zeros((2, 2, 3), np.uint8), "lift", SECOND),
    )
    (branches,) = drafter.draft([request], [30], last=True)
    (tree,) = with_branches([0], [None], [[branches]], torch.device("cpu"))
    rest = list(answer[len(begun) : len(begun) + 29])
    if codec is FAST:
        assert tree.tokens.tolist()[1:] == rest
        assert tree.ancestry.parents.tolist() == list(range(-1, len(tree) - 1))
    node, parents, tokens = 0, tree.ancestry.parents.tolist(), tree.tokens.tolist()
    for token in rest[: 29 // 3]:  # other guesses of digits stand beside it
        (node,) = (i for i in range(1, len(tree)) if (parents[i], tokens[i]) == (node, token))
    assert tree.relaxable.tolist() == [True] + [False] * (len(tree) - 1)


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        ("12 7", " 305"),  # another digit in the second number
        ("9 7", " 305"),  # a shorter first number
        ("12 75 3", "05"),
        ("12 4 30", "5"),
        ("12 4 305 8", ""),  # more numbers than were drafted
    ],
)
def test_digits_go_on_in_the_same_number_behind_a_difference(answer: str, rest: str) -> None:
    def tokens(text: str) -> list[int]:
        return [10 if letter == " " else int(letter) for letter in text]

    draft = tokens("12 4 305")
    assert draft[DIGITS.resume(draft, tokens(answer)) :] == tokens(rest)


def drafted(drafter: ChunkShiftDrafter, text: str, nodes: int = 64, *, epoch: int = 1, stream: str = "") -> set[str]:
    """The branches that go on from a beginning, in words."""
    begun = numbers(text)
    request = DraftInput(
        slot=0,
        prefix_len=9,
        new=NewRows(torch.zeros(1, 4), torch.zeros(1, 4)),
        root=torch.tensor(begun[-1]),
        max_depth=300,
        position=0,
        epoch=epoch,
        answer=begun,
        observation=Observation(np.zeros((2, 2, 3), np.uint8), "lift", SECOND),
        stream=stream,
    )
    (branches,) = drafter.draft([request], [nodes], last=True)
    words: list[str] = []
    for token, parent in zip(branches.tokens, branches.parents, strict=True):
        before = words[parent] if parent >= 0 else ""
        words.append(before + {10: " ", END: "."}.get(token, str(token)))
    return {word for node, word in enumerate(words) if node not in branches.parents} or {""}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(10 if letter == " " else int(letter) for letter in text)


SHORT = replace(DIGITS, horizon=2)
BEFORE = numbers("500 600 700 510 620 990")


def test_what_is_committed_says_more_of_the_numbers_behind_it() -> None:
    """As far off as the newest number of each dimension, and holding it; numbers stay within the range."""
    drafter = ChunkShiftDrafter(SHORT, 1.0)
    drafter.observe(FinishedAnswer(1, (*BEFORE, END), BEFORE, stamp_ns=SECOND))  # none of its actions has passed
    chunk_before, three_more, held = "10 620 990.", "13 620 1000.", "03 600 720."
    assert drafted(drafter, "503 600 720 5") == {chunk_before, three_more, held}
    assert drafted(drafter, "5") == {"00 600 700 510 620 990."}, "no number is known yet"
    assert drafted(drafter, "503 6") == {f"00 700 {rest}" for rest in ("510 620 990.", "513 620 990.", "503 620 990.")}
    assert len(drafted(drafter, "503 600 720 5", nodes=8)) == 3, "each has its share of the nodes"


def test_an_instructions_first_chunk_goes_on_with_what_it_begins_with() -> None:
    drafter = ChunkShiftDrafter(SHORT, 1.0)
    assert drafted(drafter, "503 600 720 ") == {"503 600 720"}
    others = {f"{digit}0 " for digit in range(1, 10)}
    assert drafted(drafter, "503 6") == {"00 500 503 500 500"} | others, "the middle of the range"
    drafter.observe(FinishedAnswer(1, (*BEFORE, END), BEFORE, stamp_ns=SECOND))
    assert drafted(drafter, "503 6", epoch=2) == {"20 990 503 620 990."}, "where the arm was left"


@pytest.mark.parametrize(
    ("answer", "others"),
    [
        ("12 7", ()),  # where the first draft's number ends, so would this one
        ("12 4 3", ()),  # begun as a draft begins it
        ("12 4 ", ()),  # nothing is begun
        ("12 4 4", ("15 ", "25 ", "35 ", "45 ", "55 ", "65 ", "75 ", "85 ", "95 ")),  # nearest to the first draft's 0
        ("12 4 385 1", ("1.", "3.", "0.", "4.", "5.", "6.", "7.", "8.", "9.")),  # to its end, with what ends the answer
    ],
)
def test_a_number_that_no_draft_begins_so_may_go_on_with_every_other_digit(
    answer: str, others: tuple[str, ...]
) -> None:
    drafts = [(), (*numbers("12 4 305 62"), END), (*numbers("12 4 395 70"), END)]
    chains = DIGITS.other_continuations(drafts, numbers(answer))
    assert tuple("".join({10: " ", END: "."}.get(token, str(token)) for token in chain) for chain in chains) == others


def test_they_stand_beside_the_other_branches() -> None:
    drafter = ChunkShiftDrafter(SHORT, 1.0)
    drafter.observe(FinishedAnswer(1, (*BEFORE, END), BEFORE, stamp_ns=SECOND))
    assert drafted(drafter, "5") == {"00 600 700 510 620 990."}
    others = {f"{digit}0 " for digit in range(1, 10)}
    assert drafted(drafter, "4") == {"00 600 700 510 620 990."} | others


@pytest.mark.parametrize("answer", ["", " ", "  5 6", "7  8 1", "12 5", "1 2 3 4 5 6 7 8 9 10 11 12 "])
def test_numbers_of_a_beginning(answer: str) -> None:
    said = []
    for word in answer.split(" ")[:-1]:
        if not word:
            break
        said.append(int(word))
    expected = [-1 + 2 * number / 1000 for number in said[:6]]
    np.testing.assert_allclose(SHORT.completed_numbers(numbers(answer)), expected)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_vla0(write_qwen_vl(tmp_path_factory.mktemp("digits"), SHAPES[0], seed=5), dims=2)


class _Listener(DigitsCodec):
    """Lets any answer through, so that a random model's are remembered and drafted."""

    def problem(self, tokens: object) -> str:
        return ""

    def decode(self, tokens: object) -> np.ndarray:
        return np.linspace(-0.4, 0.9, self.horizon)[:, None] * np.ones(2)


@pytest.mark.parametrize("mode", ["spec", "specpipe"])
def test_it_changes_no_token(policy: Path, mode: str) -> None:
    target = load_target(policy, device="cpu")
    codec = target.codec
    assert isinstance(codec, DigitsCodec)
    listener = _Listener(**{name: getattr(codec, name) for name in (each.name for each in fields(DigitsCodec))})
    target = replace(target, policy=replace(target.policy, codec=replace(listener, limit=60)))  # type: ignore[type-var, attr-defined]
    drafts = adjusted(DraftSettings(nodes=24), chunk_shift=True)
    plain = Engine(target, EngineSettings("ar", max_text_tokens=400))
    drafting = Engine(target, EngineSettings(mode, max_text_tokens=400, draft=drafts))
    assert drafting.drafter.sources == ("chunk_shift",)
    for seed in range(4):
        images = np.random.default_rng(seed).integers(0, 256, (2, 40, 40, 3), dtype=np.uint8)
        seen = Observation(dict(zip(target.cameras, images, strict=True)), "lift it", stamp_ns=seed * SECOND // 10 + 1)
        ours, theirs = drafting.act(seen), plain.act(seen)
        assert isinstance(ours, Action) and isinstance(theirs, Action)
        assert ours.tokens == theirs.tokens
        assert seed == 0 or sum(ours.record.tree_nodes) > 24, "nothing was drafted"


def test_a_policy_of_single_actions_has_no_chunk_to_shift() -> None:
    settings = EngineSettings("spec", draft=adjusted(DraftSettings(), chunk_shift=True))
    with pytest.raises(UserError, match=r"draft\.chunk_shift needs a policy that answers with several actions"):
        Engine(load_target(nano_policy(), device="cpu"), settings)
