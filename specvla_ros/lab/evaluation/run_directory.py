# SPDX-License-Identifier: Apache-2.0
"""The directory of a command's results: refused when it holds other results, resumed, its files never half written."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import load_json, replace_file

T = TypeVar("T")

SETTINGS_FILE, SUMMARY_FILE, REPORT_FILE = "settings.json", "summary.json", "report.html"
_RESULTS = (
    SUMMARY_FILE,
    REPORT_FILE,
    "frames.jsonl",
    "episodes.jsonl",
    "sweep.json",
    "calibration.json",
    "qualify.json",
)


class RunDirectory:
    """Where one command writes its results.

    settings.json holds the command and the settings that decide its results. The same command with the same settings
    resumes; anything else is refused. Files that no command writes are left alone.
    """

    def __init__(self, path: str | Path, command: str) -> None:
        self.path = Path(path).expanduser()
        self._command = command

    def check(self) -> None:
        """Refuses a directory that is not this command's; writes nothing."""
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
        """Makes the directory, or takes up the run that it holds; returns whether an earlier run is resumed.

        Without settings, which decide the results, any earlier results of the command are replaced.
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
        """Writes a JSON file as a whole."""
        replace_file(self.path / name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; None: there is none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return load_json(path)
        except UserError as error:
            raise UserError(f"{error}; or remove that directory") from None

    def resume_lines(self, name: str, parse: Callable[[Any], T]) -> list[T]:
        """The complete lines of a JSON Lines file, from which a line that was cut off is removed."""
        path = self.path / name
        found = read_lines(path, parse)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            replace_file(path, "".join(text.splitlines(keepends=True)[: len(found)]))
        return found

    def append_to(self, name: str) -> TextIO:
        """A JSON Lines file, opened for `write_line`."""
        return (self.path / name).open("a", encoding="utf-8")

    @contextmanager
    def reporting_errors(self, hint: str = "") -> Iterator[None]:
        """Turns an OSError into a UserError that names the directory."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}{hint}") from None

    def _settings(self) -> dict[str, Any] | None:
        found = self.read_json(SETTINGS_FILE)
        if found is not None and not isinstance(found, dict):
            raise UserError(f"{self.path / SETTINGS_FILE} holds no settings; remove that directory, or give another")
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
    """Appends a value to a JSON Lines file; it is with the system when this returns."""
    lines.write(json.dumps(value, allow_nan=False) + "\n")
    lines.flush()


def read_lines(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """The values of a JSON Lines file; none: it does not exist.

    A last line that is cut off, as a killed process leaves it, is left out. `parse` raises KeyError, TypeError or
    ValueError where a line's JSON is damaged.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
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
