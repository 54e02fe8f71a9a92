# SPDX-License-Identifier: Apache-2.0
"""Policies with random weights in the shapes that are timed, and a random draft head beside them."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specvla_ros.lab.training.artifacts import save_draft_head
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.config import DecoderShape, VisionTowerConfig
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.families.openvla.image_processor import dinosiglip_processor
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.prompt import PromptTokenizer
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.models.quantization import check_quantization, quantize_layer
from specvla_ros.models.settings import PromptStyle
from specvla_ros.models.target import ImageEmbeddings, Pixels
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.settings import DRAFT_FOLDER

TEXT_TOKENS = 34  # of OpenVLA's prompt, about
PROMPT = 290  # rows: OpenVLA's 256 patches and its text
TOKENS = 7  # of an action
_BINS = 256
_PAD_ROWS = 64
_SHARPNESS = 64.0
PICTURE = np.random.default_rng(1).integers(0, 256, (480, 640, 3), dtype=np.uint8)  # as large as a camera's
PICTURES = (
    "every frame is a picture of 640 x 480, resized and normalised on a thread beside the ticks; latency counts it"
)
NO_PICTURES = "vision is left out, and with it the pictures"
_DINO = VisionTowerConfig(1024, 24, 16, 4096, 14, True, 4, True, 224)
_SIGLIP = VisionTowerConfig(1152, 27, 16, 4304, 14, False, 0, False, 224)


@dataclass(frozen=True)
class Size:
    """Shapes of a policy."""

    llama: DecoderShape
    towers: tuple[VisionTowerConfig, ...]


SIZES = {
    "tiny": Size(
        DecoderShape(256, 688, 4, 4, 4, 64, vocab_size=32064),
        (
            VisionTowerConfig(96, 4, 3, 384, 14, True, 4, True, 224),
            VisionTowerConfig(96, 4, 3, 358, 14, False, 0, False, 224),
        ),
    ),
    "1b": Size(DecoderShape(2048, 5632, 22, 32, 4, 64, vocab_size=32064), (_DINO, _SIGLIP)),
    "7b": Size(DecoderShape(vocab_size=32064), (_DINO, _SIGLIP)),
}


def random_decoder(
    config: DecoderShape, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PackedDecoder:
    """A decoder whose weights are scaled so that its choices depend on every input."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        decoder = PackedDecoder(config)
    decoder.to(dtype).to_empty(device=device)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        else:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
    return decoder.eval().requires_grad_(False)


def random_draft_head(decoder: PackedDecoder) -> EagleHead:
    """A draft head in the decoder's shapes."""
    with torch.device("meta"):
        head = EagleHead(replace(decoder.config, num_hidden_layers=1)).to(decoder.dtype)
    head.to_empty(device=decoder.device)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return head.requires_grad_(False)


def tree_parents(nodes: int) -> list[int]:
    """Parents of a tree's nodes: a chain of six with siblings, as a small tree under relaxation is."""
    return [-1, *(node - 1 if node < 6 else node % 6 for node in range(1, nodes))]


@dataclass(frozen=True)
class RandomPolicy(OpenVLATarget):
    """Answers every image through the image processor and the vision towers; with the same prompt if it has none.

    Args:
        prompt_rows: rows of the prompt, text included.
        embeddings: [prompt_rows, hidden], the prompt where vision is left out; None where it is not.
    """

    prompt_rows: int = 0
    embeddings: Tensor | None = None

    @property
    def image_tokens(self) -> int:
        """Rows of the prompt that are not text."""
        return self.prompt_rows - TEXT_TOKENS

    def pixels(self, observation: Observation) -> Pixels:
        """Of the image; nothing where vision is left out."""
        return super().pixels(observation) if self.embeddings is None else ()

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Any,
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        """Of the image; the same for all where vision is left out."""
        if self.embeddings is not None:
            return self.embeddings
        return super().prompt_embeddings(observation, prompt_ids, vision, pixels)

    def blank_observation(self) -> Observation:
        """The observation that all others are too."""
        return frame(1)

    def describe(self) -> dict[str, Any]:
        """Nothing: no checkpoint was loaded."""
        return {}


@torch.no_grad()
def random_policy(
    directory: Path, size: Size, *, prompt_rows: int, tokens: int, vision: bool, dtype: torch.dtype, device: str
) -> RandomPolicy:
    """A random policy whose draft head is written to a directory, for the engine to load like a real one.

    Args:
        prompt_rows: rows of the prompt; with vision, the image's patches and the text.
        tokens: tokens of an action.
        vision: whether every frame goes through the image processor and the vision towers.
    """
    decoder = actions_only(random_decoder(size.llama, dtype=dtype, device=device))
    model = _around(decoder, size, vision)
    save_draft_head(directory / DRAFT_FOLDER, random_draft_head(decoder))
    generator = torch.Generator(device).manual_seed(1)
    shape = (prompt_rows, size.llama.hidden_size)
    return RandomPolicy(
        directory=directory,
        model=model,
        image_processor=dinosiglip_processor([tower.image_size for tower in size.towers]),
        prompt=PromptTokenizer(None, style=PromptStyle.OPENVLA, trailing_id=None, vocab_size=size.llama.vocab_size),
        codec=random_codec(model.config.token_vocab_size, tokens),
        prompt_rows=prompt_rows,
        embeddings=None if vision else torch.randn(shape, generator=generator, device=device, dtype=dtype),
    )


@torch.no_grad()
def quantized(policy: RandomPolicy, quantization: str) -> RandomPolicy:
    """The same policy with quantised matrices in the decoder's layers; everything else is shared."""
    check_quantization(quantization, policy.decoder.device, policy.decoder.dtype)
    given = policy.model
    with torch.device("meta"):
        model = OpenVLA(given.config)
    model.towers, model.projector = given.towers, given.projector
    model.decoder.embed_tokens = given.decoder.embed_tokens
    model.decoder.norm, model.decoder.lm_head = given.decoder.norm, given.decoder.lm_head
    for index, layer in enumerate(given.decoder.layers):  # one by one, so that only one copy is unquantised at a time
        model.decoder.layers[index] = own = copy.deepcopy(layer)
        assert isinstance(own, DecoderLayer)
        quantize_layer(own, quantization)
    return replace(policy, model=model.eval().requires_grad_(False))


def actions_only(decoder: PackedDecoder) -> PackedDecoder:
    """Makes every answer an action, as nothing is answered else, and every choice a clear one.

    Rows of the output head outside the actions become 0, which costs no less time. Sharper logits change no choice of
    the target's, but make a random draft head sure of itself: its trees are then as deep as they may be, and every
    traced accept length can be had.
    """
    stop = decoder.config.vocab_size - _PAD_ROWS
    head = decoder.lm_head.weight
    head[: stop - _BINS] = 0.0
    head[stop:] = 0.0
    head *= _SHARPNESS
    return decoder


def random_codec(vocab_size: int, tokens: int) -> BinsCodec:
    """A codec of so many tokens per action, each between -1 and 1."""
    statistics = ActionStatistics("random", -np.ones(tokens), np.ones(tokens), np.ones(tokens, dtype=bool))
    return BinsCodec(ActionTokenizer(vocab_size, _BINS), statistics)


def frame(stamp_ns: int) -> Observation:
    """An observation; all show the same, so that modes can be compared by their answers."""
    return Observation(PICTURE, "", stamp_ns=stamp_ns, prompt_ids=(1,) * TEXT_TOKENS)


def _around(decoder: PackedDecoder, size: Size, vision: bool) -> OpenVLA:
    """A model around the decoder; without vision it has no towers."""
    config = OpenVLAConfig(size.towers, size.llama, _PAD_ROWS, _BINS, {}, vicuna=False)
    with torch.device("meta"):
        model = OpenVLA(config)
    model.decoder = decoder
    if not vision:
        model.towers = nn.ModuleList()
        return model.eval().requires_grad_(False)
    for part in (model.towers, model.projector):
        part.to(decoder.dtype).to_empty(device=decoder.device)
        for parameter in part.parameters():
            nn.init.normal_(parameter, std=0.02)
    return model.eval().requires_grad_(False)
