# SPDX-License-Identifier: Apache-2.0
"""What makes a Qwen-VL checkpoint a robot's policy: how it is asked, what it is shown, how it writes its actions.

A policy is one file with a function that looks at a checkpoint's directory: it gives a `ChatPolicy`, or None where
these are not its files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.config import read_checkpoint_json
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


def read_chat(directory: Path, *, numbers_pictures: bool) -> Callable[[Messages], str]:
    """The checkpoint's chat template: messages to a prompt's text, a picture being one token.

    Raises:
        UserError: there is none.
    """
    from transformers import PreTrainedTokenizerFast

    template = _template(directory)
    renderer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))

    def chat(messages: Messages) -> str:
        text = renderer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            add_vision_id=numbers_pictures,
        )
        return cast(str, text)

    return chat


def _template(directory: Path) -> str:
    """Read from chat_template.jinja, chat_template.json or tokenizer_config.json, as transformers looks for it."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        template = read_checkpoint_json(path).text("chat_template", "") if path.exists() else ""
        if template:
            return template
    raise UserError(f"{directory} has no chat template: copy chat_template.json from where the weights are from")
