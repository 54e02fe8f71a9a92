"""Actions as bins: 256 per dimension at the end of the vocabulary, un-normalised by the training data's quantiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specvla_ros.errors import UserError


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
        """The lowest action token; the highest value."""
        return self.vocab_size - len(self.edges)

    def is_action(self, token: int) -> bool:
        """Whether the token stands for a bin. Decoding would silently turn any other into an extreme value."""
        return self.first_id <= token < self.vocab_size

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Normalised values, any shape, clipped to [-1, 1], to int64 token ids of the same shape."""
        return self.vocab_size - np.digitize(np.clip(values, -1.0, 1.0), self.edges)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Token ids to bin centres, float64 of the same shape; ids outside the action tokens are clipped."""
        index = np.clip(self.vocab_size - np.asarray(tokens) - 1, 0, len(self.centers) - 1)
        return self.centers[index]


DEFAULT_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


@dataclass(frozen=True)
class ActionStatistics:
    """The statistics of one dataset.

    Args:
        unnorm_key: the dataset's name in the checkpoint.
        low: float64 [action_dim], the 1st percentile of the training actions.
        high: float64 [action_dim], the 99th.
        mask: bool [action_dim]; False: the dimension is used as it is (a gripper in [0, 1]).
    """

    unnorm_key: str
    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray

    @property
    def names(self) -> tuple[str, ...]:
        """One name per dimension: x y z roll pitch yaw gripper, or dim_0 … where the policy has not seven."""
        n = len(self.low)
        return DEFAULT_NAMES if n == len(DEFAULT_NAMES) else tuple(f"dim_{i}" for i in range(n))

    def unnormalise(self, values: np.ndarray) -> np.ndarray:
        """Normalised values [action_dim] in [-1, 1] to the robot's units, float64, not clipped."""
        scaled = 0.5 * (values + 1) * (self.high - self.low) + self.low
        return np.where(self.mask, scaled, values)

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """The inverse; a dimension that never moved in training (high = low) gives 0."""
        width = np.where(self.high > self.low, self.high - self.low, np.inf)
        return np.where(self.mask, 2 * (values - self.low) / width - np.isfinite(width), values)


def select_statistics(norm_stats: Mapping[str, Any], unnorm_key: str) -> ActionStatistics:
    """The statistics under a key; an empty key means the only one there is.

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
    try:
        action = norm_stats[unnorm_key]["action"]
        low, high = (np.asarray(action[name], dtype=np.float64) for name in ("q01", "q99"))
        mask = np.asarray(action.get("mask", np.ones(len(low))), dtype=bool)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"norm_stats['{unnorm_key}']['action'] needs the lists q01 and q99 ({error!r})") from None
    if not low.ndim == high.ndim == 1 or not len(low) == len(high) == len(mask) > 0:
        raise UserError(f"norm_stats['{unnorm_key}']['action']: q01, q99 and mask must be lists of the same length")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise UserError(f"norm_stats['{unnorm_key}']['action']: q01 and q99 must be finite, with q01 <= q99")
    return ActionStatistics(unnorm_key, low, high, mask)
