# SPDX-License-Identifier: Apache-2.0
"""Drafts the previous chunk of actions, shifted by the actions executed since: no forward, no training.

A policy that answers each image with a chunk of actions mostly repeats them for the next image, one or more steps
later. The previous chunk without its executed actions, encoded again, is therefore close to the next answer. This is
our own method: we know of no published one that drafts across the overlap of chunks. It changes no token if verified
strictly.

If an answer gives its numbers in order, the committed ones predict the rest. Their offset from the previous chunk
likely applies to the following numbers too. If the arm holds still, they repeat, even without a previous chunk. All
three guesses are drafted in parallel. If none of them starts a number as the answer did, every other next digit is
drafted as well. Another branch continues an earlier answer with the same tokens, from a file (`EarlierAnswers`), which
covers chunks that the previous one did not predict, and the first chunk of an episode.
"""

from __future__ import annotations

import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.prompt_lookup import common_prefix
from specvla_ros.speculation.drafters.registry import (
    DraftContext,
    Drafter,
    DraftInput,
    FinishedAnswer,
    drafter,
)
from specvla_ros.speculation.tree import Branches

if TYPE_CHECKING:
    from specvla_ros.models.codecs.codec import Codec, SaysNumbers
    from specvla_ros.models.target import Target

ANSWERS_FILE = "earlier_answers.npz"
"""File name in a checkpoint's directory."""
NO_ANSWERS = "none"
_LONGEST = 32  # max tokens matched in earlier answers; REST uses 16
_EARLIER_PACE = 2  # the earlier answer's share of nodes relative to a guess: it stays correct for longer


@dataclass(frozen=True)
class ChunkShiftSettings:
    """Settings of drafting the previous chunk."""

    enabled: bool = parameter(
        False,
        "Draft the previous chunk of actions, shifted by the time since. For policies that answer with chunks and are "
        "called again before the end of a chunk.",
        name="chunk_shift",
    )
    answers: str = parameter(
        "",
        "File of the policy's earlier answers. draft.chunk_shift also drafts the continuation of one with the same "
        f"tokens; empty: the checkpoint's {ANSWERS_FILE} if it exists; none: no file.",
        name="answers",
    )


@dataclass(frozen=True)
class _Chunk:
    """A finished answer: its actions [horizon, dims], and the tokens before and after theirs."""

    epoch: int
    stamp_ns: int
    actions: np.ndarray
    prefix_tokens: tuple[int, ...] = ()
    suffix_tokens: tuple[int, ...] = ()
    encoded: dict[int, tuple[int, ...]] = field(default_factory=dict)  # whole answers by number of executed actions


class ChunkShiftDrafter(Drafter):
    """Stores the newest chunk of each robot.

    Its drafts are never relaxed: a chunk would be accepted because it is near, and then followed forever.

    Args:
        step_s: duration of an action in seconds; 0: successive images are one action apart.
        earlier: earlier answers of the policy; None: no lookup.
    """

    def __init__(self, codec: Codec, step_s: float, earlier: EarlierAnswers | None = None) -> None:
        from specvla_ros.models.codecs.codec import SaysNumbers  # imports torch

        self._codec = codec
        self._numbers: SaysNumbers | None = codec if isinstance(codec, SaysNumbers) else None
        self._step_s = step_s
        self._earlier = earlier
        self._last: dict[str, _Chunk] = {}  # by stream
        still = np.tile(np.mean(codec.action_range, axis=0), (codec.horizon, 1))
        self._unknown = _Chunk(epoch=-1, stamp_ns=0, actions=still)

    def observe(self, answer: FinishedAnswer) -> None:
        """Stores a finished answer unless the stored one of the same epoch is newer."""
        last = self._last.get(answer.stream)
        if last is not None and last.epoch == answer.epoch and last.stamp_ns >= answer.stamp_ns:
            return
        if not answer.whole:
            self._last[answer.stream] = self._completed(answer, last)
            return
        tokens, text = answer.tokens, len(self._codec.text_tokens(answer.tokens))
        self._last[answer.stream] = _Chunk(
            answer.epoch,
            answer.stamp_ns,
            self._codec.decode(answer.action),
            prefix_tokens=tokens[:text],
            suffix_tokens=tokens[text + len(answer.action) :],
        )

    def forget(self, stream: str | None = None) -> None:
        self._last = {} if stream is None else {name: each for name, each in self._last.items() if name != stream}

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Branches]:
        """Drafts a chain for each guess: its tokens after the position that the request's answer has reached."""
        drafts = []
        for request, limit in zip(inputs, nodes, strict=True):
            guesses = [] if request.mid_prompt else self._guesses(request, _stamp_ns(request))
            rests = [guess[self._codec.resume(guess, request.answer) :] for guess in guesses]
            paces = [1] * len(rests)
            if self._earlier is not None and request.answer:
                rests.append(self._going_on(request))
                paces.append(_EARLIER_PACE)
            if guesses and self._numbers is not None:
                rests += self._numbers.other_continuations(guesses, request.answer)
            paces += [1] * (len(rests) - len(paces))
            sizes = dict(max_depth=request.max_depth, max_nodes=limit - 1)
            drafts.append(Branches.level_by_level(rests, **sizes, paces=paces, relaxable=False))
        return drafts

    def draft_prompt(self, prompt: DraftInput, nodes: int) -> Branches:
        """Drafts the shifted answer from its start, or its rest after a given one."""
        shifted = self.answer(prompt.epoch, _stamp_ns(prompt), prompt.stream)
        chains = [shifted[self._codec.resume(shifted, prompt.answer) :]]
        return Branches.from_chains(chains, max_depth=prompt.max_depth, max_nodes=nodes - 1, relaxable=False)

    def answer(self, epoch: int, stamp_ns: int, stream: str = "") -> tuple[int, ...]:
        """The whole answer drafted for an image; empty if there is none."""
        last = self._last.get(stream)
        if last is None or last.epoch != epoch:
            return ()
        passed = self._passed(last, stamp_ns)
        if passed not in last.encoded:
            last.encoded[passed] = self._encode(last, _shifted(last.actions, passed))
        return last.encoded[passed]

    def _completed(self, answer: FinishedAnswer, last: _Chunk | None) -> _Chunk:
        """Completes the chunk of an answer ended early with the previous chunk's actions, or holds the last one."""
        assert self._numbers is not None
        dims, horizon = len(self._codec.names), self._codec.horizon
        begun = self._numbers.completed_numbers(answer.tokens)
        known = begun[: len(begun) // dims * dims].reshape(-1, dims)
        if last is None or last.epoch != answer.epoch:
            last = _Chunk(answer.epoch, answer.stamp_ns, np.repeat(known[-1:], horizon, axis=0))
        expected = _shifted(last.actions, self._passed(last, answer.stamp_ns))
        actions = np.concatenate((known, expected[len(known) :]))
        return _Chunk(answer.epoch, answer.stamp_ns, actions, suffix_tokens=last.suffix_tokens)

    def _guesses(self, request: DraftInput, stamp_ns: int) -> list[tuple[int, ...]]:
        """Whole answers that may continue a committed prefix."""
        shifted = self.answer(request.epoch, stamp_ns, request.stream)
        begun = self._numbers.completed_numbers(request.answer) if self._numbers is not None else np.empty(0)
        if not len(begun):
            return [shifted]
        last = self._last.get(request.stream, self._unknown)
        if last.epoch == request.epoch:
            expected = _shifted(last.actions, self._passed(last, stamp_ns))
        else:  # another instruction: hold the last action
            expected = np.repeat(last.actions[-1:], len(last.actions), axis=0)
        return [shifted, *(self._encode(last, chunk) for chunk in _as_begun(expected, begun))]

    def _going_on(self, request: DraftInput) -> tuple[int, ...]:
        assert self._earlier is not None
        rest = self._earlier.going_on(request.answer)
        last = self._last.get(request.stream, self._unknown)
        return (*rest, *last.suffix_tokens) if rest else rest

    def _passed(self, last: _Chunk, stamp_ns: int) -> int:
        passed = round((stamp_ns - last.stamp_ns) * 1e-9 / self._step_s) if self._step_s else 1
        return min(max(passed, 0), len(last.actions) - 1)

    def _encode(self, last: _Chunk, actions: np.ndarray) -> tuple[int, ...]:
        """The whole answer of a chunk; empty if it cannot be encoded."""
        try:
            tokens = self._codec.encode(actions)
        except UserError:
            return ()
        return (*last.prefix_tokens, *tokens, *last.suffix_tokens)


def _stamp_ns(request: DraftInput) -> int:
    return request.observation.stamp_ns if request.observation is not None else 0


def _shifted(actions: np.ndarray, passed: int) -> np.ndarray:
    """A chunk shifted by `passed` actions; the last action is repeated at the end."""
    return np.concatenate((actions[passed:], np.repeat(actions[-1:], passed, axis=0)))


def _as_begun(shifted: np.ndarray, begun: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two chunks [horizon, dims] with given first numbers [n]: `shifted` plus the newest offset, and newest held."""
    dims, n = shifted.shape[1], len(begun)
    newest = shifted.copy().reshape(-1)
    newest[:n] = begun
    at = np.arange(newest.size)
    place = np.where(at < n, at, (at - n) % dims + n - dims)  # the newest number of the same dimension
    known = place >= 0
    held = np.where(known, newest[place], newest)
    off = np.where(known, newest[place] - shifted.reshape(-1)[place], 0.0)
    return (shifted.reshape(-1) + off).reshape(shifted.shape), held.reshape(shifted.shape)


class EarlierAnswers:
    """Earlier answers of a policy, to look up continuations of the current one.

    After REST (arXiv 2311.08252), which drafts a tree of the most frequent continuations of the longest match of the
    last tokens; here it is the continuation of the match at the nearest position. The index has all positions in the
    answers, sorted by the tokens before them.
    """

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        lengths = np.array([len(answer) for answer in answers], dtype=np.int64)
        self._tokens = np.array([token for answer in answers for token in answer], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        self._begin = np.repeat(begins, lengths)  # start of each token's answer
        self._end = np.repeat(begins + lengths, lengths)
        self._place = np.arange(len(self._tokens)) - self._begin
        self._sorted = np.argsort(self._ranks(), kind="stable")

    def going_on(self, answer: Sequence[int]) -> tuple[int, ...]:
        """The rest of an earlier answer from the match on; empty if none has the last token."""
        last = tuple(reversed(answer[-_LONGEST:]))
        at = bisect_left(self._sorted, last, key=self._before)
        beside = self._sorted[max(0, at - 1) : at + 1]
        length = max((common_prefix(self._before(token), last) for token in beside), default=0)
        if not length:
            return ()
        matched = last[:length]
        first = bisect_left(self._sorted, matched, key=lambda token: self._before(token)[:length])
        stop = bisect_right(self._sorted, matched, key=lambda token: self._before(token)[:length])
        found = self._sorted[first:stop]
        nearest = found[np.abs(self._place[found] - (len(answer) - 1)).argmin()]
        return tuple(self._tokens[nearest + 1 : self._end[nearest]].tolist())

    def _before(self, token: int) -> tuple[int, ...]:
        """A token and those before it in its answer, newest first."""
        first = max(self._begin[token], token - _LONGEST + 1)
        return tuple(self._tokens[first : token + 1][::-1].tolist())

    def _ranks(self) -> np.ndarray:
        """Each token's rank by `_before`, int64 [n], equal for equal results; by doubling, as in suffix arrays."""
        ranks, length = self._tokens, 1
        while length < _LONGEST:
            earlier = np.zeros_like(ranks)  # 0 before the start of the answer
            there = self._place >= length
            earlier[there] = ranks[np.flatnonzero(there) - length] + 1
            pairs = ranks * (earlier.max(initial=0) + 1) + earlier
            ranks, length = np.unique(pairs, return_inverse=True)[1], 2 * length
        return ranks


def load_answers(path: Path, vocab_size: int) -> EarlierAnswers:
    """Reads a file of earlier answers; raises UserError if it is missing, damaged, or of another vocabulary."""
    again = "make it with `specvla collect-answers`"
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, lengths = (file[name].astype(np.int64) for name in ("tokens", "lengths"))
    except FileNotFoundError:
        raise UserError(f"draft.answers: {path} does not exist; {again}") from None
    except (EOFError, KeyError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged or holds no answers ({error}); {again}") from None
    if tokens.ndim != 1 or lengths.ndim != 1 or lengths.min(initial=0) < 0 or lengths.sum() != len(tokens):
        raise UserError(f"{path} is damaged: its lengths do not fit its tokens; {again}")
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise UserError(
            f"{path} holds token {tokens.max()}, but this policy's ids end at {vocab_size - 1}: it is from another "
            f"policy; {again}"
        )
    return EarlierAnswers([part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else [])


@drafter("chunk_shift", settings=ChunkShiftSettings, order=5)
def _chunk_shift(context: DraftContext) -> Drafter | None:
    own: ChunkShiftSettings = context.own("chunk_shift")
    if not own.enabled:
        return None
    codec = context.target.codec
    if context.target.head is not None:
        raise UserError(
            "draft.chunk_shift drafts tokens, but this policy writes none, since its actions come from a head: set it "
            "to false"
        )
    if codec.horizon < 2:
        raise UserError(
            "draft.chunk_shift needs a policy that answers with several actions; this one gives a single action: "
            "set draft.temporal instead"
        )
    return ChunkShiftDrafter(codec, context.chunk_step_s, _earlier_answers(own, context.target))


def _earlier_answers(own: ChunkShiftSettings, target: Target) -> EarlierAnswers | None:
    path = Path(own.answers).expanduser() if own.answers else target.directory / ANSWERS_FILE
    if own.answers == NO_ANSWERS or not (own.answers or path.exists()):
        return None
    return load_answers(path, target.decoder.config.vocab_size)
