# SPDX-License-Identifier: Apache-2.0
"""Tables and formats that all pages share."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specvla_ros.lab.evaluation.paired import paired_difference

Result = dict[str, Any]


def table(cells: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first row is its header."""
    head, *body = ("| " + " | ".join(row) + " |" for row in cells)
    return "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *body])


def rate(found: Mapping[str, float]) -> str:
    """Formats a share in percent with its interval."""
    return f"{100 * found['rate']:.0f} % [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def points(pairs: Mapping[str, Any]) -> str:
    """Formats the difference in success to the first setting, in points, with a 95 % interval."""
    if "difference" in pairs:
        found = tuple(pairs[name] for name in ("difference", "low", "high"))
    else:
        found = paired_difference(pairs["only_first"], pairs["only_second"], pairs["first"]["episodes"])
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * point for point in found))


def interval(found: Mapping[str, float]) -> str:
    """Formats a ratio with its interval."""
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def microseconds(found: float | str) -> str:
    """Formats seconds; empty for the reason why there are none."""
    return "" if isinstance(found, str) else f"{found * 1e6:.0f}"


def beside_first(rows: Sequence[Result]) -> list[Result]:
    """The rows, marking the first as the reference, which does not speculate."""
    return [{**rows[0], "against_first": None, "tau": None}, *rows[1:]]


def named(rows: Mapping[str, Result], name: str) -> list[Result]:
    """The entries of an object, with their keys as the field `name`."""
    return [{name: key, **row} for key, row in rows.items()]


def by_task(columns: Mapping[str, Result]) -> list[Result]:
    """A row per task, with each column's figures."""
    first = next(iter(columns.values()))
    return [
        {"task": task, "of": [{"found": each["tasks"][task], **each["tasks"][task]} for each in columns.values()]}
        for task in first["tasks"]
    ]


# Words and labels of recorded results, and what the pages show instead.
_NEWER_WORDS = {"picture": "image", "pictures": "images", "told": "reported"}
_LABELS = {
    "another action, by a field that decides it": "different action, by a field that determines it",
    "goes on": "continued",
    "images that lie": "malformed images",
    "lived": "survived",
    "passed over": "ignored",
    "passed over or bounded": "ignored or bounded",
    "refused, and reported": "refused and reported",
    "taken": "accepted",
    "taken, and in force": "accepted and in force",
}


def newer_words(recorded: str) -> str:
    """The words that the page shows for a label of a recorded result."""
    words = re.sub(r"\w+", lambda word: _NEWER_WORDS.get(word[0], word[0]), recorded)
    return _LABELS.get(words, words)


def views(*functions: Callable[[Result], Result]) -> dict[str, Callable[[Result], Result]]:
    """Functions by their benchmark: `_age` returns the fields that a template needs in addition to age.json."""
    return {function.__name__.removeprefix("_"): function for function in functions}
