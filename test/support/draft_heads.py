# SPDX-License-Identifier: Apache-2.0
"""Draft heads with random weights."""

from pathlib import Path
from typing import Any

import torch
from support.checkpoints import load_openvla
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.lab.training.artifacts import save_draft_head
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.drafters.eagle.head import EagleHead


def random_head(decoder: PackedDecoder, *, seed: int = 0, parallel_depth: int = 1) -> EagleHead:
    head = EagleHead(decoder.config, parallel_depth).to(decoder.device, decoder.dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(values * 0.1 if parameter.ndim == 2 else 1 + 0.1 * values)
    return head


def write_random_head(directory: Path, decoder: PackedDecoder, *, seed: int = 0, parallel_depth: int = 1) -> Path:
    save_draft_head(directory, random_head(decoder, seed=seed, parallel_depth=parallel_depth))
    return directory


def policy_with_random_head(directory: Path, **shape: Any) -> OpenVLATarget:
    """A small random policy in float64, where rounding decides nothing, with a random head beside it."""
    write_random_checkpoint(directory, **shape)
    policy = load_openvla(directory, device="cpu")
    write_random_head(directory / "draft", policy.decoder)
    policy.model.to(torch.float64)
    policy.decoder.lm_head.to(torch.float64)
    return policy
