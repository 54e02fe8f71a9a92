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
from specvla_ros.lab.planning.measure import cpu_name
from specvla_ros.speculation.settings import DRAFT_FOLDER


def head() -> dict[str, Any]:
    """What every result begins with: when, with which software and on which machine it was made."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "software": {
            "specvla_ros": specvla_ros.__version__,
            # Built with links, as `make` and colcon do, the package's files lie elsewhere than their repository.
            "git_revision": git_revision(Path(specvla_ros.__file__).resolve().parent.parent),
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
    """SHA-256 of the files that decide the tokens: weights and settings of the target and of its draft head.

    By their path in its folder; what lies beside it, or behind a link to a folder, is not seen.
    """
    draft = engine.draft.head_directory(checkpoint)
    return {
        "policy_files": _weight_hashes(checkpoint, without=(checkpoint / DRAFT_FOLDER, draft)),
        "draft_files": _weight_hashes(draft) if draft is not None and engine.mode != "ar" else {},
    }


def _weight_hashes(folder: Path, without: Sequence[Path | None] = ()) -> dict[str, str]:
    found = (path for path in sorted(folder.rglob("*")) if _decides(path) and path.is_file())
    return file_hashes([path for path in found if not set(path.parents) & set(without)], root=folder)


def _decides(path: Path) -> bool:
    return path.suffix in (".json", ".safetensors", ".bin", ".pt", ".pkl", ".npz") or path.name == "config.yaml"


def file_hashes(files: Sequence[Path], root: Path | None = None) -> dict[str, str]:
    """SHA-256 of each file, by its name, or by its path from a folder above all of them."""
    hashes = {}
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        hashes[file.relative_to(root).as_posix() if root else file.name] = digest.hexdigest()
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
