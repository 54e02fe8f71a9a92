# SPDX-License-Identifier: Apache-2.0
"""Files written as a whole: a killed process or a full disk leaves the old or the new one, never half of it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A file beside another to write to, which takes its place at the end and is gone after an error."""
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Writes a file that is on the disk once this returns."""
    with unfinished(path) as beside, beside.open("w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_parameters(path: Path, values: Mapping[str, Any], comments: Sequence[str] = ()) -> None:
    """Writes a parameter file for every node, from values by dotted name, with comments at its beginning."""
    head = "".join(f"# {line}\n" for line in comments)
    replace_file(path, head + format_parameters(values))


def format_parameters(values: Mapping[str, Any]) -> str:
    """The content of a parameter file for every node, from values by dotted name."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *folders, last = name.split(".")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump({"/**": {"ros__parameters": nested}}, sort_keys=False)
