# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can fix."""

from collections.abc import Callable
from typing import Any

_SHOWN_CHARACTERS = 80
# The optional extras of setup.cfg, with the import names of their packages.
_EXTRAS = {
    "lab": ("rosbags", "mujoco", "plotly", "av", "pyarrow", "rich", "typer"),
    "serve": ("starlette", "uvicorn", "websockets", "msgpack"),
    "oft": ("simplejpeg",),
    "ray": ("ray",),
    "train": ("accelerate",),
}

SYNCHRONISE = "synchronise the machines, for example with chrony"  # the remedy for clocks that differ


class UserError(Exception):
    """An error in a user's input: a checkpoint, a bag, an image, a parameter.

    The message says what is wrong, where, and what to do. Commands print it without a traceback and exit with code 2;
    the policy node fails the lifecycle transition with it.
    """


def together(*checks: Callable[[], Any]) -> tuple[Any, ...]:
    """Runs independent checks and returns their results; raises a single UserError that lists all problems."""
    found, problems = [], []
    for check in checks:
        try:
            found.append(check())
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; and ".join(dict.fromkeys(problems)))
    return tuple(found)


def missing_package(error: ModuleNotFoundError, requirements: str = "") -> UserError:
    """The error for a Python package that is not installed.

    `requirements`: the file in requirements/ with the package; empty: derived from the package's name.
    """
    package = str(error.name).partition(".")[0]
    extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), "")
    files = requirements or (f"requirements/{extra}.txt" if extra else "requirements/runtime.txt")
    with_pip = f", or the extra specvla_ros[{extra}]" if extra else ""
    return UserError(
        f"the Python package '{error.name}' is missing; install it with `pip install -r {files}`{with_pip} "
        "(on a Jetson use NVIDIA's wheels for torch); `specvla doctor` lists everything that is missing"
    )


def shortened(text: str) -> str:
    """Shortens a user's text for a message."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
