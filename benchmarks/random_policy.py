"""A policy with random weights at given shapes, and a random draft head beside it: for timing the real engine."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_decoder import random_decoder, random_draft_head
from shapes import Size
from torch import Tensor, nn

from specvla_ros.engine.observation import Observation
from specvla_ros.models.checkpoint import Target
from specvla_ros.models.codecs.bins import ActionStatistics, ActionTokenizer, BinsCodec
from specvla_ros.models.config import OpenVLAConfig
from specvla_ros.models.llama import LlamaDecoder
from specvla_ros.models.openvla.model import OpenVLA
from specvla_ros.models.prompt import PromptTokenizer
from specvla_ros.models.quantization import check_quantization, quantize_layer
from specvla_ros.models.target import ImageEmbeddings
from specvla_ros.speculation.drafters.combine import DRAFT_FOLDER
from specvla_ros.speculation.drafters.eagle_head import save_draft_head

TEXT_TOKENS = 34  # of OpenVLA's prompt, about; the other 256 of its 290 rows are the image's
_BINS = 256
_PAD_ROWS = 64
_SHARPNESS = 64.0


@dataclass(frozen=True)
class RandomPolicy(Target):
    """Answers every image with the same random prompt, through the vision towers if it has any.

    Args:
        prompt_rows: of the prompt, text included.
        embeddings: [prompt_rows, hidden], the prompt where vision is left out; None: it is not.
    """

    prompt_rows: int = 0
    embeddings: Tensor | None = None

    @property
    def image_tokens(self) -> int:
        """Rows of the prompt that are not text."""
        return self.prompt_rows - TEXT_TOKENS

    def prompt_embeddings(
        self, observation: Observation, prompt_ids: Any, vision: ImageEmbeddings | None = None
    ) -> Tensor:
        """The prompt, whatever is shown and asked."""
        if self.embeddings is not None:
            return self.embeddings
        return super().prompt_embeddings(observation, prompt_ids, vision)


@torch.no_grad()
def random_policy(
    directory: Path, size: Size, *, prompt_rows: int, tokens: int, vision: bool, dtype: torch.dtype, device: str
) -> RandomPolicy:
    """Makes one, and writes its draft head, which the engine loads as it does a real one.

    Args:
        directory: for the draft head.
        prompt_rows: of the prompt; with vision, the image's patches and the text.
        tokens: of an action.
        vision: whether every frame goes through the vision towers.
    """
    decoder = actions_only(random_decoder(size.llama, dtype=dtype, device=device))
    model = _around(decoder, size, vision)
    save_draft_head(directory / DRAFT_FOLDER, random_draft_head(decoder))
    generator = torch.Generator(device).manual_seed(1)
    shape = (prompt_rows, size.llama.hidden_size)
    pixels = _pixels(size)
    return RandomPolicy(
        directory=directory,
        model=model,
        image_processor=lambda _: pixels,  # type: ignore[arg-type]  # the pixels are there already
        prompt=PromptTokenizer(None, chat=False, trailing_id=None, vocab_size=size.llama.vocab_size),
        codec=BinsCodec(
            ActionTokenizer(model.config.token_vocab_size, _BINS),
            ActionStatistics("random", -np.ones(tokens), np.ones(tokens), np.ones(tokens, dtype=bool)),
        ),
        prompt_rows=prompt_rows,
        embeddings=None if vision else torch.randn(shape, generator=generator, device=device, dtype=dtype),
    )


@torch.no_grad()
def quantized(policy: RandomPolicy, quantization: str) -> RandomPolicy:
    """The same policy with quantised matrices in the decoder's layers; everything else is shared.

    Raises:
        UserError: the device, the dtype or what is installed does not allow it, or a matrix's shape.
    """
    check_quantization(quantization, policy.decoder.device, policy.decoder.dtype)
    given = policy.model
    with torch.device("meta"):
        model = OpenVLA(given.config)
    model.towers, model.projector = given.towers, given.projector
    model.decoder.embed_tokens = given.decoder.embed_tokens
    model.decoder.norm, model.decoder.lm_head = given.decoder.norm, given.decoder.lm_head
    for place, layer in enumerate(given.decoder.layers):  # one after the other: only one copy is there unquantised
        model.decoder.layers[place] = copy.deepcopy(layer)
        quantize_layer(model.decoder.layers[place], quantization)
    return replace(policy, model=model.eval().requires_grad_(False))


def actions_only(decoder: LlamaDecoder) -> LlamaDecoder:
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


def frame(stamp_ns: int) -> Observation:
    """An observation; what it shows is not looked at."""
    return Observation(np.zeros((1, 1, 3), np.uint8), "", stamp_ns=stamp_ns, prompt_ids=(1,) * TEXT_TOKENS)


def _around(decoder: LlamaDecoder, size: Size, vision: bool) -> OpenVLA:
    """The decoder in its place in a model; without vision there are no towers."""
    config = OpenVLAConfig(size.towers, size.llama, _PAD_ROWS, _BINS, {}, chat_prompt=False)
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


def _pixels(size: Size) -> Tensor:
    """As an image processor gives them: float32, in the host's memory."""
    side = size.towers[0].image_size
    return torch.randn(3 * len(size.towers), side, side, generator=torch.Generator().manual_seed(1))
