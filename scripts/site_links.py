# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: the README is the first page, notebooks are pages, and files that pages link to are part of the site.

Pages link to files of the repository so that the links work there too. On the site a Markdown file becomes a page
under files/, any other file a text under files/, and a link to a folder becomes its words.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
_PROJECT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def on_files(files: Files, config: Any) -> Files:
    """Adds notebooks as pages, the files that pages link to, and those that these link to."""
    for book in (ROOT / "docs").rglob("*.ipynb"):
        page = book.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=_markdown_of(book)))
        files.remove(files.src_uris[book.relative_to(ROOT / "docs").as_posix()])
    pages = [*_PROJECT, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(pages)
    for path in pages[: len(_PROJECT)]:
        files.append(_added(path, config))
    while pages:
        for linked in set(_targets(pages.pop())) - seen:
            seen.add(linked)
            if not linked.startswith("docs/"):
                files.append(_added(linked, config))
                pages += [linked] * linked.endswith(".md")
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page to what they are on the site."""
    origin = _origin(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        picture, words, link, anchor = match.groups()
        target = _resolved(origin, link)
        if target is None:
            return match[0]
        if (ROOT / target).is_dir():
            return words
        words = _LINK.sub(rewritten, words)
        return f"{picture}[{words}]({posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri))}{anchor})"

    return _LINK.sub(rewritten, markdown)


def _targets(page: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8") if path.exists() else _markdown_of(path.with_suffix(".ipynb"))
    for _, _, link, _ in _LINK.findall(text):
        target = _resolved(page, link)
        if target is not None and (ROOT / target).is_file():
            yield target


def _resolved(page: str, link: str) -> str | None:
    """The path in the repository that a link of a page leads to; None for other sites and missing files."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return None if "://" in link or not (ROOT / target).exists() else target


def _uri(path: str) -> str:
    """The place of a file of the repository among the site's sources."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.txt"


def _markdown_of(notebook: Path) -> str:
    """A notebook's cells and their printed outputs as Markdown."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        printed = "".join(text for output in cell.get("outputs", []) for text in output["text"])
        parts += [source] if cell["cell_type"] == "markdown" else [f"```python\n{source}\n```"]
        parts += [f"```text\n{printed}```"] if printed else []
    return "\n\n".join(parts) + "\n"


def _origin(uri: str) -> str:
    """The file of the repository behind a page of the site."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"


def _added(path: str, config: Any) -> File:
    return File.generated(config, _uri(path), abs_src_path=str(ROOT / path))
