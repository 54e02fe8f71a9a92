# SPDX-License-Identifier: Apache-2.0
"""What the commands print."""

import pytest

from specvla_ros.lab.terminal import print_table


def test_a_narrow_terminal_cuts_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    row = ("strict, 8 nodes", "100 % [34, 100]", "+0.0 [-49.0, +49.0]", "1633.4", "1.03")
    print_table(("setting", "success", "difference", "ms", "speed-up"), [row, row])
    lines = [line for line in capsys.readouterr().out.splitlines() if "strict" in line]
    assert len(lines) == 2
    assert all(cell in lines[0] for cell in row)
