# SPDX-License-Identifier: Apache-2.0
"""What the commands print."""

import io
import sys

import pytest
import typer

from specvla_ros.lab import terminal
from specvla_ros.lab.terminal import print_table


def test_a_narrow_terminal_cuts_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    row = ("strict, 8 nodes", "100 % [34, 100]", "+0.0 [-49.0, +49.0]", "1633.4", "1.03")
    print_table(("setting", "success", "difference", "ms", "speed-up"), [row, row])
    lines = [line for line in capsys.readouterr().out.splitlines() if "strict" in line]
    assert len(lines) == 2
    assert all(cell in lines[0] for cell in row)


def test_progress_into_a_file_is_written_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "PERIOD_S", 0.0)
    with terminal.progress_bar() as bar:
        line = bar.add_task("reading", total=3)
        bar.advance(line)
        bar.update(line, completed=2, description="still reading")
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["1 of 3 reading", "2 of 3 still reading"]
    monkeypatch.setattr(terminal, "PERIOD_S", 60.0)
    with terminal.progress_bar() as bar:
        bar.advance(bar.add_task("reading", total=3))
    assert "1 of 3" not in capsys.readouterr().err


def test_a_name_that_is_no_text_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a file from a system with another encoding."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    with terminal.one_line_endings():
        typer.echo("ok caf\udce9.yaml, \N{GREEK SMALL LETTER TAU}")
    sys.stdout.flush()
    assert raw.getvalue().decode() == "ok caf\\udce9.yaml, \N{GREEK SMALL LETTER TAU}\n"
