# SPDX-License-Identifier: Apache-2.0
"""Draft models for the small random policies of tests."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import copy_checkpoint

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import DraftSettings, adjusted

FOLDER = "model"
_OF_THE_LANGUAGE_MODEL = ("language_model.", "model.layers.", "model.language_model.")


def write_draft_model(policy: Target, *, noise: float) -> Path:
    """The policy once more, with noise on the language model's matrices: often right, not always."""
    directory = copy_checkpoint(policy.directory, policy.directory / FOLDER)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in sorted(tensors.items()):
        if noise and name.startswith(_OF_THE_LANGUAGE_MODEL) and tensor.ndim == 2:
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors")
    return directory


def drafting_model(policy: Target, settings: DraftSettings) -> DraftSettings:
    """The settings with the directory of the policy's draft model, where they only name its folder."""
    if settings.drafters["model"].directory != FOLDER:
        return settings
    return adjusted(settings, model=str(policy.directory / FOLDER))


def with_model(policy: Target, settings: EngineSettings) -> EngineSettings:
    """The same for the engine's settings."""
    return replace(settings, draft=drafting_model(policy, settings.draft))
