# SPDX-License-Identifier: Apache-2.0
"""Writes the files that a robot loads: weights, draft heads, earlier answers, FAST tokenizers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.lab.files import unfinished, write_json
from specvla_ros.models.codecs.codec import CODEC_FILE
from specvla_ros.models.codecs.fast_tokenizer import FastTokenizer, to_coefficients
from specvla_ros.speculation.drafters.eagle.head import EagleHead


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors to one safetensors file; on failure raises UserError and leaves an older file unchanged."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        with unfinished(path) as beside:
            save_file(whole, beside, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written ({error}); free some space and run the command again") from None


def save_draft_head(directory: Path, head: EagleHead) -> None:
    """Writes config.json and model.safetensors, in bfloat16 like checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(head.config) | {"model_type": "llama", "num_hidden_layers": 1, "fc_bias": True}
    del config["variant"]  # given by model_type
    if head.parallel_depth > 1:
        config["parallel_depth"] = head.parallel_depth
    write_json(directory / "config.json", config)
    save_weights(directory / "model.safetensors", {n: t.bfloat16().cpu() for n, t in head.checkpoint_tensors().items()})


def save_answers(path: Path, answers: Sequence[Sequence[int]]) -> None:
    """Writes answers to a file atomically; raises UserError if it cannot be written."""
    tokens = np.array([token for answer in answers for token in answer], dtype=np.int32)
    lengths = np.array([len(answer) for answer in answers], dtype=np.int32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(path) as beside, beside.open("wb") as file:  # given a path, NumPy would append .npz
            np.savez_compressed(file, tokens=tokens, lengths=lengths)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another --out") from None


def fit_fast_tokenizer(chunks: Iterable[np.ndarray], *, scale: float = 10.0, vocab_size: int = 1024) -> FastTokenizer:
    """Fits a tokenizer to your own actions, like `fit` of the published one.

    Args:
        chunks: normalised actions, [horizon, dims] each.
        scale: larger values give finer actions and longer answers; 10 in the paper.
        vocab_size: number of ids, at least the number of different coefficients; 1024 in the paper.

    Raises:
        UserError: there are no chunks, or more different coefficients than ids.
    """
    found = [to_coefficients(chunk, scale) for chunk in chunks]
    if not found:
        raise UserError("no chunks of actions to fit a FAST tokenizer on: give longer episodes, or a smaller --horizon")
    low, high = min(int(each.min()) for each in found), max(int(each.max()) for each in found)
    if high - low >= vocab_size:
        raise UserError(
            f"the actions have coefficients from {low} to {high}, more than {vocab_size} ids can represent: use a "
            "larger vocab_size or a smaller scale"
        )

    def texts() -> Iterator[str]:
        for coefficients in found:
            yield "".join(map(chr, (coefficients.flatten() - low).tolist()))

    bpe = ByteLevelBPETokenizer()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=[chr(i) for i in range(high - low + 1)],
        max_token_length=10000,
    )
    bpe._tokenizer.train_from_iterator(texts(), trainer=trainer)
    return FastTokenizer(bpe._tokenizer, scale, low)


def save_fast_tokenizer(tokenizer: FastTokenizer, directory: Path, **shape: float | None) -> None:
    """Writes the released tokenizer's files, with a chunk's `time_horizon`, `action_dim` and `dt_s` if given."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.bpe.save(str(directory / "tokenizer.json"))
    config = {"scale": tokenizer.scale, "vocab_size": tokenizer.vocab_size, "min_token": tokenizer.min_token}
    write_json(directory / CODEC_FILE, config | shape)
