# SPDX-License-Identifier: Apache-2.0
"""What the tables of the results page are put together from."""

from collections.abc import Callable, Mapping
from typing import Any

from specvla_ros.lab.evaluation.paired import paired_difference

Result = dict[str, Any]
Cells = list[list[str]]


def table(cells: Cells) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *body])


def rate(found: Mapping[str, float]) -> str:
    """A share in percent with its interval."""
    return f"{100 * found['rate']:.0f} % [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def ms(row: Mapping[str, Any], *names: str, digits: int = 0) -> str:
    """Statistics of the latency in milliseconds."""
    return " / ".join(f"{row['latency_s'][name] * 1e3:.{digits}f}" for name in names)


def difference(pairs: Mapping[str, Any]) -> str:
    """Points of success against the first setting, with a 95 % interval."""
    found = paired_difference(pairs["only_first"], pairs["only_second"], pairs["first"]["episodes"])
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * points for points in found))


def if_any(value: float | None, text: str) -> str:
    """A value in a text with one field; nothing where there is none."""
    return "" if value is None else text.format(value)


def by_size(result: Result, view: Callable[[str, Result], dict[str, Any]]) -> dict[str, Any]:
    """Of a benchmark that measures several models: what `view` shows of each."""
    return {"sizes": [{**size, "name": name, **view(name, size)} for name, size in result["sizes"].items()]}
