# SPDX-License-Identifier: Apache-2.0
"""The prose checks find what they name, leave code and literals alone, and find nothing in the project."""

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


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen " * 3


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (f"First. A {LONG}end.\n", (1, "a sentence of 47 words")),
        (f"Short.\n\n- an item\n- {LONG}last\n", (4, "a sentence of 46 words")),
        ("A robot with the the\narm.\n", (1, "the the")),
        ("The arm of\nof the robot.\n", (1, "of\nof")),
    ],
)
def test_long_sentences_and_doubled_words_are_found(tmp_path: Path, text: str, finding: tuple[int, str]) -> None:
    assert found(tmp_path, "a.md", text) == [finding]


@pytest.mark.parametrize(
    "text",
    [
        "A " + LONG.replace(" ", ", ") + "end.\n",  # an enumeration
        "\n".join(f"- {item}" for item in LONG.split()),
        "| " + LONG.replace(" ", " | ") + "\n",
        f"```\n{LONG}end\n```\n",
        f"`{LONG}` is code.\n",
        "# The robot\n\nRobot arms move.\n\n# Arms\n\nArms move.\n",
        "`xacro xacro` is a command.\n",
    ],
)
def test_enumerations_code_and_headings_are_not_long_sentences(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, "a.md", text) == []


@pytest.mark.parametrize(
    ("code", "repeats"),
    [
        ('class DraftSettings:\n    """Settings of the draft."""\n', True),
        ('def read_config():\n    """Reads the config."""\n', True),
        ('def read_config():\n    """Reads config.json."""\n', False),
        ('def latency():\n    """Latency in seconds."""\n', False),
        ("def latency():\n    pass\n", False),
    ],
)
def test_docstrings_that_only_repeat_the_name_are_found(tmp_path: Path, code: str, repeats: bool) -> None:
    words = [word for _, word in found(tmp_path, "a.py", code)]
    assert words == ([f"a docstring that repeats '{code.split()[1].split('(')[0].rstrip(':')}'"] if repeats else [])


@pytest.mark.parametrize("start", ["What", "Whether", "How", "Why", "Of", "That", "To be"])
def test_docstrings_that_begin_with_a_clause_are_found(tmp_path: Path, start: str) -> None:
    code = f'def step():\n    """{start} an arm moves in a tick."""\n'
    assert found(tmp_path, "a.py", code) == [(2, f"a docstring that begins with {start}")]


def test_proselint_reads_documents_without_their_code(tmp_path: Path) -> None:
    pytest.importorskip("proselint")
    path = tmp_path / "a.md"
    path.write_text(
        'One.\n\n```\nmore unique\n```\n\n`more unique` and "quoted" motion resumes.\n\nIt is more unique.\n'
    )
    assert [(line, word) for line, word, _ in plain_words.proselint_findings(path)] == [(9, "more unique")]


def test_the_project_is_free_of_the_words() -> None:
    files = plain_words.files([plain_words.ROOT / place for place in plain_words.PLACES])
    assert [f"{path}:{line}: {word}" for path in files for line, word, _ in plain_words.findings(path)] == []
