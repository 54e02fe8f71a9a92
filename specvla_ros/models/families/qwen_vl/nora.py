# SPDX-License-Identifier: Apache-2.0
"""NORA (arXiv 2504.19854): Qwen2.5-VL whose vocabulary ends with FAST tokens, from `<robot_action_0>` on.

Source: declare-lab/nora, inference/nora.py. Answers that are not a chunk are refused here; that class returns the
middle of the range for them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.fast import FastCodec, check_dims
from specvla_ros.models.codecs.fast_tokenizer import read_fast_tokenizer
from specvla_ros.models.codecs.statistics import ActionStatistics, checked_statistics
from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.models.families.qwen_vl.policy import IMAGE, ChatPolicy, Messages, PolicyContext, resized
from specvla_ros.models.generation import USUAL_NEW_TOKENS, read_end_ids, refuse_max_length
from specvla_ros.models.observation import ONLY_CAMERA

SIDE = 224  # pixels of an image's side; the aspect ratio is not kept
_FIRST, _NTH = "<robot_action_0>", "<robot_action_{}>"
_FOLDERS = ("action_tokenizer", "fast_tokenizer", "../fast_tokenizer")


def nora(context: PolicyContext) -> ChatPolicy | None:
    """Makes the policy if the vocabulary has its action tokens; UserError if a file is missing or does not fit."""
    if not has_robot_actions(context.tokenizer):
        return None
    if context.generation.max_new_tokens is None:
        refuse_max_length(context.directory)
    codec = robot_action_codec(
        context,
        context.directory,
        _statistics(context),
        horizon=None,  # 1 for NORA; given by NORA-Long's file
        limit=context.generation.max_new_tokens or USUAL_NEW_TOKENS,
    )
    return robot_action_policy(
        "nora",
        context,
        codec,
        (ONLY_CAMERA,),
        lambda image: resized(image, SIDE, SIDE),
        lambda instruction: instruction,
    )


def robot_action_policy(
    name: str,
    context: PolicyContext,
    codec: FastCodec,
    cameras: tuple[str, ...],
    sent: Callable[[np.ndarray], np.ndarray],
    text: Callable[[str], str],
) -> ChatPolicy:
    """Makes a policy whose prompt is one message: the images, then the instruction.

    Args:
        sent: turns a camera's image into uint8 RGB [SIDE, SIDE, 3].
        text: turns an instruction into the message's text.
    """
    processor = context.processor
    sides = processor.fitted(SIDE, SIDE, processor.min_pixels, processor.max_pixels)

    def messages(instruction: str) -> Messages:
        content = [*[IMAGE] * len(cameras), {"type": "text", "text": text(instruction)}]
        return [{"role": "user", "content": content}]

    return ChatPolicy(
        name=name,
        cameras=cameras,
        picture_sizes=(sides,) * len(cameras),
        pictures=lambda images: [resized(sent(image), *sides) for image in images.values()],
        messages=messages,
        numbers_pictures=False,
        codec=codec,
        generation=context.generation,
    )


def _statistics(context: PolicyContext) -> ActionStatistics:
    """Statistics of norm_stats.json, without its masks: NORA scales the gripper like the rest."""
    path = context.directory / "norm_stats.json"
    statistics = checked_statistics(path, read_checkpoint_json(path).raw, context.unnorm_key)
    return replace(statistics, mask=np.ones_like(statistics.mask))


def has_robot_actions(tokenizer: Tokenizer) -> bool:
    """True if a vocabulary has NORA's action tokens."""
    return tokenizer.token_to_id(_FIRST) is not None


def robot_action_codec(
    context: PolicyContext, directory: Path, statistics: ActionStatistics, *, horizon: int | None, limit: int | None
) -> FastCodec:
    """Makes the codec of NORA, and of other policies whose vocabulary has these tokens (StarVLA's).

    Args:
        directory: contains the FAST tokenizer, or is next to it.
        statistics: normalised values to the robot's units.
        horizon: actions per answer; None: the FAST tokenizer's `time_horizon`, or 1.
        limit: see `FastCodec`.

    Raises UserError: there is no FAST tokenizer, or its ids differ from the vocabulary's.
    """
    found = next((folder for name in _FOLDERS if (folder := directory / name).is_dir()), None)
    if found is None:
        raise UserError(
            f"{directory} is a policy that writes FAST tokens, but their tokenizer is missing: copy "
            f"physical-intelligence/fast to {directory / _FOLDERS[0]} (hf download physical-intelligence/fast "
            "--local-dir …)"
        )
    tokenizer = read_fast_tokenizer(found)
    first, last = context.tokenizer.token_to_id(_FIRST), _NTH.format(tokenizer.vocab_size - 1)
    if first is None or context.tokenizer.token_to_id(last) != first + tokenizer.vocab_size - 1:
        raise UserError(
            f"{context.directory}: the FAST tokenizer has {tokenizer.vocab_size} ids, but the vocabulary is not "
            f"consecutive from {_FIRST} to {last}: they belong to different policies; copy both from the same one"
        )
    config = read_checkpoint_json(found / "processor_config.json")
    check_dims(config, statistics)
    if horizon is None:
        horizon = config.whole("time_horizon", 1, minimum=1, maximum=1 << 10)
    return FastCodec(
        tokenizer=tokenizer,
        statistics=statistics,
        horizon=horizon,
        first_id=first,
        end_ids=read_end_ids(context.directory),
        step=1,
        limit=limit,
    )
