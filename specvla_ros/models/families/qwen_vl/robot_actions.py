# SPDX-License-Identifier: Apache-2.0
"""Actions as FAST tokens that were added to Qwen-VL's vocabulary: `<robot_action_0>` and on, as NORA and StarVLA do."""

from pathlib import Path

from tokenizers import Tokenizer

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionStatistics
from specvla_ros.models.codecs.fast import FastCodec, check_dims
from specvla_ros.models.codecs.fast_tokenizer import read_fast_tokenizer
from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.models.families.qwen_vl.policy import PolicyContext
from specvla_ros.models.generation import read_end_ids

_FIRST, _NTH = "<robot_action_0>", "<robot_action_{}>"
_FOLDERS = ("action_tokenizer", "fast_tokenizer", "../fast_tokenizer")


def has_robot_actions(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary has these tokens."""
    return tokenizer.token_to_id(_FIRST) is not None


def robot_action_codec(
    context: PolicyContext, directory: Path, statistics: ActionStatistics, *, horizon: int | None, limit: int | None
) -> FastCodec:
    """The codec of such a policy, whose vocabulary has these tokens.

    Args:
        context: of the policy.
        directory: in or beside which the FAST tokenizer lies.
        statistics: normalised values to the robot's units.
        horizon: actions per answer; None: as the FAST tokenizer's `time_horizon` says, or one.
        limit: see `FastCodec`.

    Raises:
        UserError: there is no FAST tokenizer, or it has other ids than the vocabulary.
    """
    found = next((folder for name in _FOLDERS if (folder := directory / name).is_dir()), None)
    if found is None:
        raise UserError(
            f"{directory} is a policy that writes FAST tokens, and their tokenizer is not with it: copy "
            f"physical-intelligence/fast to {directory / _FOLDERS[0]} (hf download physical-intelligence/fast "
            "--local-dir …)"
        )
    tokenizer = read_fast_tokenizer(found)
    first, last = context.tokenizer.token_to_id(_FIRST), _NTH.format(tokenizer.vocab_size - 1)
    if first is None or context.tokenizer.token_to_id(last) != first + tokenizer.vocab_size - 1:
        raise UserError(
            f"{context.directory}: the FAST tokenizer has {tokenizer.vocab_size} ids, but the vocabulary does not go "
            f"on from {_FIRST} to {last}: they belong to different policies"
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
        counts_up=True,
        limit=limit,
    )
