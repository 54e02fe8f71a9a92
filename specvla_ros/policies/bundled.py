# SPDX-License-Identifier: Apache-2.0
"""The policy that comes with the package."""

from pathlib import Path

from specvla_ros.errors import UserError


def nano_policy() -> Path:
    """Checkpoint directory of the nano policy."""
    directory = Path(__file__).parent / "nano"
    if not (directory / "model.safetensors").exists():
        raise UserError(f"the nano policy is not in {directory}: name a checkpoint with --policy")
    return directory
