# SPDX-License-Identifier: Apache-2.0
"""FLy on a real language model: its window, gate, chain and multi-level drafting, compared with transformers.

    python -m benchmarks.papers.smollm smollm2
    python -m benchmarks.papers.smollm_draft smollm2 smollm2-draft
    python -m benchmarks.papers.fly --target smollm2 --draft smollm2-draft

Every prompt of fly_prompts.json is answered greedily by this engine (plain, strict and with FLy) and by transformers'
generate on the same weights, taking turns prompt by prompt. Strict rows must have plain decoding's tokens, otherwise
there is no result. An interrupted run resumes with the missing prompts.
"""

import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from benchmarks.harness import Out, Work, finish, mean_ratio, result_head, take_turns
from benchmarks.papers.fly_contestants import (
    PLAIN,
    PRESET,
    Contestant,
    K,
    Ours,
    Run,
    assisted,
    contestants,
    our_settings,
)
from benchmarks.papers.text_target import TextTarget, load_language_model
from benchmarks.results_page import RESULTS, weights_digest
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.engine.verifier import Verifier, VerifyInput
from specvla_ros.errors import UserError
from specvla_ros.models.target import ForwardResult
from specvla_ros.speculation.rules.registry import make_rule
from specvla_ros.speculation.tree import Tree

PROMPTS = Path(__file__).with_name("fly_prompts.json")
FORWARDS_GOAL, RECOVERY_GOAL = 1 / 3, 0.99
# Logit gap: another order of float32 sums changes SmolLM2's logits by less than 1e-4 (oracle smollm_generate_a).
TIE = 1e-3


@dataclass(frozen=True)
class Answered:
    """A contestant's answer to a prompt.

    Args:
        run: the run; its seconds are the median over the turns.
        surprise: negative log-likelihood of the answer under the target, nats.
        as_plain: number of tokens equal to plain decoding's at the same position.
        right: True if the answer is correct; None: unknown.
    """

    run: Run
    surprise: float
    as_plain: int
    right: bool | None


def main(
    context: typer.Context,
    target: Annotated[Path, typer.Option(help="Directory of the language model.")] = Path("smollm2"),
    draft: Annotated[Path, typer.Option(help="Directory of the draft model.")] = Path("smollm2-draft"),
    tokens: Annotated[int, typer.Option(help="Maximum length of an answer.", min=2)] = 64,
    lengths: Annotated[str, typer.Option(help="Tokens per draft (K), comma-separated.")] = "5,10,15,25",
    per_kind: Annotated[int, typer.Option(help="Prompts per kind.", min=1)] = 6,
    repeats: Annotated[int, typer.Option(help="Turns of each contestant per prompt.", min=1)] = 1,
    work: Work = Path("fly-benchmark"),
    out: Out = RESULTS / "fly_cpu.json",
) -> None:
    """Answers the missing prompts with every contestant."""
    chains = [int(k) for k in lengths.split(",")]
    model, drafting = load_language_model(target), load_language_model(draft)
    asked = _prompts(per_kind)
    ids = [model.tokenizer.encode(prompt["text"]).ids for prompt in asked]
    settings = our_settings(draft, tokens=tokens, longest_prompt=max(map(len, ids)), lengths=chains)
    rivals = contestants(model, drafting, settings, chains)
    weights = {"target": weights_digest(target), "draft": weights_digest(draft)}
    inputs = json.dumps([weights, asked, tokens, repeats, list(rivals)])
    parts = work / hashlib.sha256(inputs.encode()).hexdigest()[:12]
    files = [parts / f"{number:02d}.json" for number in range(len(asked))]
    if not all(file.exists() for file in files):
        for rival in rivals.values():  # the first run is slower
            rival.answer(ids[0])
    answered = [
        answers_to(model, rivals, prompt, prompt_ids, repeats, file)
        for prompt, prompt_ids, file in zip(asked, ids, files, strict=True)
    ]
    rows = summarise(answered, {name: isinstance(rival, Ours) for name, rival in rivals.items()})
    training = draft / "training.json"
    result = result_head(context, torch.float32, transformers=transformers.__version__) | {
        "weights": weights,
        "parameters": {name: each.describe()["parameters"] for name, each in (("target", model), ("draft", drafting))},
        "draft_training": json.loads(training.read_text(encoding="utf-8")) if training.exists() else None,
        "prompts": len(asked),
        "kinds": sorted({prompt["kind"] for prompt in asked}),
        "gate_s": gate_seconds(model, K),
        "rows": rows,
        "goals": {"forwards": forwards_goal(rows), "time": time_goal(answered, chains)},
    }
    finish(result, out)


def _prompts(per_kind: int) -> list[dict[str, str]]:
    """The first `per_kind` prompts of each kind."""
    left: dict[str, int] = {}
    found = []
    for prompt in json.loads(PROMPTS.read_text(encoding="utf-8")):
        left[prompt["kind"]] = left.get(prompt["kind"], per_kind) - 1
        if left[prompt["kind"]] >= 0:
            found.append(prompt)
    return found


def answers_to(
    target: TextTarget,
    rivals: Mapping[str, Contestant],
    prompt: Mapping[str, str],
    ids: Sequence[int],
    repeats: int,
    file: Path,
) -> dict[str, Answered]:
    """Returns all contestants' answers to a prompt, read from the file or added to it.

    Raises:
        UserError: An answer that must equal plain decoding's does not.
    """
    if file.exists():
        raw = json.loads(file.read_text(encoding="utf-8"))
        return {name: Answered(Run(**each.pop("run")), **each) for name, each in raw.items()}
    runs: dict[str, list[Run]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, rival in rivals.items():
            runs[name].append(rival.answer(ids))
    found = judge(target, rivals, prompt, ids, runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({name: asdict(each) for name, each in found.items()}), encoding="utf-8")
    os.replace(part, file)
    print(f"prompt {file.stem}: {len(found[PLAIN].run.tokens)} tokens", file=sys.stderr, flush=True)
    return found


def judge(
    target: TextTarget,
    rivals: Mapping[str, Contestant],
    prompt: Mapping[str, str],
    ids: Sequence[int],
    runs: Mapping[str, Sequence[Run]],
) -> dict[str, Answered]:
    """Judges the answers against plain decoding's.

    Raises:
        UserError: An answer that must equal plain decoding's does not.
    """
    plain = runs[PLAIN][0].tokens
    _, margins = score(target, ids, plain)
    known: dict[tuple[int, ...], float] = {}
    found = {}
    for name, turns in runs.items():
        answer = turns[0].tokens
        if not rivals[name].loose:
            check_same(name, answer, plain, margins)
        if answer not in known:
            known[answer] = score(target, ids, answer)[0]
        seconds = statistics.median(run.seconds for run in turns)
        same = sum(ours == theirs for ours, theirs in zip(answer, plain, strict=False))
        right = prompt["expected"] in target.text(answer) if prompt["expected"] else None
        found[name] = Answered(Run(**asdict(turns[0]) | {"seconds": seconds}), known[answer], same, right)
    return found


def check_same(name: str, answer: Sequence[int], plain: Sequence[int], margins: Sequence[float]) -> None:
    """Checks that an answer equals plain decoding's up to a tie, after which they may differ.

    Args:
        margins: gap between the target's two largest logits at each token of `plain`.

    Raises:
        UserError: The answer differs before a tie.
    """
    for at, (ours, theirs) in enumerate(zip(answer, plain, strict=False)):
        if ours != theirs:
            if margins[at] < TIE:
                return
            raise UserError(f"{name} has token {ours} at {at}, not {theirs}; the margin there is {margins[at]:.4g}")
    if len(answer) != len(plain):
        raise UserError(f"{name} ends after {len(answer)} tokens, not after {len(plain)}")


@torch.inference_mode()
def score(target: TextTarget, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, list[float]]:
    """Returns the answer's negative log-likelihood under the target, in nats, and each token's margin.

    The margin is the gap between the two largest logits. Takes one forward over prompt and answer.
    """
    rows = torch.tensor([*prompt, *answer[:-1]])
    cache = new_cache(target.decoder, slots=1, slot_rows=len(rows))
    logits = packed_forward(target.decoder, [Segment(0, 0, rows, wanted=len(answer))], cache).logits
    chosen = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer)[:, None])
    best = logits.topk(2, dim=-1).values
    return -float(chosen.double().sum()), (best[:, 0] - best[:, 1]).tolist()


def summarise(answered: Sequence[Mapping[str, Answered]], is_ours: Mapping[str, bool]) -> list[dict[str, Any]]:
    """Returns the result's rows over all prompts; both arguments are by contestant.

    τ is FLy's mean accepted length: tokens committed per verification, including the target's own (the paper's 15.59
    for K = 15 without a window leaves no other reading).
    """
    plain = _perplexity(each[PLAIN] for each in answered)
    rows = []
    for name, ours in is_ours.items():
        mine = [each[name] for each in answered]
        runs = [each.run for each in mine]
        tokens = sum(len(run.tokens) for run in runs)
        perplexity = _perplexity(mine)
        longer = sum(max(len(each[name].run.tokens), len(each[PLAIN].run.tokens)) for each in answered)
        judged = [each.right for each in mine if each.right is not None]
        rows.append(
            {
                "name": name,
                "ours": ours,
                "tokens": tokens,
                "forwards_per_token": sum(run.forwards for run in runs) / tokens,
                "tau": sum(run.verified for run in runs) / max(1, sum(run.verifications for run in runs)),
                "draft_forwards_per_token": sum(run.draft_forwards for run in runs) / tokens,
                "token_s": sum(run.seconds for run in runs) / tokens,
                "plain_time_over_own": time_ratio(answered, PLAIN, name),
                "own_choice": 1 - sum(run.deferred for run in runs) / tokens,
                "as_plain": sum(each.as_plain for each in mine) / longer,
                "perplexity": perplexity,
                "recovery": plain / perplexity,
                "right": sum(judged),
                "judged": len(judged),
            }
        )
    return rows


def _perplexity(answers: Iterable[Answered]) -> float:
    """Perplexity per token of the answers under the target."""
    sums = [(each.surprise, len(each.run.tokens)) for each in answers]
    return math.exp(sum(surprise for surprise, _ in sums) / sum(tokens for _, tokens in sums))


def time_ratio(answered: Sequence[Mapping[str, Answered]], first: str, second: str) -> dict[str, float]:
    """Returns the first contestant's time per token over the second's: geometric mean and 95 % interval."""
    return mean_ratio([_token_s(each[first]) / _token_s(each[second]) for each in answered])


def _token_s(answered: Answered) -> float:
    return answered.run.seconds / len(answered.run.tokens)


def forwards_goal(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Checks for one of our rows with at most a third of plain decoding's forwards and at least 99 % recovery.

    Recovery applies to the perplexity and to the number of right answers; plain decoding takes a forward per token.
    """
    right = next(row["right"] for row in rows if row["name"] == PLAIN)
    kept = [
        row
        for row in rows
        if row["ours"] and row["recovery"] >= RECOVERY_GOAL and row["right"] >= RECOVERY_GOAL * right
    ]
    best = min(kept, key=lambda row: float(row["forwards_per_token"]))
    share = best["forwards_per_token"]
    return {"row": best["name"], "share": share, "goal": FORWARDS_GOAL, "reached": share <= FORWARDS_GOAL}


def time_goal(answered: Sequence[Mapping[str, Answered]], lengths: Sequence[int]) -> dict[str, Any]:
    """Checks that strict decoding is faster than transformers' assisted generation with the same drafts for every K."""
    ratios = {str(k): time_ratio(answered, assisted(k), f"strict, K {k}") for k in lengths}
    return {"ratios": ratios, "reached": all(ratio["low"] > 1 for ratio in ratios.values())}


@torch.inference_mode()
def gate_seconds(target: TextTarget, k: int, repeats: int = 50) -> dict[str, float]:
    """Returns median seconds to choose and commit a path of a chain of k by rule, taking turns.

    The difference is the cost of gate and window.
    """
    decoder = target.decoder
    vocab = decoder.config.vocab_size
    cache = new_cache(decoder, slots=1, slot_rows=k + 2)
    there = torch.ones(1 + k, dtype=torch.bool)
    chain = Ancestry.from_parents(range(-1, k), decoder.device)
    tree = Tree(torch.randint(vocab, (1 + k,)), chain, torch.zeros(1 + k), there, there, depth=k)
    logits, hidden = torch.randn(1 + k, vocab), torch.zeros(1 + k, decoder.config.hidden_size)

    def verify(verifier: Verifier) -> object:
        part = VerifyInput(tree, 0, 0, 1, verifier.rule)
        return verifier.verify(ForwardResult(logits, hidden), [hidden], [part], verifier.prepare([part]))

    calls = {}
    for rule in ("strict", "fly"):
        settings = engine_settings_from(preset=PRESET, acceptance_rule=rule).acceptance
        verifier = Verifier(make_rule(settings, target), target.codec.action_ids, cache, max_nodes=1 + k, max_depth=k)
        calls[rule] = partial(verify, verifier)
    return take_turns(calls, repeats, "cpu")


if __name__ == "__main__":
    typer.run(main)
