"""A small random checkpoint for the soak: the real format and the real path, but actions that mean nothing."""

from pathlib import Path

import torch
from torch import nn

from specvla_ros.models.checkpoint import Target, load_target
from specvla_ros.models.weights import save_weights
from specvla_ros.speculation.drafters.eagle_head import EagleHead, save_draft_head
from specvla_ros.speculation.drafters.head import DRAFT_FOLDER
from specvla_ros.training.nano import NanoShape, write_nano

INSTRUCTIONS = ("lift the red block", "push the green block", "put the blue block in the box")
_SHAPE = NanoShape(image_size=56, patch_size=14, vision_dim=32, vision_depth=2, hidden_size=64, layers=2, head_dim=32)
_STATISTICS = {"soak": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}}}


@torch.no_grad()
def soak_policy(directory: Path, *, dtype: str, device: str) -> Target:
    """Writes the checkpoint with a draft head, and loads it."""
    write_nano(directory, _SHAPE, INSTRUCTIONS, _STATISTICS, seed=0)
    policy = load_target(directory, device="cpu", dtype="float32")
    _spread(policy)
    save_weights(directory / "model.safetensors", policy.model.checkpoint_tensors())
    save_draft_head(directory / DRAFT_FOLDER, _head(policy))
    return load_target(directory, device=device, dtype=dtype)


def _spread(policy: Target) -> None:
    """Weights large enough for answers to differ, and an output head that knows actions only."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.decoder.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
    tokenizer, head = policy.action_tokenizer, policy.decoder.lm_head.weight
    head[: tokenizer.first_id] = 0.0
    head[tokenizer.vocab_size :] = 0.0


def _head(policy: Target) -> EagleHead:
    head = EagleHead(policy.decoder.config).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            nn.init.ones_(parameter)
    return head
