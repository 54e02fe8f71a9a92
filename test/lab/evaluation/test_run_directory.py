# SPDX-License-Identifier: Apache-2.0
"""A directory of results: begun once, resumed with the same settings, its files whole at any time."""

import os
from pathlib import Path

import pytest

from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.run_directory import RunDirectory, write_line
from specvla_ros.lab.files import replace_file


def test_the_same_settings_resume_and_others_are_refused(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "out", "simulate")
    assert not directory.begin({"seed": 1, "bins": (1, 2)})
    assert RunDirectory(tmp_path / "out", "simulate").begin({"seed": 1, "bins": (1, 2)})
    with pytest.raises(UserError, match=r"other settings \(bins, seed; see settings.json there\)"):
        directory.begin({"seed": 2})
    with pytest.raises(UserError, match="holds results of `specvla simulate`"):
        RunDirectory(tmp_path / "out", "sweep").begin()


def test_a_file_that_cannot_be_written_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    replace_file(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    directory = RunDirectory(tmp_path, "simulate")
    with (
        pytest.raises(UserError, match="No space left on device; try again"),
        directory.reporting_errors("; try again"),
    ):
        directory.write_json(path.name, {"new": 1})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    path = tmp_path / "none" / "summary.json"
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(path, "new")
    assert caught.value.filename == str(path)


def test_lines_are_read_back_without_the_one_that_was_cut_off(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "simulate")
    with directory.append_to("episodes.jsonl") as lines:
        for value in ("a", "b"):
            write_line(lines, value)
        lines.write('"c')
    assert directory.resume_lines("episodes.jsonl", str) == ["a", "b"]
    with directory.append_to("episodes.jsonl") as lines:
        write_line(lines, "d")
    assert directory.resume_lines("episodes.jsonl", str) == ["a", "b", "d"]


def test_a_line_that_lacks_only_its_end_is_kept_and_not_joined_with_the_next(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "simulate")
    (tmp_path / "episodes.jsonl").write_text('"a"\n"b"')
    assert directory.resume_lines("episodes.jsonl", str) == ["a", "b"]
    with directory.append_to("episodes.jsonl") as lines:
        write_line(lines, "c")
    assert directory.resume_lines("episodes.jsonl", str) == ["a", "b", "c"]
