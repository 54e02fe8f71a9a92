# SPDX-License-Identifier: Apache-2.0
"""What the FLy benchmark counts, on a small random language model whose answers are known by other means."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.text_models import write_text_model

from benchmarks.papers.fly import (
    PROMPTS,
    TIE,
    Answered,
    answers_to,
    check_same,
    forwards_goal,
    gate_seconds,
    score,
    summarise,
    time_goal,
)
from benchmarks.papers.fly_contestants import PLAIN, Contestant, Run, assisted, contestants, our_settings
from benchmarks.papers.smollm_draft import first_layers, seeds, write_first_layers
from benchmarks.papers.text_target import TextTarget
from benchmarks.transformers_baseline import transformers_decoder
from specvla_ros import UserError
from specvla_ros.models.checkpoint import load_target

TOKENS = 24
PROMPT = (3, 4, 5, 3, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextTarget:
    return load(write_text_model(tmp_path_factory.mktemp("model"), positions=128, end=49))


def load(directory: Path) -> TextTarget:
    target = load_target(directory, device="cpu")
    assert isinstance(target, TextTarget)
    return target


def rivals(model: TextTarget, draft: TextTarget) -> dict[str, Contestant]:
    settings = our_settings(draft.directory, tokens=TOKENS, longest_prompt=16, lengths=(5,))
    return contestants(model, draft, settings, (5,))


def test_a_draft_that_is_always_right_gives_the_forwards_that_follow_from_k(model: TextTarget) -> None:
    everyone = rivals(model, model)
    runs = {name: rival.answer(PROMPT) for name, rival in everyone.items()}
    plain = runs[PLAIN]
    assert len(plain.tokens) == plain.forwards == TOKENS and len(set(plain.tokens)) > 3
    assert {run.tokens for run in runs.values()} == {plain.tokens}
    ours, theirs = runs["strict, K 5"], runs[assisted(5)]
    # The prompt gives one token, then five drafted ones and the target's own at a time; the last chain has four.
    assert (ours.forwards, ours.verifications, ours.verified, ours.draft_forwards) == (5, 4, 23, 19)
    assert (theirs.forwards, theirs.verifications, theirs.verified, theirs.draft_forwards) == (4, 4, 24, 20)
    assert runs["transformers, plain"].forwards == TOKENS
    multi, alone = runs["strict, K 15, multi-level"], runs["FLy, K 15, W 6, θ 0.3"]
    assert multi.forwards == alone.forwards == 1 + math.ceil((TOKENS - 1) / 16)
    assert multi.draft_forwards < alone.draft_forwards == TOKENS - 1 - alone.verifications
    assert runs["strict, lookup"].draft_forwards == 0 and runs["strict, lookup"].forwards < TOKENS


def test_fly_lets_tokens_pass_that_strict_rows_do_not(model: TextTarget, tmp_path: Path) -> None:
    write_first_layers(tmp_path, model.directory, first_layers(model.decoder, 1))
    everyone = rivals(model, load(tmp_path))
    assert [name for name, rival in everyone.items() if rival.loose] == [name for name in everyone if "FLy" in name]
    runs = {name: rival.answer(PROMPT) for name, rival in everyone.items()}
    plain = runs[PLAIN].tokens
    assert all(run.tokens == plain for name, run in runs.items() if not everyone[name].loose)
    bare = runs["FLy, K 15, W 0, θ 0.3, multi-level"]  # the logits of random weights are flat: the gate is open
    assert bare.forwards == 1 + math.ceil((TOKENS - 1) / 16)
    _, margins = score(model, PROMPT, bare.tokens)
    assert bare.tokens != plain and 0 < bare.deferred < TOKENS and min(margins) > 0
    own = own_choices(model, bare.tokens)
    assert bare.deferred == sum(token != choice for token, choice in zip(bare.tokens, own, strict=True))
    assert runs["FLy, K 5, W 6, θ 0.3, multi-level"].deferred == 0  # no window of 6 fits into 5


def own_choices(model: TextTarget, answer: tuple[int, ...]) -> list[int]:
    """The target's choice after each prefix of an answer, by transformers."""
    logits = transformers_decoder(model.decoder)(torch.tensor([[*PROMPT, *answer[:-1]]])).logits[0]
    choices: list[int] = logits[len(PROMPT) - 1 :].argmax(dim=-1).tolist()
    return choices


def test_the_papers_row_is_the_preset(model: TextTarget) -> None:
    settings = our_settings(model.directory, tokens=TOKENS, longest_prompt=16, lengths=(5, 15, 25))
    assert settings["FLy, K 15, W 6, θ 0.3, multi-level"].preset_summary == "fly-paper"
    assert settings["FLy, K 15, W 6, θ 0.3"].preset_summary == "fly-paper, except draft.model_lookup_tokens 0"
    swept = settings["FLy, K 25, W 6, θ 0.3, multi-level"].preset_summary
    assert swept == "fly-paper, except draft.nodes 26, draft.model_tokens 25"
    assert settings["FLy, K 15, W 0, θ 0.3, multi-level"].preset_summary == "fly-paper, except acceptance.fly_window 0"
    assert settings["FLy, K 15, W 6, θ 0, multi-level"].preset_summary == "fly-paper, except acceptance.fly_theta 0.0"


@torch.no_grad()
def test_an_answer_is_scored_as_transformers_scores_it(model: TextTarget) -> None:
    answer = (9, 1, 30, 9)
    ids = torch.tensor([[*PROMPT, *answer]])
    labels = ids.clone()
    labels[:, : len(PROMPT)] = -100
    out = transformers_decoder(model.decoder)(ids, labels=labels)
    surprise, margins = score(model, PROMPT, answer)
    assert surprise == pytest.approx(float(out.loss) * len(answer), rel=1e-5)
    best = out.logits[0, len(PROMPT) - 1 : -1].topk(2).values
    assert margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)


def test_a_strict_row_with_other_tokens_is_refused() -> None:
    plain, margins = (5, 6, 7), (1.0, TIE / 2, 1.0)
    check_same("one", (5, 6, 7), plain, margins)
    check_same("one", (5, 8, 9, 9), plain, margins)  # a tie
    with pytest.raises(UserError, match="one has token 4 at 0, not 5; the margin there is 1"):
        check_same("one", (4, 6, 7), plain, margins)
    with pytest.raises(UserError, match="one ends after 2 tokens, not after 3"):
        check_same("one", (5, 6), plain, margins)


@dataclass
class Fixed:
    """Says what it was told to, once for each time given."""

    tokens: tuple[int, ...]
    seconds: list[float]
    loose: bool = False

    def answer(self, prompt: Sequence[int]) -> Run:
        return Run(self.tokens, self.seconds.pop(), len(self.tokens), len(self.tokens) - 1, len(self.tokens) - 1)


def test_a_prompt_is_answered_in_turns_once_and_its_file_read_from_then_on(model: TextTarget, tmp_path: Path) -> None:
    prompt = {"kind": "questions", "text": "", "expected": "w9 w1"}
    times = {PLAIN: [9.0, 1.0, 2.0], "FLy": [5.0, 3.0, 4.0]}
    everyone = {PLAIN: Fixed((9, 1, 30), times[PLAIN]), "FLy": Fixed((9, 30), times["FLy"], loose=True)}
    file = tmp_path / "work" / "00.json"
    found = answers_to(model, everyone, prompt, PROMPT, 3, file)
    assert [found[name].run.seconds for name in everyone] == [2.0, 4.0]  # the medians
    assert [(each.as_plain, each.right) for each in found.values()] == [(3, True), (1, False)]
    again = answers_to(model, everyone, prompt, PROMPT, 3, file)  # they have nothing more to say
    assert summarise([again, again], dict.fromkeys(everyone, True)) == summarise(
        [found, found], dict.fromkeys(everyone, True)
    )
    strict = {PLAIN: Fixed((9, 1, 30), [1.0]), "strict": Fixed((9, 2, 30), [1.0])}
    with pytest.raises(UserError, match="strict has token 2 at 1, not 1"):
        answers_to(model, strict, prompt, PROMPT, 1, tmp_path / "work" / "01.json")
    assert not (tmp_path / "work" / "01.json").exists()


def answered(
    *tokens: int, seconds: float, forwards: int, surprise: float, right: bool | None = None, deferred: int = 0
) -> Answered:
    run = Run(tokens, seconds, forwards, forwards - 1, len(tokens) - 1, 2 * forwards, deferred)
    return Answered(run, surprise, sum(token < 10 for token in tokens), right)


def test_rows_and_goals_follow_from_the_answers() -> None:
    quick, loose = "strict, K 5", "FLy"
    prompts = [
        {
            PLAIN: answered(1, 2, 3, 4, seconds=4.0, forwards=4, surprise=2.0, right=True),
            quick: answered(1, 2, 3, 4, seconds=2.0, forwards=2, surprise=2.0, right=True),
            loose: answered(1, 20, seconds=0.5, forwards=1, surprise=1.01, right=False, deferred=1),
            assisted(5): answered(1, 2, 3, 4, seconds=4.0, forwards=2, surprise=2.0, right=True),
        },
        {
            PLAIN: answered(1, 2, seconds=2.0, forwards=2, surprise=1.0),
            quick: answered(1, 2, seconds=4.0, forwards=2, surprise=1.0),
            loose: answered(1, 2, seconds=1.0, forwards=1, surprise=1.0),
            assisted(5): answered(1, 2, seconds=16.0, forwards=2, surprise=1.0),
        },
    ]
    ours = {PLAIN: True, quick: True, loose: True, assisted(5): False}
    plain, strict, fly, theirs = summarise(prompts, ours)
    assert (strict["forwards_per_token"], strict["tau"]) == (4 / 6, 4 / 2)
    assert (fly["forwards_per_token"], fly["own_choice"], fly["as_plain"]) == (2 / 4, 3 / 4, 3 / 6)
    assert (strict["token_s"], strict["draft_forwards_per_token"]) == (1.0, 8 / 6)
    assert (plain["recovery"], strict["right"], strict["judged"], fly["right"]) == (1, 1, 1, 0)
    assert fly["perplexity"] == pytest.approx(math.exp(2.01 / 4))
    assert fly["recovery"] == pytest.approx(math.exp(3 / 6 - 2.01 / 4))
    assert strict["plain_time_over_own"]["ratio"] == pytest.approx(1)  # 2 and 1/2
    assert theirs["plain_time_over_own"]["ratio"] == pytest.approx(8**-0.5)
    goal = forwards_goal([plain, strict, fly, theirs])
    assert (goal["row"], goal["reached"]) == (quick, False)  # FLy recovers 99 %, but loses the one that was right
    assert forwards_goal([plain, fly | {"right": 1, "forwards_per_token": 0.3}])["reached"]
    assert not forwards_goal([plain, theirs | {"forwards_per_token": 0.1}])["reached"]
    time = time_goal(prompts, [5])
    assert time["ratios"]["5"]["ratio"] == pytest.approx(8**0.5) and time["reached"]


def test_the_gate_is_timed_for_both_rules(model: TextTarget) -> None:
    assert all(seconds > 0 for seconds in gate_seconds(model, 15, repeats=2).values())


def test_no_prompt_is_one_that_the_draft_model_learnt_from() -> None:
    prompts = json.loads(PROMPTS.read_text())
    asked = seeds(0)
    assert len(set(asked)) == len(asked) > 400
    assert not {prompt["text"] for prompt in prompts} & set(asked)
    assert len(prompts) == 24 and len({prompt["kind"] for prompt in prompts}) == 4
