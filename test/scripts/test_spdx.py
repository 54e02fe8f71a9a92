# SPDX-License-Identifier: Apache-2.0
"""The licence's line at the head of Python files."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "spdx.py"
LINE = "# SPDX-License-Identifier: Apache-2.0\n"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""A module."""\n', LINE + '"""A module."""\n'),
        ("", LINE),
        ("#!/usr/bin/env python3\nprint()\n", f"#!/usr/bin/env python3\n{LINE}print()\n"),
        (LINE + "x = 1\n", LINE + "x = 1\n"),
        (f"x = 1\n{LINE}", f"{LINE}x = 1\n{LINE}"),
    ],
)
def test_the_line_is_put_first_once(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(before)
    assert run("--check", tmp_path).returncode == int(before != after)
    assert path.read_text() == before
    assert run(tmp_path).returncode == 0
    assert path.read_text() == after
    assert run("--check", tmp_path).returncode == run(tmp_path).returncode == 0
    assert path.read_text() == after


def test_scripts_count_and_other_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    script = tmp_path / "folder" / "command"
    script.write_text("#!/usr/bin/env python3\nprint()\n")
    others = {"data.json": "{}", "run": "#!/bin/sh\necho\n", "plain": "text\n"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    checked = run("--check", tmp_path)
    assert checked.returncode == 1 and checked.stdout.count("no SPDX line") == 1 and "command" in checked.stdout
    assert run(tmp_path).returncode == 0
    assert script.read_text() == f"#!/usr/bin/env python3\n{LINE}print()\n"
    assert {name: (tmp_path / name).read_text() for name in others} == others
