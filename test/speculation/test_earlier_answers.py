# SPDX-License-Identifier: Apache-2.0
"""Earlier answers: what is looked up, against a plain reading; the file; and what is drafted of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_chunks import any_chunks

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.evaluation.frame_sources import collect_answers
from specvla_ros.lab.training.artifacts import save_answers
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.drafters.chunk_shift import ANSWERS_FILE, EarlierAnswers, load_answers
from specvla_ros.speculation.settings import DraftSettings, adjusted


def looked_up(answers: Sequence[Sequence[int]], answer: Sequence[int]) -> tuple[int, set[tuple[int, ...]]]:
    """The longest match of the last tokens, and all that followed one as long at the nearest place."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for earlier in answers:
        for place in range(len(earlier)):
            before = earlier[: place + 1]
            length = 0
            while length < min(len(before), len(answer), 32) and before[-1 - length] == answer[-1 - length]:
                length += 1
            if length:
                key = (-length, abs(place - (len(answer) - 1)))
                found.setdefault(key, set()).add(tuple(earlier[place + 1 :]))
    return (-min(found)[0], found[min(found)]) if found else (0, {()})


TOKENS = st.integers(0, 3)  # few, so that much matches
ANSWERS = st.lists(st.lists(TOKENS, min_size=1, max_size=12), max_size=6)


@given(ANSWERS, st.lists(TOKENS, min_size=1, max_size=12))
def test_the_longest_match_at_the_nearest_place_goes_on(answers: list[list[int]], answer: list[int]) -> None:
    _, expected = looked_up(answers, answer)
    assert EarlierAnswers(answers).going_on(answer) in expected


def test_matches_are_longer_than_a_number_or_two() -> None:
    repeated = [1, 2] * 30
    answers = [[3, *repeated, 7], [4, *repeated, 8]]
    for answer in answers:
        assert EarlierAnswers(answers).going_on(answer[:32]) == tuple(answer[32:]), "the first token decides"
    assert looked_up(answers, answers[1][:50])[0] == 32, "no longer ones are looked for"


def test_they_come_back_from_their_file(tmp_path: Path) -> None:
    answers = [(5, 6, 7), (5, 6, 9), (8,)]
    save_answers(tmp_path / "answers.npz", answers)
    again = load_answers(tmp_path / "answers.npz", vocab_size=10)
    assert again.going_on((5, 6, 7)) == () and again.going_on((1, 6)) in {(7,), (9,)} and again.going_on((3,)) == ()
    save_answers(tmp_path / "without an ending", answers)
    assert load_answers(tmp_path / "without an ending", vocab_size=10).going_on((8, 6)) in {(7,), (9,)}
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written .* give another --out"):
        save_answers(tmp_path / "file" / "answers.npz", answers)
    save_answers(tmp_path / "none.npz", [])
    assert load_answers(tmp_path / "none.npz", vocab_size=10).going_on((5,)) == ()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.npz"
    with pytest.raises(UserError, match=r"does not exist; make it with `specvla collect-answers`"):
        load_answers(path, vocab_size=10)
    save_answers(path, [(5, 6, 12)])
    with pytest.raises(UserError, match=r"holds token 12, but this policy's ids end at 9: it is from another policy"):
        load_answers(path, vocab_size=10)
    for damaged in (b"", b"no archive", path.read_bytes()[:60]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            load_answers(path, vocab_size=10)
    np.savez(path, tokens=np.arange(3))
    with pytest.raises(UserError, match="holds no answers"):
        load_answers(path, vocab_size=10)
    for lengths in ([2], [4, -1], [[3]]):
        np.savez(path, tokens=np.arange(3), lengths=np.array(lengths))
        with pytest.raises(UserError, match="its lengths do not fit its tokens"):
            load_answers(path, vocab_size=10)
    np.savez(path, tokens=np.array([{}], dtype=object), lengths=np.array([1]))
    with pytest.raises(UserError, match="damaged"):
        load_answers(path, vocab_size=10)


def frames(count: int) -> list[Observation]:
    images = np.random.default_rng(0).integers(0, 256, (count, 48, 64, 3), dtype=np.uint8)
    return [Observation(image, "put carrot on plate", stamp_ns=i + 1) for i, image in enumerate(images)]


@pytest.fixture(scope="module", params=["digits", "fast"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return any_chunks(tmp_path_factory.mktemp("policy"), request.param)


def test_what_it_has_answered_before_takes_few_forwards(policy: OpenVLATarget) -> None:
    """The first answer of an epoch too, which nothing else foresees; and the same answers as without."""
    seen = frames(6)
    found = collect_answers(policy, [*seen, *seen])
    assert found.frames == 12 and not found.dropped and len(found.answers) <= 6
    save_answers(policy.directory / ANSWERS_FILE, [*found.answers])
    forwards: dict[str, list[int]] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for file in ("none", ""):
        drafts = adjusted(DraftSettings(nodes=48, head="none"), chunk_shift=True, answers=file)
        engine = Engine(policy, EngineSettings("spec", draft=drafts))
        assert engine.drafter.sources == ("chunk_shift",)
        for epoch, frame in enumerate(seen):
            outcome = engine.act(replace(frame, epoch=epoch))
            assert isinstance(outcome, Action)
            forwards.setdefault(file, []).append(outcome.record.forwards)
            answers.setdefault(file, []).append(outcome.tokens)
    assert answers[""] == answers["none"]
    assert sum(forwards[""]) < 0.6 * sum(forwards["none"])


def test_single_actions_have_no_earlier_answers(tmp_path: Path) -> None:
    from support.checkpoints import load_openvla
    from support.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(tmp_path, seed=3, hidden_size=64, layers=2)
    with pytest.raises(UserError, match=r"set draft\.temporal instead"):
        collect_answers(load_openvla(tmp_path, device="cpu"), frames(1))
