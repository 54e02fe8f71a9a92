# SPDX-License-Identifier: Apache-2.0
"""A random policy that answers with FAST tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from support.checkpoints import edit_json
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.lab.training.artifacts import fit_fast_tokenizer, save_fast_tokenizer, save_weights
from specvla_ros.models.codecs.codec import CODEC_FOLDER
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.families.openvla.config import read_config


class AnyFast(FastCodec):
    """Lets every answer through."""

    def problem(self, tokens: Sequence[int]) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, len(self.names)))


HORIZON, DIMS, END, IDS = 2, 2, 2, 24


def write_fast_policy(directory: Path) -> Path:
    """A random policy that answers with FAST tokens and an end token; some stand for two actions of two values."""
    write_random_checkpoint(directory, hidden_size=64, layers=2, text=1.0)
    rng = np.random.default_rng(0)
    tokenizer = fit_fast_tokenizer(rng.uniform(-0.2, 0.2, (400, HORIZON, DIMS)), scale=4.0, vocab_size=IDS)
    save_fast_tokenizer(tokenizer, directory / CODEC_FOLDER)
    edit_json(directory / CODEC_FOLDER / "processor_config.json", lambda config: config.update(time_horizon=HORIZON))
    edit_json(directory / "config.json", lambda config: config.update(action_codec="fast", eos_token_id=END))
    weights = load_file(directory / "model.safetensors")
    head = weights["language_model.lm_head.weight"]
    last = read_config(directory).token_vocab_size
    head[[row for row in range(len(head)) if row != END and not last - IDS <= row < last]] = 0.0
    head[END] *= 2.0  # else its answers are too long
    save_weights(directory / "model.safetensors", weights)
    return directory
