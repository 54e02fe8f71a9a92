# SPDX-License-Identifier: Apache-2.0
"""Settings for loading a checkpoint, without torch, so that a node can check them before loading anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter, walk

ALL_CAMERAS = ("all",)
DTYPES = ("auto", "float32", "bfloat16", "float16")


class WeightFormat(str, Enum):
    """Storage format of the decoder's matrices; everything else keeps the policy's dtype."""

    NONE = "none"
    INT4 = "int4"
    W8A8 = "w8a8"
    W8A8_HADAMARD = "w8a8_hadamard"
    FP8 = "fp8"


class PromptStyle(str, Enum):
    """Prompt format of an OpenVLA checkpoint."""

    OPENVLA = "openvla"
    VICUNA = "vicuna"
    ECOT = "ecot"


QUANTIZATIONS = tuple(weights.value for weights in WeightFormat)


@dataclass(frozen=True)
class ModelSettings:
    """Settings for loading a checkpoint."""

    unnorm_key: str = parameter(
        "", "Dataset whose action statistics are used; empty: the checkpoint's only one.", basic=True
    )
    device: str = parameter(
        "auto", "Device that runs the policy: auto (CUDA if available), cpu, cuda or cuda:N.", basic=True
    )
    dtype: str = parameter(
        "auto", "Precision of the weights; auto: float32 on a CPU, bfloat16 on CUDA.", choices=DTYPES, basic=True
    )
    quantization: str = parameter(
        "none",
        "Quantisation of the language model's layers: int4 (weights only, for ar and spec); w8a8 and fp8 (weights and "
        "activations, for every mode); w8a8_hadamard (w8a8 with channels rotated to spread outliers). fp8 needs a "
        "GPU. int4 needs torchao on a GPU, and is slow on a CPU.",
        name="model.quantization",
        choices=QUANTIZATIONS,
        basic=True,
    )
    quantize_vision: bool = parameter(
        False,
        "Quantise the vision of an OpenVLA checkpoint too, in the same 8 bits but without rotation. On a CPU the "
        "vision takes as long as the language model. Compare success before use.",
        name="model.quantize_vision",
    )
    action_head: bool = parameter(
        False,
        "Read only the 256 action rows of the output head; for policies that answer with actions only.",
        name="model.action_head",
    )
    center_crop: bool = parameter(
        False,
        "Crop images to the central 90 % of their area, for checkpoints fine-tuned with image augmentation.",
        basic=True,
    )
    prompt: str = parameter(
        "auto",
        "Prompt format of an OpenVLA checkpoint: openvla, vicuna (OpenVLA v0.1), or ecot, which writes its reasoning "
        "first (set decode.max_reasoning_tokens). auto: openvla; required if config.json names Vicuna.",
        name="model.prompt",
        choices=("auto", *(style.value for style in PromptStyle)),
    )
    cameras: tuple[str, ...] = parameter(
        ALL_CAMERAS,
        "The robot's cameras, among those that the policy was trained with, for a policy that can run without some "
        "(such as pi0-FAST); all: every camera.",
        name="model.cameras",
    )

    def __post_init__(self) -> None:
        check(self)


def refuse_options(directory: Path, options: Mapping[str, Any]) -> None:
    """Refuses keywords of `load_target` that a loader does not support, unless they have their default."""
    usual = ModelSettings()
    for name, value in options.items():
        if value != getattr(usual, name):
            shown = next(each.name for each in walk(usual) if each.name.rpartition(".")[2] == name)
            raise UserError(f"{directory}: this family of policies does not support {shown}; omit it")
