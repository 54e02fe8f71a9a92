# SPDX-License-Identifier: Apache-2.0
"""A benchmark as it is typed, its result, and the rows of one that goes on."""

import json
from pathlib import Path
from typing import Any

import torch
from support import typed

from benchmarks.results_page import section


def run(module: str, out: Path, *arguments: object) -> dict[str, Any]:
    """Runs a benchmark that writes to a file; its result, which the results page can show."""
    done = typed.module(module, *arguments, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    name = module.rpartition(".")[2]
    assert result["benchmark"] == name
    assert result["hardware"]
    assert result["versions"]["torch"] == torch.__version__
    assert "git_revision" in result
    assert name in section(result)
    return result


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What a run that was cut off has written, a JSON object in each line; a line that was cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
