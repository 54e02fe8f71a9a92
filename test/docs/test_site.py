# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds without a warning, and its links to files of the repository lead to copies of these."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="the site's requirements are missing: pip install -r requirements/docs.txt",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@SITE
def test_every_page_is_on_the_site(site: Path) -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix(".html") for path in (*docs.rglob("*.md"), *docs.rglob("*.ipynb"))}
    pages = {path.with_name("index.html") if path.stem == "README" else path for path in pages}
    assert {*pages, Path("index.html"), Path("files/CHANGELOG.html")} <= {
        path.relative_to(site) for path in site.rglob("*.html")
    }


@SITE
def test_a_notebook_is_a_page_with_its_code_and_what_it_prints(site: Path) -> None:
    page = (site / "tutorial" / "policy-in-python.html").read_text(encoding="utf-8")
    assert "the same tokens: True" in page
    assert 'href="read-a-replay.html"' in page and 'href="../python.html#stream"' in page


@SITE
def test_files_of_the_repository_are_on_the_site(site: Path) -> None:
    page = (site / "results" / "gpu.html").read_text(encoding="utf-8")
    (copied,) = set(re.findall(r'href="([^"]*gpu_h100\.json[^"]*)"', page))
    original = ROOT / "benchmarks" / "results" / "gpu_h100.json"
    assert (site / "results" / copied).read_bytes() == original.read_bytes()


@SITE
def test_the_reference_describes_the_public_interface(site: Path) -> None:
    page = (site / "reference" / "python-api.html").read_text(encoding="utf-8")
    for name in ("specvla_ros.policy.Policy.load", "specvla_ros.policy.Policy.act", "specvla_ros.policy.Stream.put"):
        assert f'id="{name}"' in page


def test_the_reference_names_every_public_class() -> None:
    from specvla_ros import __all__ as public

    page = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: specvla_ros\.[\w.]+\.(\w+)$", page, re.MULTILINE))
    assert {*public} - {"Engine"} <= named
