# SPDX-License-Identifier: Apache-2.0
"""Writes docs/results.md from the template benchmarks/results.md.in and the JSON files in benchmarks/results.

Also updates the generated parts of README.md and docs/explanation/safety.md.

python -m benchmarks.results_page

Template fields are Python's (`{tree_nodes}`, `{acceptance[name]}`), with additional formats: see `_Fields`. Text
between `<!-- for NAME -->` and `<!-- end -->` is repeated for every JSON file of the benchmark NAME. Within such a
block NAME is a field of the result. The text is repeated for every entry of a list, or of an object, whose keys are
then `{name}`, and omitted if a truth value is false. Tables repeat a row per entry and, where the columns depend on the
result, a cell per column.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from benchmarks import results_gpu
from benchmarks.results_tables import VIEWS, Result, faults_by_kind, interval, points, rate, table
from specvla_ros.lab.planning.cost import stage_times
from specvla_ros.lab.planning.device import read_device

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "results"
SAFETY, README = ROOT / "docs" / "explanation" / "safety.md", ROOT / "README.md"
_TRIED = re.compile(r"(?<=<!-- tried -->\n).*?(?=\n<!-- end of tried -->)", re.DOTALL)
_HEADLINE = re.compile(r"(?<=<!-- headline -->\n).*?(?=\n<!-- end of headline -->)", re.DOTALL)
_NANO = ROOT / "specvla_ros" / "lab" / "bundled" / "nano"
# Benchmarks that depend on the nano policy's weights; the text policy is trained from them.
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
    "first_actions",
)  # benchmarks that depend on the devices' tables
_TEMPLATE, _README_TEMPLATE = (Path(__file__).with_name(name) for name in ("results.md.in", "readme.md.in"))
_VIEWS = {**VIEWS, "gpu": results_gpu.gpu}
# The rows of the README's headline: label, device, weights, mode.
_HEADLINE_ROWS = (
    ("Orin, plain decoding", "orin", "none", "ar"),
    ("Orin, specvla", "orin", "none", "auto"),
    ("Orin, specvla with W8A8", "orin", "w8a8", "auto"),
    ("RTX 5090, plain decoding", "rtx5090", "none", "ar"),
    ("RTX 5090, specvla", "rtx5090", "none", "auto"),
)
_ANSWERS = {7: "OpenVLA", 34: "FAST", 43: "reasoning", 53: "digits, 2 actions", 216: "digits, 8 actions"}
_TAG = re.compile(r"<!-- (?:for (?P<name>\w+)|end) -->")


def main() -> None:
    """Writes the page and the generated parts of the other pages."""
    PAGE.write_text(page(), encoding="utf-8")
    SAFETY.write_text(safety_page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")


def page() -> str:
    """Returns the page for all JSON files."""
    template, scope = _template(), dict[str, Any]()
    for name in (block.name for block in template if isinstance(block, _Block)):
        files = sorted({*RESULTS.glob(f"{name}.json"), *RESULTS.glob(f"{name}_*.json")})
        scope[name] = [_scope(name, json.loads(file.read_text(encoding="utf-8")), file.name) for file in files]
    return _text(template, scope)


def safety_page() -> str:
    """Returns the safety page with the fault table from the fault suite's result."""
    result = json.loads((RESULTS / "faults_sim.json").read_text(encoding="utf-8"))
    return _TRIED.sub(faults_by_kind(result), SAFETY.read_text(encoding="utf-8"))


def readme() -> str:
    """The README with the figures of its headline."""
    names = ("age", "formats_cpu", "gpu_h200")
    results = {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    text = _README_TEMPLATE.read_text(encoding="utf-8").strip("\n").format_map(_readme_fields(results))
    return _HEADLINE.sub(lambda _: text, README.read_text(encoding="utf-8"))


def _readme_fields(results: Mapping[str, Result]) -> dict[str, Any]:
    """The fields of benchmarks/readme.md.in, from results by the names of their files."""
    formats = results["formats_cpu"]["formats"]
    agreement = formats["w8a8"]["agreement"]
    return {
        "table": _ages(results["age"]["rows"]),
        "w8a8": {
            "tokens": f"{agreement['same_tokens'] / agreement['tokens']:.0%}",
            "success": f"{formats['w8a8']['success']['rate']:.0%}",
            "before": f"{formats['none']['success']['rate']:.0%}",
        },
        "gpu": {
            name: {"hz": f"{row['action_rate_hz']:.0f}"}
            for name, row in results["gpu_h200"]["steps"]["modes"]["found"].items()
        },
    }


def _ages(rows: list[Result]) -> str:
    """The mean age of the image that the robot acts on, by device, decoding and tokens of an answer."""
    tokens = sorted({row["tokens"] for row in rows})
    cells = [["tokens per answer", *(f"{count} ({_ANSWERS[count]})" for count in tokens)]]
    for shown, device, weights, mode in _HEADLINE_ROWS:
        found = {row["tokens"]: row for row in rows if (row["device"], row["weights"]) == (device, weights)}
        cells.append([shown, *(f"{found[count]['modes'][mode]['age_s']:.2f}" for count in tokens)])
    return table(cells)


def section(result: Result) -> str:
    """Returns the page's section for one result."""
    name = result["benchmark"]
    block = next(node for node in _template() if not isinstance(node, str) and node.name == name)
    return _text([block], {name: [_scope(name, result, "not written yet")]})


def _scope(benchmark: str, result: Result, file: str) -> dict[str, Any]:
    """The fields that the template may use for a result."""
    on_gpu = "cuda" in result["command"]
    own: dict[str, Any] = {"file": file, "on_gpu": on_gpu, "on_cpu": not on_gpu}
    if benchmark in _OF_NANO:
        own["other_weights"] = result.get("policy_weights") != weights_digest(_NANO)
    if benchmark in _EMULATED:
        own["other_emulation"] = not _of_these_tables(result)
    return {**result, **own, **(_VIEWS[benchmark](result) if benchmark in _VIEWS else {})}


def _of_these_tables(result: Result) -> bool:
    """True if a result was made with its devices' current stage times."""
    emulated = result.get("emulated", {})
    now = {name: stage_times(read_device(name)).as_json() for name in emulated}
    return bool(emulated) and all(
        math.isclose(found[stage], now[name][stage], rel_tol=1e-6)
        for name, found in emulated.items()
        for stage in now[name]
        if stage.endswith("_s")
    )


def weights_digest(checkpoint: Path) -> str:
    """Returns the SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


@dataclass(frozen=True)
class _Block:
    """A block of the template between `for NAME` and `end`."""

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
        parts: the text before each tag and the tag's name; None for an end tag.
    """
    nodes: list[str | _Block] = []
    for text, name in parts:
        nodes.append(text)
        if name is None:
            break
        nodes.append(_Block(name, _nodes(parts)))
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


_UNITS = {"1": 1, "ms": 1e3, "us": 1e6, "mm": 1e3, "%": 100, "M": 1e-6, "MiB": 2**-20}
_WORDS: dict[str, Callable[[Any], str]] = {
    "rate": rate,
    "points": points,
    "interval": interval,
    "yes": {True: "yes", False: "no"}.__getitem__,
}
_FIELDS = _Fields()


def _text(nodes: list[str | _Block], scope: Mapping[str, Any]) -> str:
    """The nodes' text with their fields filled in; paragraphs are one empty line apart."""
    return re.sub(r"\n{3,}", "\n\n", _filled(nodes, scope)).strip("\n") + "\n"


def _filled(nodes: list[str | _Block], scope: Mapping[str, Any]) -> str:
    return "".join(
        _FIELDS.vformat(node, (), scope)
        if isinstance(node, str)
        else "".join(_filled(node.nodes, inner) for inner in _inner_scopes(scope, node.name))
        for node in nodes
    )


def _inner_scopes(scope: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """One scope per entry of a list or an object, or the outer scope if a truth value is true."""
    found = scope[name]
    if isinstance(found, dict):
        found = [{"name": key, **entry} for key, entry in found.items()]
    return [{**scope, **entry} for entry in found] if isinstance(found, list) else [scope] * bool(found)


if __name__ == "__main__":
    main()
