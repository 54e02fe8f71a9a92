# SPDX-License-Identifier: Apache-2.0
"""Loads a MiniVLA checkpoint, as trained and released by openvla-mini.

Source: Stanford-ILIAD/openvla-mini: prismatic/models/load.py, vla/action_tokenizer.py, models/backbones. Its code also
needs the language model's files and the VQ-VAE; they must be in `llm/` and `vq/`, in the checkpoint or next to it.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.statistics import checked_statistics
from specvla_ros.models.codecs.vq import VqCodec, read_vq_vae
from specvla_ros.models.config import (
    DECODERS,
    folder_beside,
    only_file,
    read_checkpoint_json,
    read_decoder_shape,
    refuse_adapter,
)
from specvla_ros.models.decoder import allocate, empty_model
from specvla_ros.models.families.openvla.config import OpenVLAConfig, prismatic_towers
from specvla_ros.models.families.openvla.image_processor import ImageProcessor, dinosiglip_processor
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.pickled_weights import copy_weights, read_pickled, tensors_in
from specvla_ros.models.settings import ALL_CAMERAS, refuse_options
from specvla_ros.models.target import TARGETS
from specvla_ros.models.tokenizer import check_instruction, check_tokenizer, refuse_special_tokens, require_tokenizer
from specvla_ros.models.vision_language import VisionLanguageTarget
from specvla_ros.models.weights import Progress
from specvla_ros.settings.json_file import Fields

_WRIST = "wrist"
_EXTRA_TOKENS = 256  # from <|extra_0|> on; its code appends them to the tokenizer's own
_ROW_MULTIPLE = 64  # the embedding's number of rows is a multiple of this
_PROMPT = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
# Prefixes of names in its files, and in OpenVLA's Hugging Face files, whose model it shares.
_NAMES = (
    ("projector.0.", "projector.fc1."),
    ("projector.2.", "projector.fc2."),
    ("projector.4.", "projector.fc3."),
    ("llm.", "language_model."),
    ("dino_featurizer.", "vision_backbone.featurizer."),
    ("siglip_featurizer.", "vision_backbone.fused_featurizer."),
)
_HEAD, _EMBEDDINGS = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"


@TARGETS.register("prismatic-vla")
def load_minivla(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    cameras: tuple[str, ...],
    progress: Progress,
    **options: Any,
) -> "MiniVLATarget":
    """Loads a MiniVLA checkpoint from its native layout; see `load_target` for the arguments.

    Args:
        directory: contains config.json, checkpoints/ with one .pt file and dataset_statistics.json; llm/ and vq/ are
            inside it or next to it.
        cameras: `image`, or `image` and `wrist`; ALL_CAMERAS: as many as config.json says.
    """
    refuse_options(directory, options)
    refuse_adapter(directory)
    raw = read_checkpoint_json(directory / "config.json")
    vla = raw.inner("vla")
    shown = _cameras(directory, cameras, _images(vla))
    llm = folder_beside(directory, "llm", "config.json and tokenizer of the language model, such as Qwen/Qwen2.5-0.5B")
    tokenizer = require_tokenizer(llm)
    tokens = tokenizer.get_vocab_size() + _EXTRA_TOKENS
    shape = read_decoder_shape(read_checkpoint_json(llm / "config.json"), {"qwen2": DECODERS["qwen2"]})
    shape = replace(shape, vocab_size=tokens + -tokens % _ROW_MULTIPLE)
    check_tokenizer(tokenizer, llm / "tokenizer.json", shape.vocab_size)
    codec = _codec(directory, vla.text("action_tokenizer"), unnorm_key, tokens)
    config = OpenVLAConfig(
        prismatic_towers(raw), shape, pad_to_multiple_of=0, action_bins=2, norm_stats={}, vicuna=False
    )
    model = empty_model(partial(OpenVLA, config), dtype, device)
    allocate(model, device)
    _load(directory, model, progress)
    return MiniVLATarget(
        directory=directory,
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        image_processor=dinosiglip_processor([tower.image_size for tower in config.towers]),
        codec=codec,
        cameras=shown,
    )


def _images(vla: Fields) -> int:
    """Number of images of an observation; UserError if a second one is an earlier image of the same camera."""
    images = vla.whole("image_sequence_len", 1, minimum=1, maximum=2)
    if images == 2 and not vla.flag("use_wrist_image", False):
        raise UserError(
            f"{vla.path}: the policy reads the last 2 images of one camera, which is not supported: "
            "vla.image_sequence_len is 2 without vla.use_wrist_image; if it was trained with a wrist camera, set "
            "vla.use_wrist_image to true"
        )
    return images


def _cameras(directory: Path, asked: tuple[str, ...], usual: int) -> tuple[str, ...]:
    every = (ONLY_CAMERA, _WRIST)
    if asked == ALL_CAMERAS:
        return every[:usual]
    if asked not in (every[:1], every):
        raise UserError(f"{directory}: model.cameras must be [{ONLY_CAMERA}] or [{', '.join(every)}]")
    return asked


def _codec(directory: Path, name: str, unnorm_key: str, tokens: int) -> Codec:
    """Makes the codec of config.json's action tokenizer; `extra` ones use the tokens at the vocabulary's end."""
    norm_stats = read_checkpoint_json(directory / "dataset_statistics.json").raw
    statistics = checked_statistics(directory, norm_stats, unnorm_key)
    if name == "extra_action_tokenizer":
        return BinsCodec(ActionTokenizer(tokens), statistics)
    if not name.endswith("_vq_extra_action_tokenizer"):
        raise UserError(
            f"{directory / 'config.json'}: vla.action_tokenizer is '{name}'; supported are extra_action_tokenizer and "
            "those that end with _vq_extra_action_tokenizer"
        )
    vq = folder_beside(directory, "vq", "the folder of the VQ-VAE that the policy was trained with")
    folders = [each for each in sorted(vq.iterdir()) if each.is_dir()]
    if len(folders) != 1:
        raise UserError(f"{vq} must contain one folder, that of the policy's own VQ-VAE; it has {len(folders)}")
    vae = read_vq_vae(folders[0])
    if vae.dims != len(statistics.low):
        raise UserError(
            f"{folders[0]} was trained for {vae.dims} dimensions, but the action statistics have "
            f"{len(statistics.low)}: they belong to different policies; copy both from the same one"
        )
    return VqCodec(vae, statistics, tokens)


def _load(directory: Path, model: OpenVLA, progress: Progress) -> None:
    path = only_file(directory / "checkpoints", ".pt")
    parts = read_pickled(path).get("model")
    given: dict[str, Tensor] = {}
    for part, tensors in parts.items() if isinstance(parts, dict) else ():
        given |= {_renamed(name): tensor for name, tensor in tensors_in(tensors, path, f"model.{part}").items()}
    wanted = model.checkpoint_tensors()
    if _HEAD in given and _HEAD not in wanted and not given.pop(_HEAD).equal(given.get(_EMBEDDINGS, Tensor())):
        raise UserError(
            f"{path}: {_HEAD} and {_EMBEDDINGS} differ, but llm/config.json says that they are tied "
            "(tie_word_embeddings): copy llm/ from the language model that the policy was trained from"
        )
    copy_weights(given, wanted, path, progress, unused=model.unused_tensors)


def _renamed(name: str) -> str:
    for theirs, ours in _NAMES:
        if name.startswith(theirs):
            return (ours + name.removeprefix(theirs)).replace(".gamma", ".scale_factor")
    return name


@dataclass(frozen=True)
class MiniVLATarget(VisionLanguageTarget):
    """A checkpoint whose prompt is first token | images | rest of the text."""

    directory: Path
    model: OpenVLA
    tokenizer: Tokenizer
    image_processor: ImageProcessor
    codec: Codec
    cameras: tuple[str, ...]

    FAMILY = "minivla"

    @property
    def image_tokens(self) -> int:
        return len(self.cameras) * self.model.config.image_tokens

    def written(self, observation: Observation) -> tuple[int, ...]:
        check_instruction(observation.instruction)
        asked = f"What action should the robot take to {observation.instruction.lower()}?"
        refuse_special_tokens(asked, self.tokenizer)
        return tuple(self.tokenizer.encode(_PROMPT.format(asked)).ids)
