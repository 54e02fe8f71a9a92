# SPDX-License-Identifier: Apache-2.0
"""Fields for the speed benchmarks: shares, labels, columns."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.pages.tables import Result, by_task, named, table, views

_AIM = 1.15  # times the time per token of the fastest engine
_WEIGHTS = {"float32": 538e6, "8 bits": 219e6}  # bytes of SmolLM2-135M, which a token reads
_PLAIN = Path(__file__).parents[1] / "results" / "ar_cpu.json"  # of the processor that cpu_engines.py ran on


def _compiled_layers(result: Result) -> Result:
    rows = [{"what": f"forward of {each['rows']} rows", **each["seconds"]} for each in result["forwards"]]
    rows += [{"what": f"tick in `{mode}`", **seconds} for mode, seconds in result["ticks"].items()]
    rows = [each | {"ratio": each["compiled"] / each["eager"]} for each in rows]
    return result | {"rows": rows}


def _decode_modes(result: Result) -> Result:
    def run(row: Result) -> Result:
        """Marks a skipped row; only our rows count forwards."""
        skipped = [row] if "skipped" in row else []
        mine = row if "overtaken" in row else {**row, "forwards_per_action": None, "overtaken": None}
        return {**mine, "ran": not skipped, "skipped": skipped}

    def view(size: Result) -> Result:
        formats = size.get("quantized") or {}
        rows = [
            {"format": format_, "layer_bytes": found.get("layer_bytes"), **run(row)}
            for format_, found in formats.items()
            for row in ([found] if "skipped" in found else named(found["modes"], "mode"))
        ]
        modes = [run(row) for row in named(size.get("modes", {}), "mode")]
        return {"any_modes": bool(modes), "modes": modes, "any_formats": bool(rows), "formats": rows}

    if "policies" in result:
        policies = result["policies"]
        rows = [{"policy": name, **row} for name, each in policies.items() for row in named(each["modes"], "mode")]
        return {"policies": [{"rows": rows, **_auto_ages(policies)}], "traced": False}
    alone = not any("modes" in size for size in result["sizes"].values())
    flags = {"traced": True, "no_vision": not result["vision"], "all_modes": not alone, "formats_alone": alone}
    sizes = [size | view(size) for size in named(result["sizes"], "name")]
    return {**flags, "policies": [], "of_sizes": ", ".join(result["sizes"]), "sizes": sizes}


def _auto_ages(policies: Mapping[str, Result]) -> dict[str, str]:
    """The image's age in mode auto relative to the better of `ar` and `spec`, and to `ar` without a drafter."""
    modes = [policy["modes"] for policy in policies.values()]
    over_ar = [{mode: float(row["age_over_ar"]) for mode, row in each.items()} for each in modes]
    return {
        "over_best": _range([ages["auto"] / min(ages["ar"], ages["spec"]) for ages in over_ar]),
        "undrafted": _range([ages["auto, no drafter"] for ages in over_ar]),
    }


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _launches(result: Result) -> Result:
    before, now = result["before"]["cases"], result["cases"]
    ticks = [["", "launches", "after read-back", "copies", "after read-back", "read-backs"]]
    for mode in now:
        for kind, begins in (("a prompt starts", True), ("trees alone", False)):
            old, new = ([each for each in cases[mode]["ticks"] if each["begins"] == begins] for cases in (before, now))
            if old and new:
                columns = ("launches", "behind", "copies", "copies_behind", "read_backs")
                # The first counts did not tell copies after the read-back.
                most = [[max(int(tick.get(name, -1)) for tick in found) for found in (old, new)] for name in columns]
                ticks.append([f"{mode}, {kind}", *(_from_to(one if one >= 0 else other, other) for one, other in most)])
    held, holds = (
        {graph: count for case in cases.values() for graph, count in _graphs(case)} for cases in (before, now)
    )
    graphs = [["graph", "launches"], *([graph, _from_to(held.get(graph, 0), count)] for graph, count in holds.items())]
    unfused = {
        rule: max(int(tick["launches"]) for tick in now[f"spec, rule {rule}"]["ticks"])
        for rule in ("lvspec", "composite")
    }
    return {"ticks": table(ticks), "graphs": table(graphs)} | unfused


def _graphs(case: Result) -> list[tuple[str, int]]:
    """Launches of the largest graph of each kind: forwards by their operators' tiles, drafts by their depth."""
    found: dict[str, int] = {}
    for each in case["graphs"]:
        kind = each["graph"].partition(", trees")[0]
        if kind.startswith("forward"):
            kind = "forward of 1 to 64 rows" if int(kind.split()[2]) <= 64 else "forward of more rows"
        elif kind.startswith("draft keys"):
            kind = "draft keys of a prompt"
        elif "draft" in kind:
            kind = f"{kind}, {each['graph'].rpartition(', ')[2]}"
        found[kind] = max(found.get(kind, 0), each["launches"])
    return list(found.items())


def _from_to(before: int | str, now: int | str) -> str:
    return f"{before} → **{now}**" if before != now else str(now)


def _formats(result: Result) -> Result:
    formats: dict[str, Result] = result["formats"]

    def column(found: Result) -> Result:
        said = found["agreement"]
        return {
            **found,
            "against": None if found["name"] == "none" else found["against"],
            "tokens_share": said["same_tokens"] / said["tokens"],
            "answers_share": said["same_answers"] / said["answers"],
        }

    return {
        "columns": [column(found) for found in named(formats, "name")],
        "tasks": by_task(formats),
    }


def _cpu_engines(result: Result) -> Result:
    rows: dict[str, Result] = result["rows"]

    def fastest(part: str, like: str) -> float:
        return min(float(row[part]) for name, row in rows.items() if _class(name) == _class(like))

    cells = [["", "prompt, ms", "× fastest", "token, ms", "× fastest", "drafted token, ms", "× fastest", "same"]]
    for name, row in rows.items():
        if ", lookup" in name:
            continue
        drafted = rows[f"{name}, lookup"]
        pairs = [(row, "prompt_s", name), (row, "token_s", name), (drafted, "token_s", f"{name}, lookup")]
        times = [
            cell
            for mine, part, like in pairs
            for cell in (f"{mine[part] * 1e3:.2f}", f"{mine[part] / fastest(part, like):.2f}")
        ]
        cells.append([name, *times, f"{row['same']:.0%}"])
    own = {form: (float(rows[f"ours, {form}"]["token_s"]), f"ours, {form}") for form in ("float32", "8 bits")}
    ratios = {form: took_s / fastest("token_s", name) for form, (took_s, name) in own.items()}
    aims = {form: f"{'met' if ratio <= _AIM else 'missed'} ({ratio:.2f})" for form, ratio in ratios.items()}
    drafting = {form: float(rows[f"{name}, lookup"]["token_s"]) / took_s - 1 for form, (took_s, name) in own.items()}
    read_gb_s = json.loads(_PLAIN.read_text(encoding="utf-8"))["read_bandwidth_gb_s"]
    llama, ours = (rows[f"{engine}, float32"] for engine in ("llama.cpp", "ours"))
    return {
        "table": table(cells),
        "aim": _AIM,
        "aims": aims,
        "drafting": drafting,
        "llama": {part: llama[part] / ours[part] for part in ("prompt_s", "token_s")},
        "weights": _WEIGHTS,
        "read_s": {form: read / read_gb_s / 1e9 for form, read in _WEIGHTS.items()},
        **result["options"],
    }


def _class(name: str) -> tuple[bool, bool]:
    """Rows that are compared: by 8 bits and by drafting."""
    return "8 bits" in name, "lookup" in name


VIEWS = views(_compiled_layers, _decode_modes, _launches, _formats, _cpu_engines)
