# SPDX-License-Identifier: Apache-2.0
"""Settings of a checkpoint's loading; without torch, so that a node can check them before anything is loaded."""

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
    """How the decoder's matrices are stored; everything else stays in the policy's dtype."""

    NONE = "none"
    INT4 = "int4"
    W8A8 = "w8a8"
    W8A8_HADAMARD = "w8a8_hadamard"
    FP8 = "fp8"


class PromptStyle(str, Enum):
    """How an OpenVLA checkpoint is asked."""

    OPENVLA = "openvla"
    VICUNA = "vicuna"
    ECOT = "ecot"


QUANTIZATIONS = tuple(weights.value for weights in WeightFormat)


@dataclass(frozen=True)
class ModelSettings:
    """How a checkpoint is loaded."""

    unnorm_key: str = parameter(
        "", "Dataset of the checkpoint whose action statistics apply; empty: the only one there is.", basic=True
    )
    device: str = parameter(
        "auto", "Where the policy runs: auto (CUDA if it is there), cpu, cuda or cuda:N.", basic=True
    )
    dtype: str = parameter(
        "auto", "Precision of the weights; auto: float32 on a CPU, bfloat16 on CUDA.", choices=DTYPES, basic=True
    )
    quantization: str = parameter(
        "none",
        "Weights of the language model's layers: int4 (weights alone, for ar and spec), or w8a8 and fp8 (weights and "
        "activations, for every mode); w8a8_hadamard: w8a8 with channels turned so that none stands out. fp8 needs a "
        "GPU, int4 on a GPU torchao; int4 on a CPU is slow.",
        name="model.quantization",
        choices=QUANTIZATIONS,
        basic=True,
    )
    action_head: bool = parameter(
        False,
        "Read only the 256 action rows of the output head; for policies that answer with actions alone.",
        name="model.action_head",
    )
    center_crop: bool = parameter(
        False,
        "Crop images to the central 90 % of their area, as checkpoints fine-tuned with augmentation need.",
        basic=True,
    )
    prompt: str = parameter(
        "auto",
        "How an OpenVLA checkpoint is asked: openvla, vicuna (OpenVLA v0.1), or ecot, which writes its reasoning first "
        "(set decode.max_reasoning_tokens). auto: openvla, unless config.json names Vicuna, which two of them have.",
        name="model.prompt",
        choices=("auto", *(style.value for style in PromptStyle)),
    )
    cameras: tuple[str, ...] = parameter(
        ALL_CAMERAS,
        "Cameras that the robot has, of those that the policy was trained with, for a policy that can do without some "
        "(pi0-FAST); all: every one.",
        name="model.cameras",
    )

    def __post_init__(self) -> None:
        check(self)


def refuse_options(directory: Path, options: Mapping[str, Any]) -> None:
    """For a loader: refuses those of `load_target`'s keywords that it does not know, unless they have their default."""
    usual = ModelSettings()
    for name, value in options.items():
        if value != getattr(usual, name):
            shown = next(each.name for each in walk(usual) if each.name.rpartition(".")[2] == name)
            raise UserError(f"{directory}: this family of policies has no {shown}; leave it out")
