# SPDX-License-Identifier: Apache-2.0
"""How far relaxed acceptance can take an action from the target's own, by codec."""

from collections.abc import Sequence

import numpy as np

from specvla_ros.models.codecs.bins import BinsCodec
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.fast_tokenizer import cosines

_MOST_UNITS = 9  # between two last digits


def bound_of(codec: Codec, bins: Sequence[int]) -> np.ndarray:
    """Float64 [horizon, dims] in the robot's units, for tolerances by step as `Codec.bins_within` gives them."""
    if isinstance(codec, BinsCodec):
        normalised = np.asarray(bins) * np.diff(codec.tokenizer.edges)[0]
        scale = np.where(codec.statistics.mask, (codec.statistics.high - codec.statistics.low) / 2, 1.0)
        return (normalised * scale)[None]
    steps = np.asarray(bins).reshape(codec.horizon, len(codec.names))
    if isinstance(codec, DigitsCodec):
        low, high = codec.action_range
        return np.minimum(steps, _MOST_UNITS) * (high - low) / codec.bins
    assert isinstance(codec, FastCodec)
    moved: np.ndarray = np.abs(cosines(codec.horizon)).T @ (steps / codec.tokenizer.scale) * codec._half_range
    switches = list(codec.statistics.switches)
    moved[:, switches] = moved[:, switches] > 0  # over, or not at all
    return moved
