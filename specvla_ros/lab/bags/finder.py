# SPDX-License-Identifier: Apache-2.0
"""Finds the bags in the paths that a user gives; everything else in them is reported."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.lerobot.dataset import as_episode, is_dataset, open_dataset
from specvla_ros.lab.bags.reader import BAG_SUFFIXES, bag_files, data_files, recordings

_log = logging.getLogger(__name__)

_OF_DATABASES = (".db3-wal", ".db3-shm", ".db3-journal")  # sqlite's own files next to a .db3


@dataclass(frozen=True)
class FoundBags:
    """Bags and other files in the given paths."""

    bags: tuple[Path, ...]  # unique paths that `open_bag` reads
    left_out: tuple[str, ...]  # paths that are not read, with the reason if they look like a recording


def find_bags(given: Sequence[Path]) -> FoundBags:
    """Finds the bags given directly or in a given directory, in the order given and then by name.

    A LeRobot dataset yields a path for each of its episodes. A directory is one bag if its metadata.yaml lists data
    files, or if these are the parts of one recording (NAME_0, NAME_1). If it holds several recordings, each file is a
    bag. Raises UserError if a path does not exist, or if a directory holds no bag.
    """
    bags: dict[Path, Path] = {}
    left_out: list[str] = []
    for path in (each.expanduser() for each in given):
        episode = as_episode(path) is not None
        if not episode and not path.exists():
            raise UserError(f"bag {path} does not exist; give bags or folders of bags")
        found = [path] if episode or path.is_file() else list(_bags_in(path, left_out))
        if not found:
            hidden = [file.name for file in sorted(path.glob(".*")) if file.suffix in BAG_SUFFIXES]
            skipped = f" that are not hidden, as {hidden[0]} is" if hidden else ""
            raise UserError(
                f"no bags in {path}: neither it nor a directory in it holds .mcap or .db3 files{skipped}; "
                "docs/tutorial/replay-a-bag.md shows how to record your robot, and `specvla collect` records simulated "
                "experts"
            )
        for bag in found:
            bags.setdefault(bag.resolve(), bag)
    return FoundBags(tuple(bags.values()), tuple(left_out))


def bags_in(given: Sequence[Path]) -> tuple[Path, ...]:
    """Calls `find_bags` and warns about each path that is left out."""
    found = find_bags(given)
    for each in found.left_out:
        _log.warning("left out: %s", each)
    return found.bags


def _bags_in(directory: Path, left_out: list[str]) -> Iterator[Path]:
    """Yields a directory's bags and adds everything else to `left_out`."""
    if is_dataset(directory):
        yield from open_dataset(directory).episode_paths
        return
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
    """Subdirectories that hold a bag, recordings, or a LeRobot dataset."""
    children = sorted(child for child in directory.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [child for child in children if (child / "metadata.yaml").exists() or data_files(child) or is_dataset(child)]


def _unread(bag: Path) -> list[str]:
    """Recordings in a bag's directory that are not read with it."""
    try:
        read = bag_files(bag)
    except UserError:
        return []  # opening the bag reports the error
    beside = [file for file in sorted(bag.iterdir()) if file.suffix in BAG_SUFFIXES and file not in read]
    return [f"{each} (bag {bag.name} does not list it; give it separately)" for each in beside + _holding_data(bag)]
