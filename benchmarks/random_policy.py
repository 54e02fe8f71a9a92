# SPDX-License-Identifier: Apache-2.0
"""Policies with random weights in the timed shapes, with a random draft head."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.decoder_shapes import DECODERS
from specvla_ros.lab.planning.cost import OPENVLA_7B
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
from specvla_ros.models.quantization import check_quantization, quantize_layer, quantize_products
from specvla_ros.models.settings import PromptStyle
from specvla_ros.models.target import ImageEmbeddings, Pixels
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.settings import DRAFT_FOLDER

TEXT_TOKENS = 34  # of OpenVLA's prompt, approximately
PROMPT = 290  # rows: OpenVLA's 256 patches and its text
TOKENS = 7  # of an action
VISION = "+vision"  # after a format's name: the vision is quantised too
_BINS = 256
_PAD_ROWS = 64
_SHARPNESS = 64.0
PICTURE = np.random.default_rng(1).integers(0, 256, (480, 640, 3), dtype=np.uint8)  # as large as a camera's
PICTURES = "every frame is an image of 640 x 480, resized and normalised in parallel with ticks; latency includes it"
NO_PICTURES = "vision is excluded, and so are the images"


@dataclass(frozen=True)
class Size:
    """A policy's shapes."""

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
    "1b": Size(DecoderShape(2048, 5632, 22, 32, 4, 64, vocab_size=32064), OPENVLA_7B.towers),
    "7b": Size(DECODERS["openvla-7b"], OPENVLA_7B.towers),
} | {name: Size(decoder, OPENVLA_7B.towers) for name, decoder in DECODERS.items() if name != "openvla-7b"}


def random_decoder(
    config: DecoderShape, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PackedDecoder:
    """Returns a decoder with weights scaled so that its choices depend on every input."""
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
    """Returns a draft head in the decoder's shapes."""
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
    """Returns the parents of a tree's nodes: a chain of six with siblings, like a small tree under relaxation."""
    return [-1, *(node - 1 if node < 6 else node % 6 for node in range(1, nodes))]


@dataclass(frozen=True)
class RandomPolicy(OpenVLATarget):
    """A policy with image processor and vision towers or, without vision, with one fixed prompt.

    Args:
        prompt_rows: rows of the prompt, including text.
        embeddings: the prompt without vision, [prompt_rows, hidden]; None with vision.
    """

    prompt_rows: int = 0
    embeddings: Tensor | None = None

    @property
    def image_tokens(self) -> int:
        """Rows of the prompt other than text."""
        return self.prompt_rows - TEXT_TOKENS

    def pixels(self, observation: Observation) -> Pixels:
        """The image's pixels; none without vision."""
        return super().pixels(observation) if self.embeddings is None else ()

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Any,
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        """The image's prompt embeddings; without vision, the fixed prompt."""
        if self.embeddings is not None:
            return self.embeddings
        return super().prompt_embeddings(observation, prompt_ids, vision, pixels)

    def blank_observation(self) -> Observation:
        """The only observation that the benchmarks use."""
        return frame(1)

    def describe(self) -> dict[str, Any]:
        """Returns an empty description: no checkpoint was loaded."""
        return {}


@contextmanager
def random_policy(
    size: Size, *, tokens: int = TOKENS, vision: bool = True, dtype: torch.dtype, device: str
) -> Iterator[RandomPolicy]:
    """Yields a random policy with a prompt of `PROMPT` rows; the engine loads its draft head from its directory.

    Args:
        tokens: tokens per action.
        vision: send every frame through the image processor and the vision towers.
    """
    with torch.no_grad():
        decoder = actions_only(random_decoder(size.llama, dtype=dtype, device=device))
        model = random_model(decoder, size, vision=vision)
    generator = torch.Generator(device).manual_seed(1)
    shape = (PROMPT, size.llama.input_size)
    with tempfile.TemporaryDirectory() as directory:
        save_draft_head(Path(directory) / DRAFT_FOLDER, random_draft_head(decoder))
        yield RandomPolicy(
            directory=Path(directory),
            model=model,
            image_processor=dinosiglip_processor([tower.image_size for tower in size.towers]),
            prompt=PromptTokenizer(None, style=PromptStyle.OPENVLA, trailing_id=None, vocab_size=size.llama.vocab_size),
            codec=random_codec(model.config.token_vocab_size, tokens),
            prompt_rows=PROMPT,
            embeddings=None if vision else torch.randn(shape, generator=generator, device=device, dtype=dtype),
        )


@torch.no_grad()
def quantized(policy: RandomPolicy, name: str) -> RandomPolicy:
    """Returns the policy with quantised matrices in the decoder's layers; everything else is shared.

    `name`: a format; with VISION at its end, the vision has it too.
    """
    quantization, vision = name.removesuffix(VISION), name.endswith(VISION)
    check_quantization(quantization, policy.decoder.device, policy.decoder.dtype, vision=vision)
    given = policy.model
    with torch.device("meta"):
        model = OpenVLA(given.config)
    model.towers, model.projector = given.towers, given.projector
    if vision:
        model.towers, model.projector = copy.deepcopy(model.towers), copy.deepcopy(model.projector)
        for part in (model.towers, model.projector):
            quantize_products(part, quantization)
    model.decoder.embed_tokens = given.decoder.embed_tokens
    model.decoder.norm, model.decoder.lm_head = given.decoder.norm, given.decoder.lm_head
    for index, layer in enumerate(given.decoder.layers):  # in turn, so that only one copy is unquantised at a time
        model.decoder.layers[index] = own = copy.deepcopy(layer)
        assert isinstance(own, DecoderLayer)
        quantize_layer(own, quantization)
    return replace(policy, model=model.eval().requires_grad_(False))


def actions_only(decoder: PackedDecoder) -> PackedDecoder:
    """Restricts every answer to an action and sharpens every choice.

    Rows of the output head outside the actions become 0, which does not save time. Sharper logits do not change the
    target's choices, but make a random draft head confident: its trees reach their maximum depth, so that every traced
    accept length is available.
    """
    stop = decoder.config.vocab_size - _PAD_ROWS
    head = decoder.lm_head.weight
    head[: stop - _BINS] = 0.0
    head[stop:] = 0.0
    head *= _SHARPNESS
    return decoder


def random_codec(vocab_size: int, tokens: int) -> BinsCodec:
    """Returns a codec with `tokens` tokens per action, each between -1 and 1."""
    statistics = ActionStatistics("random", -np.ones(tokens), np.ones(tokens), np.ones(tokens, dtype=bool))
    return BinsCodec(ActionTokenizer(vocab_size, _BINS), statistics)


def frame(stamp_ns: int) -> Observation:
    """Returns an observation; all have the same image, so that the answers of modes can be compared."""
    return Observation(PICTURE, "", stamp_ns=stamp_ns, prompt_ids=(1,) * TEXT_TOKENS)


def random_model(decoder: PackedDecoder, size: Size, *, vision: bool) -> OpenVLA:
    """Returns a model around the decoder; without vision it has no towers."""
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
