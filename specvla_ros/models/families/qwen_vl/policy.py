# SPDX-License-Identifier: Apache-2.0
"""What makes a Qwen-VL checkpoint a robot's policy: how it is asked, what it is shown, how it writes its actions.

A policy is one file with a function that looks at a checkpoint's directory: it gives a `ChatPolicy`, or None where
these are not its files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.families.qwen_vl.pictures import PatchProcessor
from specvla_ros.models.generation import GreedyRules

Messages = list[dict[str, Any]]
IMAGE = {"type": "image"}
"""The place of a picture in a chat message."""


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is made from.

    Args:
        directory: the checkpoint.
        tokenizer: its tokenizer.
        processor: what becomes of its pictures.
        unnorm_key: the dataset whose action statistics apply; empty: the only one there is.
        generation: of its generation_config.json.
    """

    directory: Path
    tokenizer: Tokenizer
    processor: PatchProcessor
    unnorm_key: str
    generation: GreedyRules


@dataclass(frozen=True)
class ChatPolicy:
    """A policy that is asked in a chat.

    Args:
        name: of the policy's family.
        cameras: names of its cameras, in the order in which it was shown them.
        picture_sizes: (height, width) of each picture in the prompt.
        pictures: camera images by name to these pictures, uint8 RGB.
        messages: the chat before its answer, by instruction.
        numbers_pictures: the chat template counts the pictures in words (`add_vision_id`).
        codec: its answers.
        generation: what is done to logits before the largest is taken.
    """

    name: str
    cameras: tuple[str, ...]
    picture_sizes: tuple[tuple[int, int], ...]
    pictures: Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]
    messages: Callable[[str], Messages]
    numbers_pictures: bool
    codec: Codec
    generation: GreedyRules
