# SPDX-License-Identifier: Apache-2.0
"""Files that are written as a whole or not at all."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that a process that is killed, or a full disk, leaves the old or the new one, never half of it.

    Raises:
        OSError: it cannot be written; the old one, if any, is as it was.
    """
    unfinished = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
