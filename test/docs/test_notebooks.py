# SPDX-License-Identifier: Apache-2.0
"""The notebooks of the documentation run, and print what their text promises."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.gl import needs_gl

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorial"


def run(name: str) -> dict[str, Any]:
    """Runs a notebook's code in its order; returns the variables that it leaves."""
    module = ModuleType("notebook")
    for number, cell in enumerate(json.loads((TUTORIALS / name).read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), vars(module))
    return vars(module)


@needs_gl
def test_a_policy_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    left = run("policy-in-python.ipynb")
    assert "the same tokens: True" in capsys.readouterr().out
    assert left["same"].record.forwards < left["action"].record.forwards
    assert left["robot"].succeeded()


@needs_gl
def test_reading_a_replay() -> None:
    left = run("read-a-replay.ipynb")
    assert len(left["plain"]) == len(left["relaxed"]) == len(left["apart_mm"]) > 5
    assert len(left["figure"].data) == 3
