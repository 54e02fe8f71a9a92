# SPDX-License-Identifier: Apache-2.0
"""The directory of a command's results, and the provenance of results: files, versions and hardware."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch

import specvla_ros
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.files import replace_file, write_json
from specvla_ros.lab.planning.measure import cpu_name
from specvla_ros.settings.json_file import load_json
from specvla_ros.speculation.settings import DRAFT_FOLDER

T = TypeVar("T")

SETTINGS_FILE, SUMMARY_FILE, REPORT_FILE = "settings.json", "summary.json", "report.html"
_OF_COMMANDS = ("frames.jsonl", "episodes.jsonl", "sweep.json", "calibration.json", "qualify.json")
_RESULTS = (SUMMARY_FILE, REPORT_FILE, *_OF_COMMANDS)


class RunDirectory:
    """The directory of one command's results; files are replaced atomically.

    settings.json holds the command and the settings that determine its results. The same command with the same settings
    resumes; any other is refused. Unrelated files are left alone.
    """

    def __init__(self, path: str | Path, command: str) -> None:
        self.path = Path(path).expanduser()
        self._command = command

    def check(self) -> None:
        """Raises UserError if the directory holds other results; writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"the output {self.path} is a file; give a directory")
        settings = self._settings()
        results = [name for name in _RESULTS if (self.path / name).exists()]
        if settings is None and results:
            raise UserError(
                f"{self.path} holds results of unknown origin ({', '.join(results)}, without {SETTINGS_FILE}); give "
                "another directory with --out, or remove them"
            )
        if settings is not None and settings.get("command") != self._command:
            owner = f"`specvla {settings['command']}`" if "command" in settings else "another version of specvla_ros"
            raise UserError(f"{self.path} holds results of {owner}; give another directory with --out, or remove it")

    def begin(self, settings: Mapping[str, Any] | None = None) -> bool:
        """Creates the directory, or resumes the run in it; returns True if it resumes.

        `settings` determine the results; without them, earlier results of the command are replaced.
        """
        self.check()
        described = json.loads(json.dumps({"command": self._command, **(settings or {})}))
        found = self._settings()
        if found is None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.write_json(SETTINGS_FILE, described)
            except OSError as error:
                raise UserError(
                    f"results cannot be recorded in {self.path}: {error.strerror}; give a writable directory with --out"
                ) from None
            return False
        if found != described:
            names = ", ".join(_differing(found, described))
            raise UserError(
                f"{self.path} holds results of other settings ({names}; see {SETTINGS_FILE} there); give "
                "another directory with --out, or remove that one"
            )
        return True

    def write_json(self, name: str, value: Any) -> None:
        write_json(self.path / name, value, allow_nan=False)

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; None if it does not exist."""
        path = self.path / name
        try:
            return load_json(path) if path.exists() else None
        except UserError as error:
            raise UserError(f"{error}; or remove that directory") from None

    def resume_lines(self, name: str, parse: Callable[[Any], T]) -> list[T]:
        """Reads a JSON Lines file and removes a truncated last line from it, or ends one that lacks its end."""
        path = self.path / name
        found = read_lines(path, parse)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            lines = [line for line in text.split("\n") if line]
            replace_file(path, "".join(f"{line}\n" for line in lines[: len(found)]))
        return found

    def append_to(self, name: str) -> TextIO:
        """Opens a JSON Lines file for `write_line`."""
        return (self.path / name).open("a", encoding="utf-8")

    @contextmanager
    def reporting_errors(self, hint: str = "") -> Iterator[None]:
        """Converts an OSError to a UserError that names the directory."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}{hint}") from None

    def _settings(self) -> dict[str, Any] | None:
        found = self.read_json(SETTINGS_FILE)
        if found is not None and not isinstance(found, dict):
            raise UserError(f"{self.path / SETTINGS_FILE} holds no settings; remove that directory or give another")
        return found


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Dotted names of the values that differ, sorted."""
    names = []
    for name in sorted(first.keys() | second):
        one, other = first.get(name), second.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            names += [f"{name}.{each}" for each in _differing(one, other)]
        elif one != other:
            names.append(name)
    return names


def write_line(lines: TextIO, value: Any) -> None:
    """Appends a value to a JSON Lines file and flushes it to the operating system."""
    lines.write(json.dumps(value, allow_nan=False) + "\n")
    lines.flush()


def read_lines(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """The values of a JSON Lines file, without a last line truncated by a killed process; empty without the file.

    `parse` raises KeyError, TypeError or ValueError if a line's JSON is damaged.
    """
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    values: list[T] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            values.append(parse(json.loads(line)))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is damaged ({error}); remove the line or the directory") from None
    return values


def head() -> dict[str, Any]:
    """Date, software versions and hardware of a result."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "software": {
            "specvla_ros": specvla_ros.__version__,
            # In a symlink install (`make`, colcon) the package's files are links into the repository.
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
    """SHA-256 of the files that determine the tokens, by path: weights and settings of target and draft head.

    Links to folders are not followed.
    """
    draft = engine.draft.head_directory(checkpoint)
    return {
        "policy_files": _weight_hashes(checkpoint, without=(checkpoint / DRAFT_FOLDER, draft)),
        "draft_files": _weight_hashes(draft) if draft is not None and engine.mode != "ar" else {},
    }


def _weight_hashes(folder: Path, without: Sequence[Path | None] = ()) -> dict[str, str]:
    suffixes = (".json", ".safetensors", ".bin", ".pt", ".pkl", ".npz")
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in suffixes or path.name == "config.yaml"]
    return file_hashes([path for path in found if path.is_file() and not set(path.parents) & set(without)], folder)


def file_hashes(files: Sequence[Path], root: Path | None = None) -> dict[str, str]:
    """SHA-256 of each file, by name, or by path relative to `root`; to their common folder if a name occurs twice."""
    if root is None and len({file.name for file in files}) < len(files):
        root = Path(os.path.commonpath(files))
    hashes = {}
    for file in files:
        found = file.stat()
        hashes[file.relative_to(root).as_posix() if root else file.name] = _sha256(
            file, found.st_size, found.st_mtime_ns
        )
    return hashes


@lru_cache(maxsize=256)
def _sha256(file: Path, *_: int) -> str:
    """The hash of a file as it is now; the episodes of a dataset share files of hundreds of megabytes."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def bag_hashes(bag: Path) -> dict[str, str]:
    """SHA-256 of a bag's files, by name; the bag is a folder, one file, or an episode of a dataset."""
    from specvla_ros.lab.bags.reader import bag_files  # benchmarks on a GPU's machine have no rosbags

    if bag.is_dir():
        return file_hashes(sorted(path for path in bag.iterdir() if path.is_file()))
    return file_hashes(bag_files(bag))


def git_revision(repository: Path) -> str | None:
    """The checked-out commit, with `-dirty` if files differ; None if this is not a repository's root."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside an unrelated repository.
        if Path(git("rev-parse", "--show-toplevel")) != repository.resolve():
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
