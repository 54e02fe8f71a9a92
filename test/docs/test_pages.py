# SPDX-License-Identifier: Apache-2.0
"""What the documentation points at is there."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from specvla_ros.lab.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "specvla_ros").rglob("*.md")])
NOT_OURS = "experiments/"  # of OpenVLA's repository
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|txt|msg|xml))`")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "| new" not in line]  # files that a how-to has the reader write
    for name in NAMED.findall("\n".join(lines)):
        if not name.startswith(NOT_OURS):
            assert any((ROOT / folder / name).exists() for folder in ("", "specvla_ros", "kernels")), name


def known_commands() -> Mapping[str, Any]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group.commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shown_commands_have_the_options_that_are_shown(page: Path) -> None:
    commands = known_commands()
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        name, *given = line.partition("  #")[0].removeprefix("$ ").split()[1:] or [""]
        if line.removeprefix("$ ").startswith("specvla ") and not name.startswith("-"):
            command = commands[name]
            if isinstance(command, TyperGroup):
                command = command.commands[given.pop(0)]
            known = {option for each in command.params for option in each.opts}
            assert set(re.findall(r"(?<!\S)\[?(--?[a-z][\w-]*)", " ".join(given))) <= known, line


def test_the_reference_lists_every_command_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    commands = known_commands()
    assert set(re.findall(r"^\| `specvla ([\w-]+)` \|", page, re.MULTILINE)) == set(commands)
    known = {option for command in commands.values() for each in command.params for option in each.opts}
    shared = page.partition("## Options")[2].partition("## Launch")[0]
    assert set(re.findall(r"`(--?[a-z][\w-]*)`", shared)) <= known
    assert len(re.findall(r"`(--?[a-z][\w-]*)`", shared)) > 10


def test_the_reference_lists_every_reason_of_a_drop() -> None:
    from specvla_ros.engine.outcome import DropReason

    page = (ROOT / "docs" / "reference" / "topics.md").read_text(encoding="utf-8")
    listed = page.partition("## Why a frame has no action")[2].partition("##")[0].partition("Each is")[0]
    assert {reason.value for reason in DropReason} <= set(re.findall(r"`([a-z_]+)`", listed))


def test_the_guide_names_every_room() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^  ([\w.]+?)/? ", page.partition("\nspecvla_ros/\n")[2], re.MULTILINE))
    rooms = {path.name for path in (ROOT / "specvla_ros").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert rooms <= named
