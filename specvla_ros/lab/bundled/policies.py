# SPDX-License-Identifier: Apache-2.0
"""Finds the policies bundled with the package."""

from pathlib import Path

from specvla_ros.errors import UserError

# ROS parameter file of a bundled policy whose best decoding settings are not the defaults.
DECODING_FILE = "decoding.yaml"
_NANO = "nano"


def nano_policy() -> Path:
    """Checkpoint directory of the nano policy, which answers with single actions in bins."""
    return bundled_policy(_NANO)


def bundled_policy(name: str) -> Path:
    """Checkpoint directory of a bundled policy; raises UserError if its weights are missing."""
    directory = _folder() / name
    if not (directory / "model.safetensors").exists():
        raise UserError(f"the {name} policy is not in {directory}: name a checkpoint with --policy")
    return directory


def bundled_names() -> tuple[str, ...]:
    """Names of the bundled policies."""
    return tuple(sorted(path.parent.name for path in _folder().glob("*/model.safetensors")))


def find_policy(given: Path | None, robot: str = "") -> tuple[Path, Path | None]:
    """Returns the checkpoint's directory, and a parameter file with its best decoding settings if it has one.

    `given` is a directory or, if no such directory exists, the name of a bundled policy; None: the one named like the
    robot, else nano. Raises UserError for a name that is neither; a path that does not exist is refused when it is
    loaded.
    """
    if given is not None and (given.exists() or str(given) not in bundled_names()):
        if len(given.parts) == 1 and not given.exists():
            names = ", ".join(bundled_names())
            raise UserError(f"'{given}' is neither a folder nor one of the bundled policies: {names}")
        return given, None
    directory = bundled_policy(str(given or (robot if robot in bundled_names() else _NANO)))
    decoding = directory / DECODING_FILE
    return directory, decoding if decoding.exists() else None


def _folder() -> Path:
    return Path(__file__).parent
