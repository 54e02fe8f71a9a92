# SPDX-License-Identifier: Apache-2.0
"""Actions as bins: 256 per dimension at the end of the vocabulary, scaled by the training data's quantiles."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import CODECS, ActionIds, CodecContext
from specvla_ros.settings.json_file import is_number, shown


class ActionTokenizer:
    """OpenVLA's action tokens.

    Bin edges are linspace(-1, 1, bins); token `vocab_size - d` stands for the d-th bin, so that the last ids of the
    vocabulary are the lowest values. 256 ids share 255 centres: the two lowest ids decode alike.

    Args:
        vocab_size: tokens in the vocabulary, padding rows not counted (32000 for Llama 2).
        bins: number of edges, and of ids.
    """

    def __init__(self, vocab_size: int, bins: int = 256) -> None:
        self.vocab_size = vocab_size
        self.edges = np.linspace(-1.0, 1.0, bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2.0

    @property
    def first_id(self) -> int:
        """The lowest action token, and the highest value."""
        return self.vocab_size - len(self.edges)

    def is_action(self, token: int) -> bool:
        return self.first_id <= token < self.vocab_size

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Normalised values, any shape, clipped to [-1, 1], to int64 token ids of the same shape."""
        return self.vocab_size - np.digitize(np.clip(values, -1.0, 1.0), self.edges)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Token ids to bin centres, float64 of the same shape; ids outside the action tokens are clipped."""
        index = np.clip(self.vocab_size - np.asarray(tokens) - 1, 0, len(self.centers) - 1)
        return self.centers[index]


MAX_VALUE = 1e6  # no robot's action is larger in any unit


@dataclass(frozen=True)
class ActionStatistics:
    """The statistics of one dataset.

    Args:
        unnorm_key: the dataset's name in the checkpoint.
        low, high: float64 [action_dim], the 1st and 99th percentile of the training actions.
        mask: bool [action_dim]; False: the dimension is used as it is (a gripper in [0, 1]).
        switches: indices of such dimensions that are 1 above a half, and else 0.
    """

    unnorm_key: str
    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray
    switches: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """One name per dimension: x y z roll pitch yaw gripper, or dim_0 … where the policy has not seven."""
        n = len(self.low)
        return ACTION_NAMES if n == len(ACTION_NAMES) else tuple(f"dim_{i}" for i in range(n))

    def unnormalise(self, values: np.ndarray) -> np.ndarray:
        """Normalised values [action_dim] in [-1, 1] to the robot's units, float64, not clipped."""
        scaled = 0.5 * (values + 1) * (self.high - self.low) + self.low
        found = np.where(self.mask, scaled, values)
        found[list(self.switches)] = found[list(self.switches)] > 0.5
        return found

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """The inverse; a dimension that never moved in training (high = low) gives 0."""
        width = np.where(self.high > self.low, self.high - self.low, np.inf)
        return np.where(self.mask, 2 * (values - self.low) / width - np.isfinite(width), values)


def select_statistics(norm_stats: Mapping[str, Any], unnorm_key: str, kind: str = "action") -> ActionStatistics:
    """The statistics of actions, or of another `kind` of vector, under a key; an empty key means the only one.

    A fine-tuned LIBERO checkpoint may hold `NAME_no_noops` for the suite NAME; that is found too, as in OpenVLA's
    evaluation.

    Raises:
        UserError: no key given and several there, an unknown key, or malformed statistics.
    """
    known = ", ".join(sorted(norm_stats)) or "none"
    if not unnorm_key:
        if len(norm_stats) != 1:
            raise UserError(
                f"this checkpoint has statistics of {len(norm_stats)} datasets; set unnorm_key to one of: {known}"
            )
        unnorm_key = next(iter(norm_stats))
    if unnorm_key not in norm_stats and f"{unnorm_key}_no_noops" in norm_stats:
        unnorm_key = f"{unnorm_key}_no_noops"
    if unnorm_key not in norm_stats:
        raise UserError(f"unnorm_key '{unnorm_key}' is not in this checkpoint; it has: {known}")
    where = f"norm_stats[{shown(unnorm_key)}]['{kind}']"
    statistics = norm_stats[unnorm_key]
    action = statistics.get(kind) if isinstance(statistics, Mapping) else None
    if not isinstance(action, Mapping) or not {"q01", "q99"} <= action.keys():
        raise UserError(f"{where} needs the lists q01 and q99")
    low, high = (_numbers(action[name], f"{where}['{name}']") for name in ("q01", "q99"))
    mask = action.get("mask", [True] * len(low))
    if not isinstance(mask, list) or not all(type(each) is bool for each in mask):
        raise UserError(f"{where}['mask'] is {shown(mask)}, but it must be a list of true and false")
    if not len(low) == len(high) == len(mask) > 0:
        raise UserError(f"{where}: q01, q99 and mask must be lists of the same length")
    if not (low <= high).all():
        raise UserError(f"{where}: q01 and q99 must be finite, with q01 <= q99")
    return ActionStatistics(unnorm_key, low, high, np.asarray(mask, dtype=bool))


def read_statistics(context: CodecContext) -> ActionStatistics:
    """Those that a checkpoint's codec uses."""
    return checked_statistics(context.directory, context.norm_stats, context.unnorm_key)


def checked_statistics(
    path: Path, norm_stats: Mapping[str, Any], unnorm_key: str, kind: str = "action"
) -> ActionStatistics:
    """As `select_statistics`; errors begin with the checkpoint or file."""
    try:
        return select_statistics(norm_stats, unnorm_key, kind)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _numbers(value: Any, where: str) -> np.ndarray:
    if not isinstance(value, list) or not all(is_number(each) and abs(each) <= MAX_VALUE for each in value):
        raise UserError(
            f"{where} is {shown(value)}, but it must be a list of numbers, finite and at most {MAX_VALUE:g}"
        )
    return np.asarray(value, dtype=np.float64)


_METRES = ("x", "y", "z")


@dataclass(frozen=True)
class BinsCodec:
    """OpenVLA's answers: one bin token per dimension, after up to `max_text` tokens of text.

    Args:
        tokenizer: token ids to normalised values.
        statistics: normalised values to the robot's units.
        max_text: text tokens that may come before the action, as in embodied chain-of-thought; 0 for OpenVLA, whose
            first token is an action.
        dt_s: see `Codec`.
        end_ids: the token ids with which a policy that writes text ends its answer, which then holds one whole action
            at its end. Empty: an answer ends with the last token of the first whole action.
    """

    tokenizer: ActionTokenizer
    statistics: ActionStatistics
    max_text: int = 0
    dt_s: float | None = None
    end_ids: frozenset[int] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        return self.statistics.names

    @property
    def unnorm_key(self) -> str:
        return self.statistics.unnorm_key

    @property
    def horizon(self) -> int:
        return 1

    @property
    def dims(self) -> int:
        return len(self.statistics.low)

    @property
    def action_range(self) -> tuple[np.ndarray, np.ndarray]:
        return self.statistics.low, self.statistics.high

    @property
    def action_ids(self) -> ActionIds:
        tokenizer = self.tokenizer
        return ActionIds(tokenizer.first_id, tokenizer.vocab_size, bins=len(tokenizer.centers))

    @property
    def distances(self) -> ActionIds:
        return self.action_ids

    @property
    def max_tokens(self) -> int:
        return self.max_text + self.dims + bool(self.end_ids)

    def with_text(self, max_text: int) -> "BinsCodec":
        if self.end_ids and not max_text:
            raise UserError(
                "this policy writes text before its action: set decode.max_reasoning_tokens to its length, such as 1024"
            )
        return replace(self, max_text=max_text)

    def position(self, tokens: Sequence[int]) -> int:
        if not self.max_text:
            return len(tokens)
        text = (i for i, token in enumerate(reversed(tokens)) if not self.tokenizer.is_action(token))
        return next(text, len(tokens))

    def in_text(self, tokens: Sequence[int]) -> bool:
        return self.max_text > 0 and not 0 < self.position(tokens) < self.dims

    def remaining(self, tokens: Sequence[int]) -> int:
        position, limit = self.position(tokens), self.max_tokens - len(tokens)
        return min(limit, self.dims - position + bool(self.end_ids)) if 0 < position < self.dims else limit

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        return None if self.in_text(tokens) else range(self.tokenizer.first_id, self.tokenizer.vocab_size)

    def end(self, tokens: Sequence[int], known: int) -> int:
        for n in range(known + 1, len(tokens) + 1):
            whole = tokens[n - 1] in self.end_ids if self.end_ids else self.position(tokens[:n]) == self.dims
            if whole or n == self.max_tokens:
                return n
        return 0

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: self._stop(tokens)][-self.dims :])

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: self._stop(tokens)][: -self.dims])

    def _stop(self, tokens: Sequence[int]) -> int:
        return len(tokens) - (tokens[-1] in self.end_ids)

    def problem(self, tokens: Sequence[int]) -> str:
        if not self.end_ids:
            other = (token for token in self.action_tokens(tokens) if not self.tokenizer.is_action(token))
            return "".join(f"token {token} is no action token" for token in islice(other, 1))
        if tokens[-1] not in self.end_ids:
            return f"the answer has no end after {len(tokens)} tokens: raise decode.max_reasoning_tokens"
        actions = self.position(tokens[:-1])
        return "" if actions == self.dims else f"the answer ends with {actions} action tokens in place of {self.dims}"

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        return self.statistics.unnormalise(self.tokenizer.decode(tokens))[None]

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        return tuple(int(token) for token in self.tokenizer.encode(self.statistics.normalise(actions[0])))

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        return min(len(answer), len(draft))

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        return self.statistics.normalise(actions)

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        return tolerance_in_bins(
            self.statistics, len(self.tokenizer.centers), metres=metres, radians=radians, gripper_bins=gripper_bins
        )

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        return spread_bins(bins, self.statistics.mask.tolist(), gripper_bins)

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        normalised = np.asarray(bins) * np.diff(self.tokenizer.edges)[0]
        scale = np.where(self.statistics.mask, (self.statistics.high - self.statistics.low) / 2, 1.0)
        return (normalised * scale)[None]


@CODECS.register("bins")
def _bins(context: CodecContext) -> BinsCodec:
    tokenizer = ActionTokenizer(context.vocab_size, context.bins)
    return BinsCodec(tokenizer, read_statistics(context), end_ids=context.end_ids)


def tolerance_in_bins(
    statistics: ActionStatistics, values: int, *, metres: float, radians: float, gripper_bins: int
) -> tuple[int, ...]:
    """Physical tolerances as whole bins per dimension, rounded down; 0 is strict.

    Args:
        values: bin centres per dimension (255); a bin is 2 / `values` of half the dimension's range.
        metres, radians: for x, y, z; for roll, pitch, yaw.
        gripper_bins: for dimensions that the statistics do not scale.

    Raises:
        UserError: a tolerance smaller than one bin of its dimension, or statistics whose units are not known.
    """
    bins = []
    widths = (statistics.high - statistics.low) / values
    limits = physical_limits(statistics, metres=metres, radians=radians)
    for name, width, tolerance in zip(statistics.names, widths, limits, strict=True):
        unit = "m" if name in _METRES else "rad"
        if tolerance is None:
            bins.append(gripper_bins)
            continue
        if not tolerance or not width:  # a dimension that never moved in training has one value
            bins.append(0)
            continue
        whole = math.floor(tolerance / width * (1 + 1e-12))
        if whole < 1:
            least = _rounded_up(width)
            raise UserError(
                f"a tolerance of {tolerance:g} {unit} is smaller than one bin of {name}: "
                f"set it to {least:g} {unit} or more, or to 0 for strict"
            )
        bins.append(min(values - 1, whole))
    return tuple(bins)


def physical_limits(statistics: ActionStatistics, *, metres: float, radians: float) -> list[float | None]:
    """The tolerance of each dimension in its unit; None: the statistics do not scale it, as a gripper's.

    UserError if the dimensions' units are not known.
    """
    if statistics.names != ACTION_NAMES:
        raise UserError(
            "acceptance.tolerance_m and acceptance.tolerance_rad need actions named x y z roll pitch yaw gripper; this "
            f"checkpoint has {len(statistics.low)} dimensions without units: set acceptance.bins instead"
        )
    of_names = [metres if name in _METRES else radians for name in statistics.names]
    return [each if scaled else None for each, scaled in zip(of_names, statistics.mask, strict=True)]


def _rounded_up(width: float) -> float:
    """To four digits and not below, so that the number named in a message is accepted."""
    unit = 10.0 ** (math.floor(math.log10(width)) - 3)
    return math.ceil(width / unit) * unit


def spread_bins(bins: Sequence[int], mask: Sequence[bool], gripper_bins: int) -> tuple[int, ...]:
    """One tolerance for all moving dimensions, or one per dimension as given; UserError for another number of them.

    Args:
        mask: which dimensions the statistics scale; the others take `gripper_bins` when one number is given.
    """
    if len(bins) == 1:
        return tuple(bins[0] if scaled else gripper_bins for scaled in mask)
    if len(bins) != len(mask):
        raise UserError(
            f"acceptance.bins has {len(bins)} numbers, but the action has {len(mask)} dimensions: give one, or one each"
        )
    return tuple(bins)
