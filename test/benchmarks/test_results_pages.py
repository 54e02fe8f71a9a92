# SPDX-License-Identifier: Apache-2.0
"""The results pages, their plots and the README's table say what the JSON files say."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.result_commands import NOT_INSTALLED

from benchmarks import results_page
from benchmarks.pages.figures import figures, gpu
from benchmarks.results_page import DOCS, PAGES, README, pages, readme, results

WRITE = "run python -m benchmarks.results_page"
TEMPLATES = Path(results_page.__file__).with_name("pages")
# Names and levels with a digit that are not results.
NAMES = re.compile(r"OpenVLA-7B|\bH\d00\b|RTX \d+|float\d+|\d+-bit|w8a8|\b1b\b|\b95 ?%|95th|7 tokens")


def test_the_results_pages_are_up_to_date() -> None:
    written = pages()
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: {WRITE}"
    assert {*(DOCS / "results").glob("*.md")} <= {*written}


def test_every_result_is_on_a_page() -> None:
    text = "".join(pages().values())
    assert not [name for name in results() if f"`{name}.json`" not in text]


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    """What is wrong with each result's command."""
    root = Path(results_page.__file__).parents[1]
    paths = os.pathsep.join([str(root / "test"), *sys.path])
    script = [sys.executable, "-m", "support.result_commands"]
    done = subprocess.run(script, cwd=root, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", results())
def test_a_results_command_can_be_typed(name: str, problems: dict[str, str]) -> None:
    if problems[name].startswith(NOT_INSTALLED):
        pytest.skip(problems[name])
    assert not problems[name]


def test_the_readmes_figures_are_up_to_date() -> None:
    assert README.read_text(encoding="utf-8") == readme(), WRITE
    assert "<!-- headline -->" in readme()


def test_the_plots_show_the_data() -> None:
    for page, plot in figures(results()).items():
        svg = results_page.image(page).read_text(encoding="utf-8")
        assert plot.digest in svg, f"{page}: pip install -r requirements/docs.txt; {WRITE}"
        assert len(svg) < 100_000
    assert {*figures(results())} == {*PAGES} == {path.stem for path in (DOCS / "images" / "results").glob("*.svg")}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_a_sentence_and_its_plot_and_folds_its_tables(page: str) -> None:
    text = (DOCS / "results" / f"{page}.md").read_text(encoding="utf-8")
    title, sentence, image, *rest = text.split("\n\n")
    assert title.startswith("# ") and sentence.count(". ") == 0 and sentence.endswith(".")
    assert re.fullmatch(rf"!\[.+\]\(\.\./images/results/{page}\.svg\)", image)
    assert any(paragraph.startswith("**What it means for a robot.**") for paragraph in rest)
    unfolded = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    assert not re.search(r"^\|", unfolded, re.MULTILINE)
    assert text.count("<details") == text.count("</details>") > 0


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_above_the_tables_is_typed_by_hand(page: str) -> None:
    template = (TEMPLATES / f"{page}.md.in").read_text(encoding="utf-8")
    above = template.partition("\n## ")[0]
    words = re.sub(r"\{[^}]*\}|\]\([^)]*\)|<!--.*?-->", "", above)
    assert not re.findall(r"\w*\d[\w.]*", NAMES.sub("", words))


def test_a_second_gpu_gets_its_own_section_and_group_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results()
    other = copy.deepcopy(found["gpu_h100"]) | {"hardware": "NVIDIA Other"}
    monkeypatch.setattr(results_page, "results", lambda: {**found, "gpu_other": other})
    text = pages()[DOCS / "results" / "gpu.md"]
    assert "\n## NVIDIA Other\n" in text and "\n- NVIDIA Other: " in text
    for panel in gpu({**found, "gpu_other": other}).panels:
        assert "NVIDIA Other" in [row.label for row in panel.rows if not row.points]


def test_a_plot_is_drawn_the_same_twice() -> None:
    pytest.importorskip("matplotlib", reason="pip install -r requirements/docs.txt")
    plot = figures(results())["papers"]
    assert plot.svg() == plot.svg()
