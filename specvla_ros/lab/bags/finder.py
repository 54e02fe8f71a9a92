# SPDX-License-Identifier: Apache-2.0
"""The bags among what a user gives, and what else lies there: nothing below is passed over without being named."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.reader import BAG_SUFFIXES, bag_files, data_files, recordings

_log = logging.getLogger(__name__)

_OF_DATABASES = (".db3-wal", ".db3-shm", ".db3-journal")  # sqlite's own, beside a .db3


@dataclass(frozen=True)
class FoundBags:
    """What was found."""

    bags: tuple[Path, ...]  # each once: a directory or a file that `open_bag` reads
    left_out: tuple[str, ...]  # what lies beside them and is not read, each with why where it looks like a recording


def find_bags(given: Sequence[Path]) -> FoundBags:
    """The bags that are given, or lie directly in a directory that is given, in that order and by name.

    A directory is one bag where its metadata.yaml lists data files, or where these are the parts of one recording
    (NAME_0, NAME_1). Of several recordings side by side each file is a bag. A UserError says that a path does not
    exist, or that a directory holds no bag.
    """
    bags: dict[Path, Path] = {}
    left_out: list[str] = []
    for path in (each.expanduser() for each in given):
        if not path.exists():
            raise UserError(f"bag {path} does not exist; give bags, or folders of bags (`specvla collect --out`)")
        found = [path] if path.is_file() else list(_bags_in(path, left_out))
        if not found:
            raise UserError(
                f"no bags in {path}: neither it nor a directory in it holds .mcap or .db3 files; "
                f"`specvla collect --out {path}` records some"
            )
        for bag in found:
            bags.setdefault(bag.resolve(), bag)
    return FoundBags(tuple(bags.values()), tuple(left_out))


def bags_in(given: Sequence[Path]) -> tuple[Path, ...]:
    """`find_bags`, with a warning for each thing that is left out."""
    found = find_bags(given)
    for each in found.left_out:
        _log.warning("left out: %s", each)
    return found.bags


def _bags_in(directory: Path, left_out: list[str]) -> Iterator[Path]:
    """A directory's bags; what is none goes to `left_out`."""
    if _is_bag(directory):
        yield directory
        left_out += _unread(directory)
        return
    files, within = data_files(directory), _holding_data(directory)
    for child in sorted(directory.iterdir()):
        if child in files:
            yield child
        elif child in within:
            yield from _bags_in(child, left_out)
        elif child.suffix in BAG_SUFFIXES or (not child.name.startswith(".") and child.suffix not in _OF_DATABASES):
            left_out.append(str(child))


def _is_bag(directory: Path) -> bool:
    if (directory / "metadata.yaml").exists():
        return True
    return len(recordings(data_files(directory))) == 1 and not _holding_data(directory)


def _holding_data(directory: Path) -> list[Path]:
    """Directories in a directory that hold a bag, or recordings."""
    children = sorted(child for child in directory.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [child for child in children if (child / "metadata.yaml").exists() or data_files(child)]


def _unread(bag: Path) -> list[str]:
    """What looks like a recording in a bag's directory and is not read with it."""
    try:
        read = bag_files(bag)
    except UserError:
        return []  # opening it says why
    beside = [file for file in sorted(bag.iterdir()) if file.suffix in BAG_SUFFIXES and file not in read]
    return [f"{each} (bag {bag.name} does not list it; give it by itself)" for each in beside + _holding_data(bag)]
