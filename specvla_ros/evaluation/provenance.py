"""What a result was made of: files, versions, hardware."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import specvla_ros
from specvla_ros.planning.measure import cpu_name

_BLOCK = 1 << 20


def file_hashes(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file, by its name."""
    return {file.name: _sha256(file) for file in files}


def software() -> dict[str, str | None]:
    """Versions of this package, Python and torch; the git revision where the package runs from its repository."""
    return {
        "specvla_ros": specvla_ros.__version__,
        "git_revision": git_revision(Path(specvla_ros.__file__).parent.parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def hardware() -> dict[str, Any]:
    """The machine."""
    return {
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def git_revision(repository: Path) -> str | None:
    """The commit that is checked out, `-dirty` when files differ from it; None when this is no repository's root."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # Installed, the package may lie inside somebody else's repository.
        if Path(git("rev-parse", "--show-toplevel")) != repository.resolve():
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
