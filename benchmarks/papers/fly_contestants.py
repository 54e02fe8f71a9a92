# SPDX-License-Identifier: Apache-2.0
"""Contestants of the FLy benchmark: this engine with its settings, and transformers' generate on the same weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.papers.text_target import TextTarget, text_observation
from benchmarks.transformers_baseline import transformers_decoder
from specvla_ros import Action, Engine, EngineSettings, UserError
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.speculation.accept import AcceptReason
from specvla_ros.speculation.settings import PRESETS, DraftSettings

PLAIN = "plain"
PRESET = "fly-paper"
PAPER = PRESETS[PRESET]
K, WINDOW, THETA = (PAPER[name] for name in ("draft.model_tokens", "acceptance.fly_window", "acceptance.fly_theta"))
LOOKUP = PAPER["draft.model_lookup_tokens"]
_WINDOWS, _THETAS = (0, 2, 4), (0.0, 0.15)  # in addition to the paper's own, each varied separately as in its ablation
_LONGEST_MATCH = 3  # maximum match of transformers' prompt lookup in ids, the same as ours


@dataclass(frozen=True)
class Run:
    """An answer and its cost.

    Args:
        tokens: the answer's tokens, including its end token.
        seconds: time from the prompt's ids to the tokens.
        forwards: forwards of the target, including the prompt's.
        verifications: forwards of the target that verified a draft, or could have.
        verified: tokens committed by these, including the target's own.
        draft_forwards: forwards of the draft model.
        deferred: tokens that FLy accepted although they are not the target's own choice.
    """

    tokens: tuple[int, ...]
    seconds: float
    forwards: int
    verifications: int
    verified: int
    draft_forwards: int = 0
    deferred: int = 0


class Contestant(Protocol):
    """A contestant that answers prompts.

    Attributes:
        loose: True if its answers may differ from plain decoding's.
    """

    @property
    def loose(self) -> bool: ...

    def answer(self, prompt: Sequence[int]) -> Run:
        """Answers a prompt's ids."""


@dataclass(frozen=True)
class Ours:
    """The engine as a contestant; contestants with the same drafting share one."""

    engine: Engine
    settings: EngineSettings

    @property
    def loose(self) -> bool:
        return self.settings.acceptance.rule != "strict"

    def answer(self, prompt: Sequence[int]) -> Run:
        engine = self.engine
        engine.set_acceptance(self.settings.acceptance)
        drafted = engine.drafter.work
        started = time.perf_counter()
        outcome = engine.act(text_observation("", stamp_ns=time.monotonic_ns(), prompt_ids=prompt))
        seconds = time.perf_counter() - started
        if not isinstance(outcome, Action):
            raise UserError(f"no answer: {outcome.reason.value}: {outcome.detail}")
        record = outcome.record
        verified = record.tokens_per_forward[len(record.tokens_per_forward) - len(record.accept_lengths) :]
        return Run(
            outcome.tokens,
            seconds,
            forwards=record.forwards,
            verifications=len(verified),
            verified=sum(verified),
            draft_forwards=engine.drafter.work.since(drafted).model_forwards,
            deferred=record.why.count(AcceptReason.DEFERRED),
        )


class Counted:
    """A transformers model with a count of its forwards."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.forwards = 0
        model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forwards += 1


@dataclass(frozen=True)
class Generate:
    """transformers' own generate, greedy; each of its forwards verifies a draft, including the prompt's.

    The draft model always drafts k tokens: there is no schedule, and no confidence threshold that ends a draft.
    """

    target: Counted
    options: dict[str, Any]
    draft: Counted | None = None
    k: int = 0
    loose: bool = False

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int]) -> Run:
        options = dict(self.options)
        if self.draft is not None:
            chosen = self.draft.model.generation_config
            chosen.num_assistant_tokens, chosen.num_assistant_tokens_schedule = self.k, "constant"
            chosen.assistant_confidence_threshold = 0.0
            options["assistant_model"] = self.draft.model
        before = self._forwards()
        started = time.perf_counter()
        ids = torch.tensor([prompt])
        out = self.target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        tokens = tuple(out[0, len(prompt) :].tolist())
        seconds = time.perf_counter() - started
        forwards, drafted = (now - then for now, then in zip(self._forwards(), before, strict=True))
        return Run(tokens, seconds, forwards, forwards, len(tokens), drafted)

    def _forwards(self) -> tuple[int, int]:
        return self.target.forwards, self.draft.forwards if self.draft is not None else 0


def our_settings(draft: Path, *, tokens: int, longest_prompt: int, lengths: Sequence[int]) -> dict[str, EngineSettings]:
    """Returns this engine's settings by row name, plain decoding first; `lengths`: K of the drafted chains."""
    sizes: dict[str, Any] = {"max_reasoning_tokens": tokens, "max_text_tokens": longest_prompt}

    def chain(k: int, *, lookup: int = 0, **others: Any) -> EngineSettings:
        model = {"draft_model": str(draft), "draft_model_tokens": k, "draft_model_lookup_tokens": lookup}
        own: dict[str, Any] = sizes | {"draft_nodes": 1 + k} | model | others
        return engine_settings_from(mode="spec", preset=PRESET, **own)

    def strict(k: int, **others: Any) -> EngineSettings:
        return chain(k, acceptance_rule="strict", **others)

    def fly(k: int = K, window: int = WINDOW, theta: float = THETA) -> dict[str, EngineSettings]:
        name = f"FLy, K {k}, W {window}, θ {theta:g}, multi-level"
        return {name: chain(k, lookup=LOOKUP, acceptance_fly_window=window, acceptance_fly_theta=theta)}

    found = {PLAIN: engine_settings_from(mode="ar", **sizes)}
    found |= {f"strict, K {k}": strict(k) for k in lengths}
    found[f"strict, K {K}, multi-level"] = strict(K, lookup=LOOKUP)
    found["strict, lookup"] = engine_settings_from(
        mode="spec", draft_head="none", draft_nodes=1 + LOOKUP, draft_prompt_lookup_tokens=LOOKUP, **sizes
    )
    found[f"strict, K {K} and lookup"] = strict(K, draft_nodes=1 + K + LOOKUP, draft_prompt_lookup_tokens=LOOKUP)
    found |= fly()
    found[f"FLy, K {K}, W {WINDOW}, θ {THETA:g}"] = chain(K)
    for window in _WINDOWS:
        found |= fly(window=window)
    for theta in _THETAS:
        found |= fly(theta=theta)
    for k in lengths:
        found |= fly(k)
    return found


def contestants(
    target: TextTarget, draft: TextTarget, settings: dict[str, EngineSettings], lengths: Sequence[int]
) -> dict[str, Contestant]:
    """Returns the contestants by row name."""
    engines: dict[tuple[str, DraftSettings], Engine] = {}
    found: dict[str, Contestant] = {}
    for name, chosen in settings.items():
        drafts_like = chosen.mode, chosen.draft
        if drafts_like not in engines:
            engines[drafts_like] = Engine(target, chosen)
        found[name] = Ours(engines[drafts_like], chosen)
    tokens = settings[PLAIN].max_reasoning_tokens
    ends = sorted(target.codec.end_ids)
    # Any other padding id than an end token would be masked from the assistant wherever it occurs in a prompt.
    options = {"max_new_tokens": tokens, "eos_token_id": ends, "pad_token_id": ends[0]}
    theirs, drafting = (Counted(transformers_decoder(each.decoder)) for each in (target, draft))
    found["transformers, plain"] = Generate(theirs, options)
    for k in lengths:
        found[assisted(k)] = Generate(theirs, options, drafting, k)
    lookup = {"prompt_lookup_num_tokens": LOOKUP, "max_matching_ngram_size": _LONGEST_MATCH}
    found["transformers, lookup"] = Generate(theirs, options | lookup)
    return found


def assisted(k: int) -> str:
    """Returns the row name of transformers' assisted generation."""
    return f"transformers, assisted, K {k}"
