# SPDX-License-Identifier: Apache-2.0
"""Writes docs/results.md, the pages and plots in docs/results and docs/images/results, from benchmarks/results.

The words come from the templates in benchmarks/pages. Also updates the generated parts of README.md and
docs/explanation/safety.md. Plots need matplotlib (requirements/docs.txt); without it they stay as they are.

python -m benchmarks.results_page
"""

import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pages import decoding, faults, gpu, papers, robots, speed
from benchmarks.pages.figures import figures
from benchmarks.pages.headlines import headlines
from benchmarks.pages.tables import Result, table
from benchmarks.pages.template import Block, filled, read_template
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.planning.stage_times import stage_times

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
SAFETY, README = ROOT / "docs" / "explanation" / "safety.md", ROOT / "README.md"
_TRIED = re.compile(r"(?<=<!-- tried -->\n).*?(?=\n<!-- end of tried -->)", re.DOTALL)
_HEADLINE = re.compile(r"(?<=<!-- headline -->\n).*?(?=\n<!-- end of headline -->)", re.DOTALL)
_BUNDLED = ROOT / "specvla_ros" / "lab" / "bundled"
_TEMPLATES, _README_TEMPLATE = (Path(__file__).with_name(name) for name in ("pages", "readme.md.in"))
PAGES = (
    "what-it-buys",
    "speculation",
    "pipelining-and-age",
    "gpu",
    "cpu",
    "robots-per-device",
    "faults-and-attacks",
    "papers",
)
_VIEWS = {
    **{name: view for module in (speed, papers, decoding, robots, faults) for name, view in module.VIEWS.items()},
    "gpu": gpu.gpu,
}
# The rows of the README's headline: label, device, weights, mode.
_HEADLINE_ROWS = (
    ("Orin, plain decoding", "orin", "none", "ar"),
    ("Orin, specvla", "orin", "none", "auto"),
    ("Orin, specvla with W8A8", "orin", "w8a8", "auto"),
    ("RTX 5090, plain decoding", "rtx5090", "none", "ar"),
    ("RTX 5090, specvla", "rtx5090", "none", "auto"),
)
_ANSWERS = {7: "OpenVLA", 34: "FAST", 43: "reasoning", 53: "digits, 2 actions", 216: "digits, 8 actions"}


def main() -> None:
    """Writes the pages, their plots and the generated parts of the other pages."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    SAFETY.write_text(safety_page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        print("the plots were not drawn: pip install -r requirements/docs.txt")
        return
    for name, plot in figures(results()).items():
        image(name).parent.mkdir(exist_ok=True)
        image(name).write_text(plot.svg(), encoding="utf-8")


def image(page: str) -> Path:
    """The plot of a page."""
    return DOCS / "images" / "results" / f"{page}.svg"


def results() -> dict[str, Result]:
    """All results by the names of their files."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}


def pages() -> dict[Path, str]:
    """Returns the text of every page for all JSON files."""
    found = results()
    heads = headlines(found)
    scopes: dict[str, list[dict[str, Any]]] = {}
    for file, result in found.items():
        name = result["benchmark"]
        scopes.setdefault(name, []).append(_scope(name, result, f"{file}.json"))
    written = {name: filled(_template(name), {**scopes, "head": heads[name]}) for name in PAGES}
    first = {name: text.split("\n\n")[1].replace("\n", " ") for name, text in written.items()}
    return {
        DOCS / "results.md": filled(_template("results"), {"first": first}),
        **{DOCS / "results" / f"{name}.md": text for name, text in written.items()},
    }


def safety_page() -> str:
    """Returns the safety page with the fault table from the fault suite's result."""
    result = json.loads((RESULTS / "faults_sim.json").read_text(encoding="utf-8"))
    return _TRIED.sub(faults.faults_by_kind(result), SAFETY.read_text(encoding="utf-8"))


def readme() -> str:
    """The README with the figures of its headline."""
    text = _README_TEMPLATE.read_text(encoding="utf-8").strip("\n").format_map(_readme_fields(results()))
    return _HEADLINE.sub(lambda _: text, README.read_text(encoding="utf-8"))


def _readme_fields(results: Mapping[str, Result]) -> dict[str, Any]:
    """The fields of benchmarks/readme.md.in, from results by the names of their files."""
    formats = results["formats_cpu"]["formats"]
    agreement = formats["w8a8"]["agreement"]
    rows = {row["with"]: row for row in results["mechanisms"]["rows"] if row["device"] == "rtx5090"}
    alone, first = (rows[name] for name in ("auto", "first actions"))
    return {
        "table": _ages(results["age"]["rows"]),
        "w8a8": {
            "tokens": f"{agreement['same_tokens'] / agreement['tokens']:.0%}",
            "success": f"{formats['w8a8']['success']['rate']:.0%}",
            "before": f"{formats['none']['success']['rate']:.0%}",
        },
        "first": {
            "age": f"{first['picture_age_s']:.2f} s",
            "before": f"{alone['picture_age_s']:.2f} s",
            "success": f"{first['success']['second']['rate']:.0%}",
            "success_before": f"{alone['success']['second']['rate']:.0%}",
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
    """Returns the pages' sections for one result."""
    name = result["benchmark"]
    scope = {name: [_scope(name, result, "not written yet")]}
    blocks = (node for page in PAGES for node in _template(page) if isinstance(node, Block) and node.name == name)
    return "".join(filled([block], scope) for block in blocks)


def _template(name: str) -> list[str | Block]:
    return read_template(_TEMPLATES / f"{name}.md.in")


def _scope(benchmark: str, result: Result, file: str) -> dict[str, Any]:
    """The fields that the template may use for a result."""
    on_gpu = "cuda" in result["command"]
    own: dict[str, Any] = {"file": file, "on_gpu": on_gpu, "on_cpu": not on_gpu}
    own["other_weights"] = result.get("policy_weights") not in {None, *_bundled_digests()}
    own["other_emulation"] = "emulated" in result and not _of_these_tables(result)
    if "episodes_per_task" in result:
        own["last_seed"] = result["first_seed"] + result["episodes_per_task"] - 1
    own["origin"] = filled(_template("origin"), {**result, **own, **_origin(result)}).strip()
    return {**result, **own, **(_VIEWS[benchmark](result) if benchmark in _VIEWS else {})}


def _origin(result: Result) -> dict[str, Any]:
    """Machine, commit and software of a result; empty where an early result does not name them."""
    commit, _, dirty = (result.get("git_revision") or "").partition("-")
    return {
        "dtype": result.get("dtype"),
        "date": result.get("date"),
        "commit": "-".join(each for each in (commit[:8], dirty) if each),
        "software": ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items()),
    }


def _of_these_tables(result: Result) -> bool:
    """True if a result was made with its devices' current stage times."""
    emulated = result["emulated"]
    now = {name: stage_times(read_device(name)).as_json() for name in emulated}
    return all(
        math.isclose(found[stage], now[name][stage], rel_tol=1e-6)
        for name, found in emulated.items()
        for stage in now[name]
        if stage.endswith("_s")
    )


@cache
def _bundled_digests() -> frozenset[str]:
    return frozenset(map(weights_digest, (file.parent for file in _BUNDLED.glob("*/model.safetensors"))))


def weights_digest(checkpoint: Path) -> str:
    """Returns the SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
