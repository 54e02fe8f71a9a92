# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes: a killed process or a full disk leaves the old or the new file, never a partial one."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import yaml


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a temporary file next to `path`; it replaces `path` at the end and is deleted after an error.

    An OSError names `path`.
    """
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        if error.filename in (None, str(beside)):
            error.filename = str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Writes a file atomically and syncs it to disk."""
    with unfinished(path) as beside, beside.open("w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, value: Any, *, allow_nan: bool = True) -> None:
    """Writes a value atomically as indented JSON."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")


def write_parameters(path: Path, values: Mapping[str, Any], comments: Sequence[str] = ()) -> None:
    """Writes a parameter file for all nodes from values by dotted name, with comments at the top."""
    head = "".join(f"# {line}\n" for line in comments)
    replace_file(path, head + format_parameters(values))


def format_value(value: Any) -> str:
    """Writes a value on one line as a parameter file has it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_parameters(values: Mapping[str, Any]) -> str:
    """Formats values by dotted name as a parameter file for all nodes."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *folders, last = name.split(".")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump({"/**": {"ros__parameters": nested}}, sort_keys=False)
