# SPDX-License-Identifier: Apache-2.0
"""Drafts the chunk of actions before, shifted by the actions that have passed since: no forward, no training.

A policy that answers each picture with a chunk of actions says most of them again a picture later, one or more steps
further on. The chunk before, without what has passed and encoded anew, is therefore close to the next answer. Ours:
nothing published drafts across the overlap of chunks. Verified strictly, it changes no token.

Where an answer says its numbers one after the other, those that are committed say more of the rest: as far as they are
off the chunk before, the numbers behind them are likely off as well; and where the arm holds still, they go on as they
are, which needs no chunk before. All three guesses are drafted side by side; of a number that none of them begins as it
is begun, so is every other next digit.

Beside them goes what an earlier answer of the policy said behind the same tokens, where a file of them is there
(`earlier_answers.py`): it knows how chunks go on whose beginning the chunk before did not foresee, and the first of an
episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.branches import Branches
from specvla_ros.speculation.drafters.earlier_answers import ANSWERS_FILE, EarlierAnswers, load_answers
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, DraftInput, drafter

if TYPE_CHECKING:
    import torch

    from specvla_ros.models.codecs.codec import Codec, SaysNumbers
    from specvla_ros.models.target import Target
    from specvla_ros.speculation.tree import Tree

NO_ANSWERS = "none"
_EARLIER_PACE = 2  # the earlier answer's share of the nodes, against one for each guess: it is right for longer


@dataclass(frozen=True)
class ChunkShiftSettings:
    """Whether the chunk before is drafted."""

    enabled: bool = parameter(
        False,
        "Draft the chunk of actions before, shifted by what has passed since. For policies that answer with chunks and "
        "are asked again before the chunk's end.",
        name="chunk_shift",
    )
    answers: str = parameter(
        "",
        "With draft.chunk_shift: file of the policy's earlier answers, of which one that goes on from the same tokens "
        f"is drafted too; empty: {ANSWERS_FILE} of the checkpoint if it is there; none: no file.",
        name="answers",
    )


@dataclass(frozen=True)
class _Chunk:
    """An answer that was finished: its actions [horizon, dims], and the tokens before and behind theirs."""

    epoch: int
    stamp_ns: int
    actions: np.ndarray
    before: tuple[int, ...]
    behind: tuple[int, ...]
    encoded: dict[int, tuple[int, ...]] = field(default_factory=dict)  # whole answers by actions that have passed


class ChunkShiftDrafter(Drafter):
    """Remembers the newest chunk of each robot.

    Its drafts are never relaxed: accepted because it is near, a chunk would be followed for ever.

    Args:
        codec: of the policy.
        step_s: seconds that an action takes; 0: an action has passed from picture to picture, whenever they came.
        device: of the trees.
        earlier: answers of the policy from before; None: none are looked up.
    """

    def __init__(
        self,
        codec: Codec,
        step_s: float,
        device: torch.device | None = None,
        earlier: EarlierAnswers | None = None,
    ) -> None:
        from specvla_ros.models.codecs.codec import SaysNumbers  # torch comes with it

        self._codec = codec
        self._numbers: SaysNumbers | None = codec if isinstance(codec, SaysNumbers) else None
        self._step_s = step_s
        self._device = device
        self._earlier = earlier
        self._last: dict[str, _Chunk] = {}  # by stream
        still = np.tile(np.mean(codec.action_range, axis=0), (codec.horizon, 1))
        self._unknown = _Chunk(epoch=-1, stamp_ns=0, actions=still, before=(), behind=())

    def observe(
        self, epoch: int, answer: tuple[int, ...], action: tuple[int, ...], *, stamp_ns: int, stream: str = ""
    ) -> None:
        """Takes a finished answer; of several in flight the newest stays."""
        last = self._last.get(stream)
        if last is not None and last.epoch == epoch and last.stamp_ns >= stamp_ns:
            return
        text = len(self._codec.text_tokens(answer))
        behind = answer[text + len(action) :]
        self._last[stream] = _Chunk(epoch, stamp_ns, self._codec.decode(action), answer[:text], behind)

    def forget(self, stream: str | None = None) -> None:
        """As before the first answer."""
        self._last = {} if stream is None else {name: each for name, each in self._last.items() if name != stream}

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Tree]:
        """A chain for each guess: what it has behind the place that the request's answer has reached."""
        trees = []
        for request, limit in zip(inputs, nodes, strict=True):
            stamp_ns = request.observation.stamp_ns if request.observation is not None else 0
            guesses = [] if request.mid_prompt else self._guesses(request, stamp_ns)
            rests = [guess[self._codec.resume(guess, request.answer) :] for guess in guesses]
            paces = [1] * len(rests)
            if self._earlier is not None and request.answer:
                rests.append(self._going_on(request))
                paces.append(_EARLIER_PACE)
            if guesses and self._numbers is not None:
                rests += self._numbers.otherwise(guesses, request.answer)
            paces += [1] * (len(rests) - len(paces))
            branches = Branches.level_by_level(rests, max_depth=request.max_depth, max_nodes=limit - 1, paces=paces)
            trees.append(branches.tree(request.root, relaxable=False))
        return trees

    def draft_prompt(
        self, epoch: int, *, max_depth: int, in_text: bool, nodes: int, stamp_ns: int, stream: str = ""
    ) -> Tree | None:
        """The shifted answer from its beginning."""
        import torch

        chains = [self.answer(epoch, stamp_ns, stream)]
        branches = Branches.from_chains(chains, max_depth=max_depth, max_nodes=nodes - 1)
        root = torch.zeros(1, dtype=torch.int64, device=self._device)
        return branches.tree(root, relaxable=False) if len(branches) else None

    def answer(self, epoch: int, stamp_ns: int, stream: str = "") -> tuple[int, ...]:
        """The whole answer that is drafted for a picture; empty: none.

        Args:
            epoch: of the picture.
            stamp_ns: its stamp.
            stream: of which robot.
        """
        last = self._last.get(stream)
        if last is None or last.epoch != epoch:
            return ()
        passed = self._passed(last, stamp_ns)
        if passed not in last.encoded:
            last.encoded[passed] = self._encode(last, _shifted(last.actions, passed))
        return last.encoded[passed]

    def _guesses(self, request: DraftInput, stamp_ns: int) -> list[tuple[int, ...]]:
        """Whole answers that may go on from a committed beginning."""
        shifted = self.answer(request.epoch, stamp_ns, request.stream)
        begun = self._numbers.begun(request.answer) if self._numbers is not None else np.empty(0)
        if not len(begun):
            return [shifted]
        last = self._last.get(request.stream, self._unknown)
        if last.epoch == request.epoch:
            expected = _shifted(last.actions, self._passed(last, stamp_ns))
        else:  # another instruction: where the arm was left
            expected = np.repeat(last.actions[-1:], len(last.actions), axis=0)
        return [shifted, *(self._encode(last, chunk) for chunk in _as_begun(expected, begun))]

    def _going_on(self, request: DraftInput) -> tuple[int, ...]:
        """What an earlier answer said behind the same tokens."""
        assert self._earlier is not None
        rest = self._earlier.going_on(request.answer)
        last = self._last.get(request.stream, self._unknown)
        return (*rest, *last.behind) if rest else rest

    def _passed(self, last: _Chunk, stamp_ns: int) -> int:
        """Actions since the chunk before."""
        passed = round((stamp_ns - last.stamp_ns) * 1e-9 / self._step_s) if self._step_s else 1
        return min(max(passed, 0), len(last.actions) - 1)

    def _encode(self, last: _Chunk, actions: np.ndarray) -> tuple[int, ...]:
        """A whole answer; empty: there is none of such a chunk."""
        try:
            tokens = self._codec.encode(actions)
        except UserError:
            return ()
        return (*last.before, *tokens, *last.behind)


def _shifted(actions: np.ndarray, passed: int) -> np.ndarray:
    """A chunk some actions later; its last action stands for those that it does not say yet."""
    return np.concatenate((actions[passed:], np.repeat(actions[-1:], passed, axis=0)))


def _as_begun(shifted: np.ndarray, begun: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks that go on from a beginning: as far off as its newest numbers are, and holding these.

    Args:
        shifted: float64 [horizon, dims], the chunk before.
        begun: float64 [n], the first numbers of the new one, action by action.
    """
    dims, n = shifted.shape[1], len(begun)
    newest = shifted.copy().reshape(-1)
    newest[:n] = begun
    at = np.arange(newest.size)
    place = np.where(at < n, at, (at - n) % dims + n - dims)  # the newest number of the same dimension
    known = place >= 0
    held = np.where(known, newest[place], newest)
    off = np.where(known, newest[place] - shifted.reshape(-1)[place], 0.0)
    return (shifted.reshape(-1) + off).reshape(shifted.shape), held.reshape(shifted.shape)


@drafter("chunk_shift", settings=ChunkShiftSettings, order=5)
def _chunk_shift(context: DraftContext) -> Drafter | None:
    own: ChunkShiftSettings = context.own("chunk_shift")
    if not own.enabled:
        return None
    codec = context.target.codec
    if codec.horizon < 2:
        raise UserError(
            "draft.chunk_shift is for policies that answer with several actions; this one gives a single one: "
            "set draft.temporal in its place"
        )
    earlier = _earlier_answers(own, context.target)
    return ChunkShiftDrafter(codec, context.chunk_step_s, context.target.decoder.device, earlier)


def _earlier_answers(own: ChunkShiftSettings, target: Target) -> EarlierAnswers | None:
    path = Path(own.answers).expanduser() if own.answers else target.directory / ANSWERS_FILE
    if own.answers == NO_ANSWERS or not (own.answers or path.exists()):
        return None
    return load_answers(path, target.decoder.config.vocab_size)
