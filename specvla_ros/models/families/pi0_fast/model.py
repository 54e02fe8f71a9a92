# SPDX-License-Identifier: Apache-2.0
"""PaliGemma: transformers' SigLIP tower, a projector and our decoder."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from specvla_ros.errors import UserError, missing_package
from specvla_ros.models.decoder import PackedDecoder, allocate, decoder_tensors, empty_model
from specvla_ros.models.families.pi0_fast.config import Pi0FastConfig
from specvla_ros.models.weights import Progress, check_weights, load_weights, tensor_names

_PREFIX = "model.paligemma_with_expert.paligemma."
_HEAD = f"{_PREFIX}lm_head.weight"
_EMBEDDINGS = f"{_PREFIX}model.language_model.embed_tokens.weight"


class PaliGemma(nn.Module):
    """The target.

    Args:
        config: of the checkpoint.
        cameras: how many pictures it is asked with.
    """

    def __init__(self, config: Pi0FastConfig, cameras: int) -> None:
        try:
            from transformers import SiglipVisionConfig, SiglipVisionModel
        except ModuleNotFoundError as error:
            raise missing_package(error, "requirements/robot-transformers.txt") from None

        super().__init__()
        try:
            self.tower: nn.Module = SiglipVisionModel(SiglipVisionConfig(**config.vision))
        except Exception as error:  # its checks raise several kinds, none of them its own
            raise UserError(f"transformers cannot make this checkpoint's vision tower ({error})") from None
        self.projector = nn.Linear(config.vision["hidden_size"], config.decoder.hidden_size)
        self.decoder = PackedDecoder(config.decoder)
        self._pictures = (cameras, 3, *config.image_size)
        self.image_tokens = cameras * (config.image_size[0] // config.vision["patch_size"]) ** 2

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """[cameras, 3, height, width]."""
        return self._pictures

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Pixels of `pixel_shape` to embeddings [image_tokens, hidden]; not scaled, as text is."""
        pixels = pixel_values.to(self.decoder.device, self.decoder.dtype, non_blocking=True)
        embeddings: Tensor = self.projector(self.tower(pixels).last_hidden_state).flatten(0, 1)
        return embeddings


def load_model(
    directory: Path,
    config: Pi0FastConfig,
    cameras: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> PaliGemma:
    """The model of a checkpoint, ready to decode.

    Raises:
        UserError: the weights are incomplete or do not fit the config.
    """
    model = empty_model(partial(PaliGemma, config, cameras), dtype, device)
    names = tensor_names(directory)
    check_weights(directory, _tensors(model, names))
    allocate(model, device)
    for name, buffer in model.tower.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.numel(), device=buffer.device).view_as(buffer))
    load_weights(directory, _tensors(model, names), progress)
    return model.eval().requires_grad_(False)


def _tensors(model: PaliGemma, names: frozenset[str]) -> dict[str, Tensor]:
    """Every tensor by its name in the checkpoint; its one table of embeddings has the head's name, or its own."""
    tower = {name.removeprefix("vision_model."): each for name, each in model.tower.named_parameters()}
    tensors = {f"{_PREFIX}model.vision_tower.vision_model.{name}": each.detach() for name, each in tower.items()}
    for name, parameter in model.projector.named_parameters():
        tensors[f"{_PREFIX}model.multi_modal_projector.linear.{name}"] = parameter.detach()
    for name, tensor in decoder_tensors(model.decoder).items():
        tensors[name.replace("model.", f"{_PREFIX}model.language_model.", 1)] = tensor
    if _HEAD in names:
        tensors[_HEAD] = tensors.pop(_EMBEDDINGS)
    return tensors
