# SPDX-License-Identifier: Apache-2.0
"""Codec of answers in FAST tokens, and the bound on a relaxed action's deviation from the target's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.compare_drafts import Comparison, Trees
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import CODEC_FILE, CODEC_FOLDER, CODECS, CodecContext, WrittenChunkCodec
from specvla_ros.models.codecs.fast_tokenizer import HALF, FastTokenizer, cosines, read_fast_tokenizer
from specvla_ros.models.codecs.statistics import ActionStatistics, physical_limits
from specvla_ros.models.generation import read_end_ids
from specvla_ros.settings.json_file import Fields, read_fields


@dataclass(frozen=True)
class CoefficientDistances:
    """Distances between FAST tokens, in steps of a coefficient; see `TokenDistances`.

    One may replace the other if both have the same number of whole characters and differ in exactly one of them.
    """

    tokenizer: FastTokenizer
    first_id: int  # the policy's token of FAST id 0
    step: int  # difference between consecutive ids' tokens: 1 or -1

    def contain(self, tokens: Tensor) -> Tensor:
        ids = self._ids(tokens)
        return (ids >= 0) & (ids < self.tokenizer.vocab_size)

    def _ids(self, tokens: Tensor) -> Tensor:
        return tokens - self.first_id if self.step > 0 else self.first_id - tokens  # times the step: one more launch

    def position(self, tokens: Sequence[int]) -> int:
        """Number of coefficients so far, which is the index of the next one."""
        begun = self.tokenizer.characters_begun
        ids = ((token - self.first_id) * self.step for token in tokens)
        return sum(begun[i] for i in ids if 0 <= i < len(begun))

    def compare(self, trees: Trees) -> Comparison:
        """See `TokenDistances`: dimensions are indices of coefficients, distances are in steps of one."""
        wanted = trees.wanted
        coefficients, lengths, begun = _coefficient_table(self.tokenizer, trees.tokens.device)
        drafted, own = (
            torch.where(self.contain(tokens), self._ids(tokens), len(begun) - 1) for tokens in (trees.tokens, wanted)
        )
        apart = (coefficients[drafted] - coefficients[own]).abs()  # [requests, n, longest token]
        whole = (lengths[drafted] == lengths[own]) & (lengths[own] > 0)
        near = whole & ((apart > 0).sum(dim=2) == 1)
        start = trees.positions[:, None] + torch.where(trees.drafted_before, begun[drafted][:, None], 0).sum(dim=2)
        return Comparison.where_near(trees, wanted, near, apart.amax(dim=2), start + apart.argmax(dim=2))


@lru_cache(maxsize=4)  # uploaded once: in a tick, a copy waits for the device
def _coefficient_table(tokenizer: FastTokenizer, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tables by FAST id, all int64, with a last row for other tokens.

    Returns:
        a token's coefficients [ids + 1, longest token], padded with 0; their number [ids + 1], 0 if the token is not
        whole characters; the number of characters that begin in it [ids + 1].
    """
    texts = [token.decode("utf-8", errors="replace") for token in tokenizer.token_bytes]
    codes = [[] if HALF in text else [ord(character) for character in text] for text in texts]
    table = torch.zeros(len(texts) + 1, max(1, *map(len, codes)), dtype=torch.int64)
    for row, code in zip(table, codes, strict=False):
        row[: len(code)] = torch.tensor(code, dtype=torch.int64)
    lengths = torch.tensor([*map(len, codes), 0])
    return table.to(device), lengths.to(device), torch.tensor([*tokenizer.characters_begun, 0]).to(device)


@dataclass(frozen=True)
class FastCodec(WrittenChunkCodec):
    """Codec of answers with FAST tokens and an end token, optionally after fixed words. See `Codec`.

    Relaxed acceptance allows a token with one coefficient different from the target's own token, see
    `CoefficientDistances`. The inverse transform is linear, so each action of the chunk then lies within `bound`.
    """

    WRITES: ClassVar[str] = "FAST tokens"

    tokenizer: FastTokenizer  # FAST ids to normalised actions
    statistics: ActionStatistics  # normalised values to the robot's units
    horizon: int  # actions per answer
    first_id: int  # the policy's token of FAST id 0
    end_ids: frozenset[int]  # end tokens, which are part of the answer
    dt_s: float | None = None  # see `Codec`
    step: int = -1  # the policy's tokens count up from the first (1), as in NORA, or down (-1), as in pi0-FAST
    limit: int | None = None  # maximum length of an answer; None: that of the longest possible chunk
    beginning: tuple[int, ...] = ()  # tokens at the start of every answer

    @property
    def distances(self) -> "CoefficientDistances":
        return CoefficientDistances(self.tokenizer, self.first_id, self.step)

    def position(self, tokens: Sequence[int]) -> int:
        return self.distances.position(tokens[self._beginning_of(tokens) :])

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        """See `Codec`. Each dimension's tolerance is distributed a step at a time, starting at the lowest frequency."""
        limits = physical_limits(self.statistics, metres=metres, radians=radians)
        steps = np.zeros((self.horizon, len(self.names)), dtype=np.int64)
        for dim, limit in enumerate(limits):
            if limit is None:
                steps[:, dim] = gripper_bins
            elif limit and self._half_range[dim]:
                steps[:, dim] = self._shared_out(limit / self._half_range[dim], dim)
        return tuple(steps.flatten().tolist())

    def _shared_out(self, limit: float, dim: int) -> np.ndarray:
        """Steps per coefficient, int64 [horizon], that move no normalised action by more than the limit."""
        each = np.abs(cosines(self.horizon)) / self.tokenizer.scale  # [frequency, time]
        steps, moved = np.zeros(self.horizon, dtype=np.int64), np.zeros(self.horizon)
        fits = True
        while fits:
            fits = False
            for frequency, by in enumerate(each):
                if (moved + by).max() <= limit * (1 + 1e-12):
                    steps[frequency] += 1
                    moved, fits = moved + by, True
        if not steps.any():
            least = each.max(axis=1).min() * self._half_range[dim]
            raise UserError(
                f"a tolerance below {least:.3g} (m or rad) is smaller than one step of any FAST coefficient of "
                f"{self.names[dim]}: raise acceptance.tolerance_m or tolerance_rad, or set it to 0 for strict"
            )
        return steps

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        steps = np.asarray(bins).reshape(self.horizon, len(self.names)) / self.tokenizer.scale
        moved: np.ndarray = np.abs(cosines(self.horizon)).T @ steps * self._half_range
        switches = list(self.statistics.switches)
        moved[:, switches] = moved[:, switches] > 0  # flipped, or not at all
        return moved

    @property
    def _half_range(self) -> np.ndarray:
        """Half the range of each dimension, in the robot's units."""
        return np.where(self.statistics.mask, (self.statistics.high - self.statistics.low) / 2, 1.0)

    @property
    def max_tokens(self) -> int:
        """One character per coefficient, of at most two bytes each below 2048, and the end token."""
        longest = len(self.beginning) + 2 * self.horizon * len(self.names) + 1
        return longest if self.limit is None else min(longest, self.limit)

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[self._beginning_of(tokens) :][: -1 if tokens[-1] in self.end_ids else None])

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: self._beginning_of(tokens)])

    def _beginning_of(self, tokens: Sequence[int]) -> int:
        n = len(self.beginning)
        return n if tuple(tokens[:n]) == self.beginning else 0

    def problem(self, tokens: Sequence[int]) -> str:
        if tokens[-1] not in self.end_ids:
            return f"the answer has no end token after {len(tokens)} tokens"
        if self._beginning_of(tokens) < len(self.beginning):
            return "the answer does not start with the policy's fixed words"
        return self.tokenizer.problem(self._fast_ids(self.action_tokens(tokens)), self.horizon, len(self.names))

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        normalised = self.tokenizer.decode(self._fast_ids(tokens), self.horizon, len(self.names))
        return np.stack([self.statistics.unnormalise(row) for row in normalised])

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        return tuple(self.first_id + self.step * i for i in self.tokenizer.encode(self.normalise(actions)))

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        """Resumes after the same number of coefficients, since tokens differ in how many they encode."""
        wanted, reached = sum(map(self._bytes, answer)), 0
        for at, token in enumerate(draft):
            if reached >= wanted:
                return at
            reached += self._bytes(token)
        return len(draft)

    def _bytes(self, token: int) -> int:
        """Number of bytes of a token's coefficients; a token of the beginning counts as one."""
        (i,) = self._fast_ids((token,))
        found = self.tokenizer.token_bytes
        return len(found[i]) or 1 if 0 <= i < len(found) else 1

    def _fast_ids(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.step * (token - self.first_id) for token in tokens)


def check_dims(fields: Fields, statistics: ActionStatistics) -> None:
    """Raises UserError if a FAST tokenizer's processor_config.json gives another number of dimensions."""
    dims = fields.whole("action_dim", len(statistics.low), minimum=1, maximum=1 << 10)
    if dims != len(statistics.low):
        raise UserError(
            f"{fields.path.parent} was fitted for {dims} dimensions, but the action statistics have "
            f"{len(statistics.low)}: they belong to different policies; copy both from the same one"
        )


@CODECS.register("fast")
def _fast(context: CodecContext) -> FastCodec:
    """Makes the codec from `action_tokenizer/`, whose processor_config.json also has the horizon, `time_horizon`."""
    folder = context.directory / CODEC_FOLDER
    tokenizer = read_fast_tokenizer(folder)
    if tokenizer.vocab_size >= context.vocab_size:
        raise UserError(f"{folder} has {tokenizer.vocab_size} ids, but the policy only {context.vocab_size} tokens")
    statistics = context.statistics
    fields = read_fields(folder / CODEC_FILE, missing="", hint="; copy it again")
    check_dims(fields, statistics)
    horizon = fields.whole("time_horizon", minimum=1, maximum=1 << 10)
    end_ids, dt_s = read_end_ids(context.directory), fields.number("dt_s", None, above=0.0)
    return FastCodec(tokenizer, statistics, horizon, context.vocab_size - 1, end_ids, dt_s)
