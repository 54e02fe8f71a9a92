# SPDX-License-Identifier: Apache-2.0
"""The page of a certificate: what a setting changes, bag by bag."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from specvla_ros.lab.evaluation.report.page import context_rows, provenance, table, write_page

_HEAD = ("bag", "pictures", "answered", "tokens", "different answers", "near ties", "closest logits", "tokens' SHA-256")
_DIGITS = 12  # of a digest
_FOUND = ("bags", "result", "settings")


def write_certificate_page(path: Path, content: Mapping[str, Any], failures: Sequence[str]) -> None:
    """Writes the page.

    Args:
        path: of the HTML file.
        content: of the certificate.
        failures: why it certifies nothing, in sentences.
    """
    result = content["result"]
    parts = [
        _verdict(content, failures),
        "<h2>Bags</h2>",
        table(_HEAD, [*(_row(name, each) for name, each in content["bags"].items()), _row("all", result)]),
    ]
    for title, counts in (("plain decoding", result["unanswered"]), ("the setting", result["lost"])):
        if counts:
            parts += [f"<h2>No action by {title}</h2>", table(("reason", "pictures"), context_rows(counts))]
    if result["deviation"]:
        values = {name.replace("_", " "): f"{value:.4g}" for name, value in result["deviation"].items()}
        parts += ["<h2>How far actions are apart</h2>", table(("", ""), context_rows(values))]
    if result["differences"]:
        rows = [tuple(map(_short, each.values())) for each in result["differences"]]
        parts += ["<h2>The first different answers</h2>", table(tuple(result["differences"][0]), rows)]
    parts += ["<h2>Setting</h2>", table(("", ""), context_rows(content["settings"]))]
    parts.append(provenance({name: value for name, value in content.items() if name not in _FOUND}))
    write_page(path, f"Certificate of {content['policy']['checkpoint']}", parts)


def _verdict(content: Mapping[str, Any], failures: Sequence[str]) -> str:
    result = content["result"]
    kind = "failed" if failures else "passed" if content["strict"] else ""
    words = (
        f"{result['differing']} of {result['actions']} answers differ from plain decoding's, over {result['tokens']} "
        f"tokens. The setting is {'strict' if content['strict'] else 'relaxed: its answers may differ'}."
    )
    return f"<p class='verdict {kind}'>{escape(' '.join((words, *(f'{each}.' for each in failures))))}</p>"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    closest = "" if found["closest"] is None else f"{found['closest']:.3g}"
    counts = (str(found[each]) for each in ("frames", "actions", "tokens", "differing", "near_ties"))
    return (name, *counts, closest, found["digest"][:_DIGITS])
