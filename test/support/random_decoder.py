"""Random Llama decoders for property tests."""

import torch

from specvla_ros.models.config import LlamaConfig
from specvla_ros.models.llama import LlamaDecoder


def random_decoder(config: LlamaConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaDecoder:
    """A decoder whose weights are scaled so that its choices depend on every input."""
    torch.manual_seed(seed)
    decoder = LlamaDecoder(config)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return decoder.to(dtype).eval().requires_grad_(False)
