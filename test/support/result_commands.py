# SPDX-License-Identifier: Apache-2.0
"""The problem with each result's command, as JSON; empty: it can be typed.

Runs in a process of its own: the benchmarks register rules, which other tests must not see.
"""

import importlib
import importlib.util
import json
import shlex

import typer

from benchmarks.gpu import report as gpu_report
from benchmarks.results_page import results

NOT_INSTALLED = "not installed: "


def problem(command: str) -> str:
    """Describes why a command cannot be typed."""
    words = shlex.split(command.removeprefix("PYTHONPATH=test "))
    if words[-1] == "hand":  # documents that were followed
        return ""
    if words[:2] != ["python", "-m"] or importlib.util.find_spec(words[2]) is None:
        return f"{words} runs no module"
    try:
        script = importlib.import_module(words[2])
    except ModuleNotFoundError as error:
        return f"{NOT_INSTALLED}{error}"
    return _wrong_options(script, words[2], words[3:])


def _wrong_options(script: object, module: str, options: list[str]) -> str:
    if script is gpu_report:
        gpu_report.arguments().parse_args(options)
        return ""
    app = typer.Typer()
    app.command()(script.main)  # type: ignore[attr-defined]
    try:
        typer.main.get_command(app).make_context(module, options)
    except Exception as error:  # Typer raises its own copies of Click's errors
        return str(error) or repr(error)
    return ""


if __name__ == "__main__":
    print(json.dumps({name: problem(result["command"]) for name, result in results().items()}))
