# SPDX-License-Identifier: Apache-2.0
"""What a result was made of: files, versions, hardware."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import specvla_ros
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.planning.measure import cpu_name


def head() -> dict[str, Any]:
    """What every result begins with: when, with which software and on which machine it was made."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "software": {
            "specvla_ros": specvla_ros.__version__,
            "git_revision": git_revision(Path(specvla_ros.__file__).parent.parent),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "hardware": {
            "cpu": cpu_name(),
            "cpu_cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": platform.platform(),
        },
    }


def checkpoint_hashes(checkpoint: Path, engine: EngineSettings) -> dict[str, dict[str, str]]:
    """SHA-256 of the files that decide the tokens: weights and settings of the target and of its draft head."""
    draft = engine.draft.head_directory(checkpoint)
    return {
        "policy_files": _weight_hashes(checkpoint),
        "draft_files": _weight_hashes(draft) if draft is not None and engine.mode != "ar" else {},
    }


def _weight_hashes(folder: Path) -> dict[str, str]:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return file_hashes([path for path in files if path.suffix in (".json", ".safetensors")])


def file_hashes(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file, by its name."""
    hashes = {}
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        hashes[file.name] = digest.hexdigest()
    return hashes


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
