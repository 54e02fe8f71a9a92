# SPDX-License-Identifier: Apache-2.0
"""Reports and documentation in a real browser, at a desktop's and a phone's size; needs `make browser` once."""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pages.examples import write_all

ROOT = Path(__file__).resolve().parents[2]
BROWSER = Path(sys.prefix) / "browser"
SCREENS = ROOT / "build" / "pages"  # for people to look at

pytestmark = pytest.mark.skipif(not (BROWSER / ".installed").exists(), reason="no browser: make browser installs it")
Seen = dict[tuple[str, str], dict[str, Any]]


def look(pages: Sequence[object]) -> list[dict[str, Any]]:
    """What each page shows, at a desktop's and a phone's size."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    command = ["node", str(Path(__file__).with_name("look.mjs")), str(BROWSER), str(SCREENS), *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(found) == 2 * len(pages)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each report shows, by name and size."""
    pages = write_all(tmp_path_factory.mktemp("pages"))
    return {(Path(each["page"]).parent.name, each["size"]): each for each in look(pages)}


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="make docs installs what builds the site")
def test_the_site_fits_the_screen_and_draws_its_plots(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        names = ("index", "results/cpu", "results/faults-and-attacks", "tutorial/read-a-replay", "reference/python-api")
        found = look([f"http://127.0.0.1:{server.server_port}/{name}.html" for name in names])
        server.shutdown()
    for each in found:
        assert not each["errors"] and not each["too_wide"], each
        assert each["drawn"] == each["plots"] == ("/results/" in each["page"])


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
