# SPDX-License-Identifier: Apache-2.0
"""Writes docs/results.md: the text of benchmarks/results.md.in with the figures of the files in benchmarks/results.

What README.md and docs/explanation/safety.md say of them is written too.

python -m benchmarks.results_page

The template's fields are Python's (`{tree_nodes}`, `{acceptance[name]}`). Text between `<!-- for NAME -->` and
`<!-- end -->` is repeated for every JSON file of the benchmark NAME. Within such a block NAME is a field of the result:
the text is repeated for every entry of a list, and left out where a truth value is false.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results_papers, results_readme, results_robot, results_speed
from benchmarks.results_cells import Result
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.planning.stage_times import stage_times

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "results"
SAFETY, README = ROOT / "docs" / "explanation" / "safety.md", ROOT / "README.md"
_TRIED = re.compile(r"(?<=<!-- tried -->\n).*?(?=\n<!-- end of tried -->)", re.DOTALL)
_HEADLINE = re.compile(r"(?<=<!-- headline -->\n).*?(?=\n<!-- end of headline -->)", re.DOTALL)
_NANO = ROOT / "specvla_ros" / "lab" / "bundled" / "nano"
# What its weights decide; the text policy is made from it.
_OF_NANO = (
    "simulation",
    "formats",
    "speculation",
    "spec_vla",
    "head_recipes",
    "acceptance_rules",
    "lvspec",
    "pipelining",
    "driving",
    "live_driving",
    "robots_per_device",
    "serving_under_load",
)
_EMULATED = (
    "simulation",
    "pipelining",
    "draft_nodes",
    "driving",
    "faults",
    "actionflow",
    "robots_per_device",
)  # what the devices' tables decide
_TEMPLATE, _README_TEMPLATE = (Path(__file__).with_name(name) for name in ("results.md.in", "readme.md.in"))
VIEWS = {**results_papers.VIEWS, **results_speed.VIEWS, **results_robot.VIEWS}  # a result's fields by its benchmark
_TAG = re.compile(r"<!-- (?:for (?P<name>\w+)|end) -->")


def main() -> None:
    """Writes the page, and the figures that other pages take from a result."""
    PAGE.write_text(page(), encoding="utf-8")
    SAFETY.write_text(safety_page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")


def page() -> str:
    """The page with all JSON files."""
    scope: dict[str, Any] = {}
    for name in VIEWS:
        files = sorted({*RESULTS.glob(f"{name}.json"), *RESULTS.glob(f"{name}_*.json")})
        scope[name] = [_scope(name, json.loads(file.read_text(encoding="utf-8")), file.name) for file in files]
    scope["no_gpu"] = not any(result["on_gpu"] for results in scope.values() for result in results)
    return _text(_template(), scope)


def safety_page() -> str:
    """The page on safety, with the table of what was tried from the fault suite's result."""
    result = json.loads((RESULTS / "faults_sim.json").read_text(encoding="utf-8"))
    return _TRIED.sub(results_robot.faults_by_kind(result), SAFETY.read_text(encoding="utf-8"))


def readme() -> str:
    """The README, with the figures of its headline."""
    names = ("emulation", "pipelining_nano", "pipelining_of_chunks", "driving_nano")
    results = {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    text = _README_TEMPLATE.read_text(encoding="utf-8").strip("\n").format_map(results_readme.fields(results))
    return _HEADLINE.sub(lambda _: text, README.read_text(encoding="utf-8"))


def section(result: Result) -> str:
    """The part of the page that shows one result."""
    name = result["benchmark"]
    block = next(node for node in _template() if not isinstance(node, str) and node.name == name)
    return _text([block], {name: [_scope(name, result, "not written yet")]})


def _scope(benchmark: str, result: Result, file: str) -> dict[str, Any]:
    """What the template may name of a result."""
    on_gpu = "cuda" in result["command"]
    own: dict[str, Any] = {"file": file, "on_gpu": on_gpu, "on_cpu": not on_gpu}
    if benchmark in _OF_NANO:
        own["other_weights"] = result.get("policy_weights") != weights_digest(_NANO)
    if benchmark in _EMULATED:
        own["other_emulation"] = not _of_these_tables(result)
    return {**result, **own, **VIEWS[benchmark](result)}


def _of_these_tables(result: Result) -> bool:
    """Whether a result was made with the stage times that its devices have today."""
    emulated = result.get("emulated", {})
    now = {name: stage_times(read_device(name)).as_json() for name in emulated}
    return bool(emulated) and all(
        math.isclose(found[stage], now[name][stage], rel_tol=1e-6)
        for name, found in emulated.items()
        for stage in now[name]
        if stage.endswith("_s")
    )


def weights_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


@dataclass(frozen=True)
class _Block:
    """A part of the template between `for NAME` and `end`."""

    name: str
    nodes: "list[str | _Block]"


def _template() -> list[str | _Block]:
    text, start, parts = _TEMPLATE.read_text(encoding="utf-8"), 0, []
    for tag in _TAG.finditer(text):
        parts.append((text[start : tag.start()], tag["name"]))
        start = tag.end()
    return _nodes(iter([*parts, (text[start:], None)]))


def _nodes(parts: Iterator[tuple[str, str | None]]) -> list[str | _Block]:
    """Text and blocks up to the end of this one.

    Args:
        parts: text before a tag, and the name in the tag; None for an end.
    """
    nodes: list[str | _Block] = []
    for text, name in parts:
        nodes.append(text)
        if name is None:
            break
        nodes.append(_Block(name, _nodes(parts)))
    return nodes


def _text(nodes: list[str | _Block], scope: Mapping[str, Any]) -> str:
    """Text of the nodes with their fields; paragraphs are one empty line apart."""
    return re.sub(r"\n{3,}", "\n\n", _filled(nodes, scope)).strip("\n") + "\n"


def _filled(nodes: list[str | _Block], scope: Mapping[str, Any]) -> str:
    return "".join(
        node.format_map(scope)
        if isinstance(node, str)
        else "".join(_filled(node.nodes, inner) for inner in _inner_scopes(scope, node.name))
        for node in nodes
    )


def _inner_scopes(scope: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """One scope for every entry of a list, or the outer one where a truth value is true."""
    found = scope[name]
    return [{**scope, **entry} for entry in found] if isinstance(found, list) else [scope] * bool(found)


if __name__ == "__main__":
    main()
