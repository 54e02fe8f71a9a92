# SPDX-License-Identifier: Apache-2.0
"""StarVLA's QwenFast: Qwen2.5-VL or Qwen3-VL that writes a chunk in FAST tokens, as its training leaves it in a folder.

Read in starVLA/starVLA (0ed0aad): model/framework/VLM4A/QwenFast.py, model/modules/vlm, deployment/model_server,
dataloader/gr00t_lerobot/transform/state_action.py, and the data_config.py and evaluation clients of its examples. What
that class makes of an answer that is no chunk (coefficients of zero, text between the tokens left out) is refused here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from specvla_ros.errors import UserError, missing_package
from specvla_ros.models.families.qwen_vl.model import load_model
from specvla_ros.models.families.qwen_vl.nora import has_robot_actions, robot_action_codec
from specvla_ros.models.families.qwen_vl.pictures import resized
from specvla_ros.models.families.qwen_vl.policy import IMAGE, ChatPolicy, Messages, PolicyContext
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget, qwen_vl_target, read_base
from specvla_ros.models.families.starvla.config import Run, read_run, robot_and_statistics
from specvla_ros.models.settings import refuse_options
from specvla_ros.models.target import TARGETS
from specvla_ros.models.weights import Progress
from specvla_ros.settings.json_file import Fields

_HORIZON = 16  # QwenFastDefaultConfig's future_action_window_size, and the present one
_PREFIX = "qwen_vl_interface.model."  # of a tensor's name
_SIDE = 224  # of the pictures that its evaluation clients send
_PLACE = "{instruction}"


@TARGETS.register("starvla-run")
def load_starvla(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    progress: Progress | None,
    **options: Any,
) -> QwenVLTarget:
    """Loads StarVLA's QwenFast from the folder of its training run; see `load_target` for the arguments.

    Args:
        directory: see `read_run`.

    Raises:
        UserError: as of `load_target`.
    """
    refuse_options(directory, options)
    run = read_run(directory)
    config, context = read_base(run.vlm, unnorm_key)
    policy = _qwen_fast(run, context)
    load = partial(load_model, run.weights, config, device=device, dtype=dtype, progress=progress, prefix=_PREFIX)
    return qwen_vl_target(directory, config, context, policy, load)


def _qwen_fast(run: Run, context: PolicyContext) -> ChatPolicy:
    if not has_robot_actions(context.tokenizer):
        raise UserError(
            f"{run.vlm} has no tokens <robot_action_0> and on: it is not the base model that the run was trained from"
        )
    robot, statistics = robot_and_statistics(run, context.unnorm_key)
    action = run.fields.inner("framework").inner("action_model", {})
    dims = action.whole("action_dim", len(robot.scaling), minimum=1, maximum=1 << 10)
    if dims != len(robot.scaling):
        raise UserError(f"{run.fields.path}: action_dim is {dims}, and these data have {len(robot.scaling)}")
    codec = robot_action_codec(
        context, run.directory, statistics, horizon=_horizon(action), limit=context.generation.max_new_tokens
    )
    processor = context.processor
    sides = processor.fitted(_SIDE, _SIDE, processor.min_pixels, processor.max_pixels)
    prompt, sent = _prompt(run), _sent(averaged=robot.averaged)

    def show(images: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [resized(sent(image), *sides) for image in images.values()]

    def messages(instruction: str) -> Messages:
        text = {"type": "text", "text": prompt.replace(_PLACE, instruction)}
        return [{"role": "user", "content": [*[IMAGE] * len(robot.cameras), text]}]

    return ChatPolicy(
        name="starvla",
        cameras=robot.cameras,
        picture_sizes=(sides,) * len(robot.cameras),
        pictures=show,
        messages=messages,
        numbers_pictures=False,
        codec=codec,
        generation=context.generation,
    )


def _horizon(action: Fields) -> int:
    """Actions per answer: as its compatibility layer reads old and new files."""
    window = action.whole("future_action_window_size", _HORIZON - 1, maximum=(1 << 10) - 1)
    return action.whole("action_horizon", window + 1, minimum=1, maximum=1 << 10)


def _prompt(run: Run) -> str:
    data = run.fields.inner("datasets").inner("vla_data")
    prompt = data.text("CoT_prompt", _PLACE)
    if _PLACE not in prompt:
        raise data.wrong("CoT_prompt", f"a text with {_PLACE} in it: the policy would not be told what to do")
    return prompt


def _sent(*, averaged: bool) -> Callable[[np.ndarray], np.ndarray]:
    """From a camera's picture to what an evaluation client sends, uint8 RGB [_SIDE, _SIDE, 3]; aspect ratio not kept.

    Raises:
        UserError: OpenCV is not installed.
    """
    if not averaged:
        size = (_SIDE, _SIDE)
        return lambda image: np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    try:
        import cv2
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
    return lambda image: np.asarray(cv2.resize(image, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA))
