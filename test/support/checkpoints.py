"""Small checkpoints for tests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.random_checkpoint import write_random_checkpoint


def write_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """A random checkpoint, small enough to load in milliseconds."""
    write_random_checkpoint(directory, seed=seed, hidden_size=64, layers=2)
    return directory


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes a JSON file in place."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def copy_checkpoint(source: Path, destination: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(source, destination))
