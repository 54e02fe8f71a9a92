# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tokenizer.json, made to take any prompt whole."""

import string
from pathlib import Path

from tokenizers import Tokenizer

from specvla_ros.errors import UserError

# What instructions are made of; a file that contradicts itself shows it with the first text, not when it is read.
_SAMPLE = f"In: What action should the robot take to {string.printable}ä中🤖?\nOut:"


def settle_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Leaves out the truncation and padding that a file may hold, as transformers does, and tries the tokenizer.

    With truncation kept, two instructions that differ at their end would be the same prompt.

    Args:
        tokenizer: read from the file; changed in place.
        path: of the file, for the message.

    Raises:
        UserError: it cannot encode a text.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        tokenizer.encode(_SAMPLE)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # where the file contradicts itself the library panics, which is no Exception
        raise UserError(f"{path} cannot encode a prompt ({error}); copy the file again") from None
