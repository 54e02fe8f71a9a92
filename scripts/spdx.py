#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts the licence's SPDX line at the top of every Python file, after a shebang.

python scripts/spdx.py                 # adds missing lines
python scripts/spdx.py --check         # lists the files without the line; exit code 1 if there are any
python scripts/spdx.py [--check] PATH…
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINE = "# SPDX-License-Identifier: Apache-2.0\n"
PLACES = ("specvla_ros", "kernels", "benchmarks", "test", "launch", "scripts")


def python_files(places: Iterable[Path]) -> Iterator[Path]:
    """Yields files ending in .py, and scripts whose first line names python."""
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and (path.suffix == ".py" or (not path.suffix and _runs_python(path))):
                yield path


def _runs_python(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and b"python" in first


def with_line(text: str) -> str:
    """Returns the text with the line added, or unchanged if it has the line."""
    first, separator, rest = text.partition("\n")
    shebang, body = (first + separator, rest) if first.startswith("#!") else ("", text)
    return text if body.startswith(LINE) else shebang + LINE + body


def main() -> int:
    """Adds or checks the lines; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check, do not write")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; default: all of the project's")
    options = parser.parse_args()
    missing = 0
    for path in python_files(options.paths or [ROOT / place for place in PLACES]):
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        if with_line(text) == text:
            continue
        missing += 1
        if options.check:
            print(f"{path}: no SPDX line; run python scripts/spdx.py")
        else:
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(with_line(text))
    return int(options.check and missing > 0)


if __name__ == "__main__":
    sys.exit(main())
