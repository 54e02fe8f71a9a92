# SPDX-License-Identifier: Apache-2.0
"""Every report in a real browser, at a desktop's and a phone's size; needs `make browser` once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages.examples import write_all

ROOT = Path(__file__).resolve().parents[2]
BROWSER = Path(sys.prefix) / "browser"
SCREENS = ROOT / "build" / "pages"  # for people to look at

pytestmark = pytest.mark.skipif(not (BROWSER / ".installed").exists(), reason="no browser: make browser installs it")
Seen = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each page shows, by name and size."""
    pages = write_all(tmp_path_factory.mktemp("pages"))
    SCREENS.mkdir(parents=True, exist_ok=True)
    command = ["node", str(Path(__file__).with_name("look.mjs")), str(BROWSER), str(SCREENS), *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {(Path(each["page"]).parent.name, each["size"]): each for each in json.loads(done.stdout)}
    assert len(found) == 2 * len(pages)
    return found


def test_no_page_is_wider_than_the_screen_or_has_errors(seen: Seen) -> None:
    assert {key: each["too_wide"] for key, each in seen.items() if each["too_wide"]} == {}
    assert {key: each["errors"] for key, each in seen.items() if each["errors"]} == {}
    assert all(each["drawn"] == each["plots"] for each in seen.values())


def test_the_first_screen_answers_in_a_sentence_and_one_number(seen: Seen) -> None:
    for key, each in seen.items():
        assert each["first_screen"], key
        assert each["answer"].endswith((".", ":")) and any(map(str.isdigit, each["number"])), (key, each)


def test_arrow_keys_step_through_images_and_films(seen: Seen) -> None:
    """Three steps: three images of a replay, three frames of a film at 20 Hz."""
    for size in ("desktop", "phone"):
        assert seen["replay", size]["slider"] == "3"
        for name in ("simulate", "demo"):
            assert seen[name, size]["film_s"] == pytest.approx(0.15)
            assert all(seen[name, size]["films"]), "each film can be played"
            assert seen[name, size]["plots_beside_films"] == len(seen[name, size]["films"])
