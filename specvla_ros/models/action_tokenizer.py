"""Action tokens to values and back: 256 bins over [-1, 1], counted down from the end of the vocabulary."""

from collections.abc import Sequence

import numpy as np


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
