# SPDX-License-Identifier: Apache-2.0
"""The word list finds what it names in prose, leaves code and literals alone, and the project is free of it."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plain_words.py"
spec = spec_from_file_location("plain_words", SCRIPT)
assert spec is not None and spec.loader is not None
plain_words = module_from_spec(spec)
spec.loader.exec_module(plain_words)

PYTHON = '''# The picture is old.
def old_picture(picture):
    """Whether it is old.

    Nobody was told; see `picture`.
    """
    raise ValueError(f"the picture of {picture} was cut short", "picture")
'''
MARKDOWN = """The picture goes on.

```
echo picture
```

A `picture` is [a link](picture.md), and nobody reads this.
"""


def found(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text)
    return sorted((line, word) for line, word, _ in plain_words.findings(path))


def test_prose_is_checked_and_code_is_not(tmp_path: Path) -> None:
    assert found(tmp_path, "a.py", PYTHON) == [
        (1, "picture"),
        (3, "a docstring that begins with Whether"),
        (5, "Nobody"),
        (5, "told"),
        (7, "cut short"),
        (7, "picture"),
    ]
    assert found(tmp_path, "a.md", MARKDOWN) == [(1, "goes on"), (1, "picture"), (7, "nobody")]
    assert found(tmp_path, "a.msg", "float64 picture  # told by somebody\n") == [(1, "somebody"), (1, "told")]


@pytest.mark.parametrize("text", ["there is no action", "it is no longer there", "an image is not a picture_id"])
def test_what_is_plain_is_left_alone(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, "a.md", text) == []


def test_the_project_is_free_of_the_words() -> None:
    files = plain_words.files([plain_words.ROOT / place for place in plain_words.PLACES])
    assert [f"{path}:{line}: {word}" for path in files for line, word, _ in plain_words.findings(path)] == []
