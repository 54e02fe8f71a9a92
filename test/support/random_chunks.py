# SPDX-License-Identifier: Apache-2.0
"""Random policies that answer with chunks of two actions, in digits or FAST tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from support.checkpoints import edit_json
from support.random_checkpoint import write_random_checkpoint
from support.random_fast import AnyFast

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.training.artifacts import fit_fast_tokenizer, save_fast_tokenizer, save_weights
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.codec import CODEC_FOLDER
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.openvla.target import OpenVLATarget, require_openvla


class AnyDigits(DigitsCodec):
    """Lets every answer through."""

    def problem(self, tokens: Sequence[int]) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, len(self.names)))


def any_chunks(directory: Path, codec: str) -> OpenVLATarget:
    """A policy whose tokens are those of its codec; few of its answers are chunks, and all are let through.

    Args:
        directory: empty.
        codec: `digits` or `fast`.
    """
    write_random_checkpoint(directory, hidden_size=64, layers=2)
    tokens = 11
    (directory / CODEC_FOLDER).mkdir()
    (directory / CODEC_FOLDER / "processor_config.json").write_text('{"time_horizon": 2, "bins": 9}')
    if codec == "fast":
        chunks = np.random.default_rng(0).uniform(-1, 1, (400, 2, 7))
        tokenizer = fit_fast_tokenizer(chunks, vocab_size=80)
        save_fast_tokenizer(tokenizer, directory / CODEC_FOLDER, time_horizon=2)
        tokens = tokenizer.vocab_size
    edit_json(directory / "config.json", lambda config: config.update(action_codec=codec, eos_token_id=2))
    weights = load_file(directory / "model.safetensors")
    last = read_config(directory).token_vocab_size
    weights["language_model.lm_head.weight"][: last - tokens] = 0.0
    save_weights(directory / "model.safetensors", weights)
    target = require_openvla(load_target(directory, device="cpu"))
    own = target.codec
    assert isinstance(own, DigitsCodec | FastCodec)
    values = {field.name: getattr(own, field.name) for field in fields(own)} | {"limit": 24}
    if isinstance(own, FastCodec):
        return replace(target, codec=AnyFast(**values))
    target = replace(target, codec=AnyDigits(**values))
    rng = np.random.default_rng(0)
    pictures = (rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(4))
    answers = (
        Engine(target, EngineSettings("ar")).act(Observation(each, "put carrot on plate", 1)) for each in pictures
    )
    often = Counter(token for each in answers if isinstance(each, Action) for token in each.tokens).most_common(1)[0][0]
    ids = tuple(i for i in (*own.digit_ids, own.space_id) if i != often)  # else it hardly writes a space
    return replace(target, codec=AnyDigits(**values | {"space_id": often, "digit_ids": ids}))
