# SPDX-License-Identifier: Apache-2.0
"""NORA (arXiv 2504.19854): Qwen2.5-VL whose vocabulary ends with FAST tokens, `<robot_action_0>` and on.

Read in declare-lab/nora, inference/nora.py. What that class makes of an answer that is no chunk (the middle of the
range) is refused here.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionStatistics, select_statistics
from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.models.families.qwen_vl.pictures import resized
from specvla_ros.models.families.qwen_vl.policy import IMAGE, ChatPolicy, Messages, PolicyContext
from specvla_ros.models.families.qwen_vl.robot_actions import has_robot_actions, robot_action_codec
from specvla_ros.models.generation import USUAL_NEW_TOKENS
from specvla_ros.models.observation import ONLY_CAMERA

_SIDE = 224  # of its picture, whose aspect ratio is not kept


def nora(context: PolicyContext) -> ChatPolicy | None:
    """The policy, where the vocabulary has its action tokens.

    Raises:
        UserError: a file of it is missing, or does not fit the others.
    """
    if not has_robot_actions(context.tokenizer):
        return None
    codec = robot_action_codec(
        context,
        context.directory,
        _statistics(context),
        horizon=None,  # NORA's is one; NORA-Long's file says another
        limit=context.generation.max_new_tokens or USUAL_NEW_TOKENS,
    )
    processor = context.processor
    sides = processor.fitted(_SIDE, _SIDE, processor.min_pixels, processor.max_pixels)

    def show(images: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [resized(resized(image, _SIDE, _SIDE), *sides) for image in images.values()]

    return ChatPolicy(
        name="nora",
        cameras=(ONLY_CAMERA,),
        picture_sizes=(sides,),
        pictures=show,
        messages=_messages,
        numbers_pictures=False,
        codec=codec,
        generation=context.generation,
    )


def _messages(instruction: str) -> Messages:
    return [{"role": "user", "content": [IMAGE, {"type": "text", "text": instruction}]}]


def _statistics(context: PolicyContext) -> ActionStatistics:
    """Of norm_stats.json; its masks are not read: NORA scales the gripper as it does the rest."""
    path = context.directory / "norm_stats.json"
    try:
        statistics = select_statistics(read_checkpoint_json(path).raw, context.unnorm_key)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return replace(statistics, mask=np.ones_like(statistics.mask))
