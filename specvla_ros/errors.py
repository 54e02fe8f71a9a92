# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can mend."""

_SHOWN_CHARACTERS = 80


class UserError(Exception):
    """Something the user gave is wrong: a checkpoint, a bag, an image, a parameter.

    The message says what is wrong, where, and what to do. Commands print it without a traceback and exit with 2; the
    policy node refuses the transition with it.
    """


def missing_package(error: ModuleNotFoundError, requirements: str = "requirements/runtime.txt") -> UserError:
    """What a user does about a Python package that is not installed; `requirements` is the file that has it."""
    return UserError(
        f"the Python package '{error.name}' is missing; install it with `pip install -r {requirements}` "
        "(on a Jetson take torch from NVIDIA's wheels); `specvla doctor` lists everything that is missing"
    )


def shortened(text: str) -> str:
    """What a user gave, short enough for a message."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
