# SPDX-License-Identifier: Apache-2.0
"""Random Llama decoders and draft heads, for property tests and for timing."""

from dataclasses import replace

import torch

from specvla_ros.models.config import DecoderShape
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.speculation.drafters.eagle.head import EagleHead


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
