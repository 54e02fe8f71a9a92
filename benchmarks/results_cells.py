"""Cells of the tables on the results page."""

from typing import Any

from specvla_ros.evaluation.statistics import paired_difference


def source(result: dict[str, Any], file: str) -> str:
    """Where a section's figures come from."""
    return f"`{result['command']}`, {result['date']}, {result['hardware']}. Data: `{file}`.\n"


def rate(each: dict[str, float]) -> str:
    """A share in percent with its interval."""
    return f"{100 * each['rate']:.0f} % [{100 * each['low']:.0f}, {100 * each['high']:.0f}]"


def ms(each: dict[str, Any], name: str) -> str:
    """A percentile of the latency in milliseconds."""
    return f"{each['latency_s'][name] * 1e3:.0f}"


def difference(pairs: dict[str, Any]) -> str:
    """Points of success against the first setting, with a 95 % interval."""
    found = paired_difference(pairs["only_first"], pairs["only_second"], pairs["first"]["episodes"])
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * each for each in found))


def table(cells: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *body])
