# SPDX-License-Identifier: Apache-2.0
"""Templates of the results pages: text with fields and repeated blocks.

Fields are Python's (`{tree_nodes}`, `{acceptance[name]}`), with additional formats: see `_Fields`. Text between
`<!-- for NAME -->` and `<!-- end -->` is repeated for every result of the benchmark NAME. Within such a block NAME is a
field of the result. The text is repeated for every entry of a list, or of an object, whose keys are then `{name}`, and
omitted if a truth value is false. Tables repeat a row per entry and, where the columns depend on the result, a cell per
column.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from benchmarks.pages.tables import interval, microseconds, points, rate

_TAG = re.compile(r"<!-- (?:for (?P<name>\w+)|end) -->")


@dataclass(frozen=True)
class Block:
    """A block of the template between `for NAME` and `end`."""

    name: str
    nodes: "list[str | Block]"


def read_template(path: Path) -> list[str | Block]:
    """The text and the blocks of a template."""
    text, start, parts = path.read_text(encoding="utf-8"), 0, []
    for tag in _TAG.finditer(text):
        parts.append((text[start : tag.start()], tag["name"]))
        start = tag.end()
    return _nodes(iter([*parts, (text[start:], None)]))


def _nodes(parts: Iterator[tuple[str, str | None]]) -> list[str | Block]:
    """Text and blocks up to the end of this one.

    Args:
        parts: the text before each tag and the tag's name; None for an end tag.
    """
    nodes: list[str | Block] = []
    for text, name in parts:
        nodes.append(text)
        if name is None:
            break
        nodes.append(Block(name, _nodes(parts)))
    return nodes


class _Fields(Formatter):
    """Python's formats and three more; None becomes an empty string.

    A unit after a space scales the number (`{action_s:.1f ms}`), text after a second space is appended
    (`{time_s:.1f 1 s}`), and a word formats other values (`{success:rate}`).
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if format_spec in _WORDS:
            return _WORDS[format_spec](value)
        form, _, rest = format_spec.partition(" ")
        unit, _, text = rest.partition(" ")
        return f"{format(value * _UNITS[unit] if unit else value, form)}{text and ' '}{text}"


_UNITS = {"1": 1, "ms": 1e3, "us": 1e6, "mm": 1e3, "%": 100, "M": 1e-6, "MiB": 2**-20, "GiB": 2**-30}
_WORDS: dict[str, Callable[[Any], str]] = {
    "rate": rate,
    "points": points,
    "us": microseconds,
    "interval": interval,
    "over": lambda found: f"{found['share']:+.1%} ± {(found['high'] - found['low']) / 2:.1%}",
    "yes": {True: "yes", False: "no"}.__getitem__,
}
_FIELDS = _Fields()


def filled(nodes: list[str | Block], scope: Mapping[str, Any]) -> str:
    """The nodes' text with their fields filled in; paragraphs are one empty line apart."""
    return re.sub(r"\n{3,}", "\n\n", _joined(nodes, scope)).strip("\n") + "\n"


def _joined(nodes: list[str | Block], scope: Mapping[str, Any]) -> str:
    return "".join(
        _FIELDS.vformat(node, (), scope)
        if isinstance(node, str)
        else "".join(_joined(node.nodes, inner) for inner in _inner_scopes(scope, node.name))
        for node in nodes
    )


def _inner_scopes(scope: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """One scope per entry of a list or an object, or the outer scope if a truth value is true."""
    found = scope[name]
    if isinstance(found, dict):
        found = [{"name": key, **entry} for key, entry in found.items()]
    return [{**scope, **entry} for entry in found] if isinstance(found, list) else [scope] * bool(found)
