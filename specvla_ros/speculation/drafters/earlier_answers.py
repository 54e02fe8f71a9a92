# SPDX-License-Identifier: Apache-2.0
"""Earlier answers of a policy, in which is looked up how the one that is being written may go on.

After REST (arXiv 2311.08252): the draft is what followed the longest match of the last tokens, found without a forward.
REST drafts the most frequent continuations as a tree; here, where answers have places, it is the one at the nearest
place.
"""

from __future__ import annotations

import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specvla_ros.errors import UserError

ANSWERS_FILE = "earlier_answers.npz"
"""In a checkpoint's directory."""
_LONGEST = 32  # tokens of a match; REST takes 16


class EarlierAnswers:
    """An index of all places in some answers, sorted by the tokens before them.

    Args:
        answers: token ids.
    """

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        lengths = np.array([len(answer) for answer in answers], dtype=np.int64)
        self._tokens = np.array([token for answer in answers for token in answer], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        self._begin = np.repeat(begins, lengths)  # of the answer that each token is in
        self._end = np.repeat(begins + lengths, lengths)
        self._place = np.arange(len(self._tokens)) - self._begin
        self._sorted = np.argsort(self._ranks(), kind="stable")

    def going_on(self, answer: Sequence[int]) -> tuple[int, ...]:
        """How an earlier answer went on to its end; empty: none has the last token.

        Args:
            answer: ids of the answer so far.
        """
        last = tuple(reversed(answer[-_LONGEST:]))
        at = bisect_left(self._sorted, last, key=self._before)
        beside = self._sorted[max(0, at - 1) : at + 1]
        length = max((_common(self._before(token), last) for token in beside), default=0)
        if not length:
            return ()
        matched = last[:length]
        first = bisect_left(self._sorted, matched, key=lambda token: self._before(token)[:length])
        behind = bisect_right(self._sorted, matched, key=lambda token: self._before(token)[:length])
        found = self._sorted[first:behind]
        nearest = found[np.abs(self._place[found] - (len(answer) - 1)).argmin()]
        return tuple(self._tokens[nearest + 1 : self._end[nearest]].tolist())

    def _before(self, token: int) -> tuple[int, ...]:
        """A token and those before it in its answer, the newest first."""
        first = max(self._begin[token], token - _LONGEST + 1)
        return tuple(self._tokens[first : token + 1][::-1].tolist())

    def _ranks(self) -> np.ndarray:
        """Of every token by what `_before` gives, int64 [n]: equal where that is. By doubling, as suffix arrays are."""
        ranks, length = self._tokens, 1
        while length < _LONGEST:
            earlier = np.zeros_like(ranks)  # where the answer has no tokens so early
            there = self._place >= length
            earlier[there] = ranks[np.flatnonzero(there) - length] + 1
            pairs = ranks * (earlier.max(initial=0) + 1) + earlier
            ranks, length = np.unique(pairs, return_inverse=True)[1], 2 * length
        return ranks


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def save_answers(path: Path, answers: Sequence[Sequence[int]]) -> None:
    """Writes answers to a file, at once or not at all.

    Raises:
        UserError: it cannot be written.
    """
    tokens = np.array([token for answer in answers for token in answer], dtype=np.int32)
    lengths = np.array([len(answer) for answer in answers], dtype=np.int32)
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:  # by name, numpy would add an ending of its own
            np.savez_compressed(file, tokens=tokens, lengths=lengths)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another --out") from None


def load_answers(path: Path, vocab_size: int) -> EarlierAnswers:
    """Reads what `save_answers` wrote.

    Raises:
        UserError: the file is missing or damaged, or of a policy with another vocabulary.
    """
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
            f"{path} holds token {tokens.max()}, and this policy's ids end at {vocab_size - 1}: it is another "
            f"policy's; {again}"
        )
    return EarlierAnswers([part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else [])
