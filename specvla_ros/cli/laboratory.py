# SPDX-License-Identifier: Apache-2.0
"""Adds the laboratory to the command line; no other module outside `lab` imports it.

Its commands import their libraries when they run, and name the extra to install for a missing one.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer  # `doctor` imports this module without it

_PANELS = {  # of the help, by module
    "experiments": "Simulation",
    "recordings": "Recordings",
    "robot": "Your robot",
    "plan": "Devices",
    "training": "Training",
}


def add_laboratory(app: typer.Typer) -> None:
    """Adds the laboratory's commands."""
    for name, panel in _PANELS.items():
        added = import_module(f"specvla_ros.lab.cli.{name}").app
        for each in (*added.registered_commands, *added.registered_groups):
            each.rich_help_panel = panel
        app.add_typer(added)


def find_policy(given: Path | None) -> tuple[Path, Path | None]:
    """See `specvla_ros.lab.bundled.policies.find_policy`."""
    from specvla_ros.lab.bundled import policies

    return policies.find_policy(given)


def bundled_names() -> tuple[str, ...]:
    """Names of the policies shipped with the package."""
    from specvla_ros.lab.bundled import policies

    return policies.bundled_names()


def simulator_gl() -> str:
    """The simulator's MUJOCO_GL; UserError if it cannot render."""
    from specvla_ros.lab.simulation import require_gl

    return require_gl()
