# SPDX-License-Identifier: Apache-2.0
"""Fields for speculation and the papers' benchmarks."""

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.pages.tables import Result, beside_first, interval, table, views

_LAUNCHES = Path(__file__).resolve().parents[1] / "results" / "launches.json"


def _emulation(result: Result) -> Result:
    devices, figures = result["devices"], result["figures"]
    errors = [figure["captured_error_percent"] for figure in figures]
    claimed = [
        abs(figure[error])
        for figure in figures
        for error, band in (("error_percent", "band_percent"), ("captured_error_percent", "captured_band_percent"))
        if figure[band] is not None
    ]
    return {
        "devices": [
            {"name": device["name"], "software": kind, **device[field], "by_rows": _by_rows(device[field])}
            for device in devices.values()
            for kind, field in (("eager", "efficiency"), ("captured", "captured"))
        ],
        "figures": [_figure(figure, devices[figure["device"]]) for figure in figures],
        "claimed": len(claimed),
        "largest": f"{max(claimed):.0f}",
        "fitted": sum(map(_fitted_numbers, devices.values())),
        "least": f"{100 / (1 + max(errors) / 100):.0f}",
    }


def _by_rows(reached: Result) -> str:
    shares = reached["compute_by_rows"]
    return ", ".join(f"{rows}: {100 * share:.0f} %" for rows, share in shares.items())


def _fitted_numbers(device: Result) -> int:
    """Numbers fitted to publications; those fitted to our own forwards are not of `published.json`."""
    fitted = [name.partition(".") for name, origin in device["sources"].items() if origin.startswith("fitted")]
    return sum(len(device[kind][number]) if number == "compute_by_rows" else 1 for kind, _, number in fitted if number)


def _figure(figure: Result, device: Result) -> Result:
    rows, tokens = figure["rows"], figure["tokens"]
    bands = {"eager": figure["band_percent"], "captured": figure["captured_band_percent"]}
    claims = [f"{kind} within {band:g} %" for kind, band in bands.items() if band is not None]
    what = {
        "answer": f"{tokens} tokens after {rows} rows",
        "pipeline": f"{tokens} frames in flight, {rows} rows each",
        "gathered": f"{tokens} frames in flight, {rows} rows each, gathered",
        "token": f"a token after {rows} rows",
        "prompt": f"a prompt of {rows} rows",
        "flow": f"{rows} rows of images, 10 steps",
    }[figure["work"]]
    return {
        **figure,
        "device_name": device["name"],
        "what": what,
        "of_weights": "" if figure["weights"] == "none" else f" {figure['weights']}",
        "error": round(figure["error_percent"]),
        "captured_error": round(figure["captured_error_percent"]),
        "claim": f"{figure['use']}: {', '.join(claims)}" if claims else "no",
    }


_HEAD = Path(__file__).resolve().parents[2] / "specvla_ros" / "lab" / "bundled" / "nano" / "draft" / "training.json"


def _speculation(result: Result) -> Result:
    plain, *drafted = result["rows"]
    recipe = json.loads(_HEAD.read_text(encoding="utf-8"))
    return {
        "speculating": len(drafted),
        "slower": sum(row["action_s"] > plain["action_s"] for row in drafted),
        **{key: recipe[key] for key in ("learning_rate", "own_steps")},
        "bounds": " or ".join(f"{bound['mm']:g} mm and {bound['degrees']:g}°" for bound in result["tolerances"]),
        **_accepted(result),
    }


def _accepted(result: Result) -> Result:
    """Spec-VLA's tables 1 to 3: success, shares of the accept lengths, and accept lengths by position in the answer."""
    rows, drafted = result["rows"], result["rows"][1:]
    lengths = range(max(int(length) for row in drafted for length in row["share_by_accept_length"]) + 1)
    places = sorted({int(place) for row in drafted for place in row["accept_length_by_place"]})

    def by_both(row: Result) -> Result:
        shares, means = row["share_by_accept_length"], row["accept_length_by_place"]
        return {
            **row,
            "by_length": [{"share": shares.get(str(length), 0)} for length in lengths],
            "by_place": [{"mean": means.get(str(place))} for place in places],
        }

    return {
        "pairs": rows[0]["success"]["episodes"],
        "rows": [{**row, "tokens_per_forward": 7 / row["forwards_per_action"]} for row in beside_first(rows)],
        "drafted": [by_both(row) for row in drafted],
        "lengths": [{"n": length} for length in lengths],
        "places": [{"n": place + 1} for place in places],
    }


def _spec_vla(result: Result) -> Result:
    return {**_accepted(result), "case_table": _case_table(result["case"])}


def _case_table(case: Result) -> str:
    """One action with a column per forward; accepted drafts are bold, with their distance in bins unless 0."""
    forwards = max(len(case["strict"]), len(case["relaxed"]))
    cells = [["", *(f"forward {number}" for number in range(1, forwards + 1))]]
    for mode in ("strict", "relaxed"):
        tokens = [" ".join(_case_token(token) for token in committed) for committed in case[mode]]
        cells.append([mode, *tokens, *[""] * (forwards - len(tokens))])
    return table(cells)


def _case_token(token: Result) -> str:
    off = f" (±{token['bins_off']})" if token["bins_off"] else ""
    return f"{token['token']}" if token["why"] == "target" else f"**{token['token']}{off}**"


def _head_recipes(result: Result) -> Result:
    """Tokens per verification of each recipe, by pass over the answers."""
    return {
        "passes": [{"n": epoch} for epoch in range(1, result["epochs"] + 1)],
        "answers": result["rows"][0]["held_out_answers"],
        "rows": [
            {**row, "taus": [{"tau": tau} for tau in row["tau_by_epoch"]], "of_plain": row["action_s"] / result["ar_s"]}
            for row in result["rows"]
        ],
    }


def _one_pass_drafts(result: Result) -> Result:
    """Each head's drafts beside those of the head that grows trees level by level; launches are of launches.json."""
    rows = []
    for policy in result["policies"]:
        levels = policy["heads"][0]
        rows += [
            {
                **policy,
                **head,
                "of_length": head["accept_length"] / levels["accept_length"],
                "of_time": head["draft_s"] / levels["draft_s"],
            }
            for head in policy["heads"]
        ]
    cases = json.loads(_LAUNCHES.read_text(encoding="utf-8"))["cases"]
    names = {"levels": "spec", "branched": "spec, drafts from one forward"}
    return {"rows": rows, **{field: _launches_of_a_draft(cases[name]) for field, name in names.items()}}


def _launches_of_a_draft(case: Result) -> int:
    return max(each["launches"] for each in case["graphs"] if each["graph"].startswith(("draft by", "draft from")))


def _acceptance_rules(result: Result) -> Result:
    parts = ("nano", "text")
    return {
        "millimetres": result["tolerance"]["metres"] * 1e3,
        **{f"{name}_starts": result[name][0]["success"]["episodes"] for name in parts},
        **{name: beside_first(result[name]) for name in parts},
    }


def _lvspec(result: Result) -> Result:
    plain = result["rows"][0]
    rows = {row["name"]: {**row, **_accepted_by(row)} for row in beside_first(result["rows"])}
    return {
        "starts": plain["success"]["episodes"],
        "tokens": f"{plain['tokens_per_action']:.0f}",
        "millions": f"{result['text_policy']['parameters'] / 1e6:.1f}",
        "comparisons": [
            {"title": title, "rows": [rows[name] for name in names]} for title, names in result["tables"].items()
        ],
    }


def _accepted_by(row: Result) -> dict[str, float | None]:
    """Shares of the committed tokens by the reason that a draft was accepted; None for plain decoding."""
    reasons = {"exact": ("exact",), "loosened": ("irrelevant", "deferred"), "shifted": ("shifted",)}
    if row["tau"] is None:
        return dict.fromkeys(reasons)
    return {name: sum(row["why"].get(why, 0.0) for why in whys) for name, whys in reasons.items()}


def _fly(result: Result) -> Result:
    plain, *others = result["rows"]
    forwards, time = (result["goals"][name] for name in ("forwards", "time"))
    training, gate_s = result["draft_training"], result["gate_s"]
    drafting = [row for row in others if row["ours"]]
    fastest = max(drafting, key=lambda row: float(row["plain_time_over_own"]["ratio"]))
    slower = sum(row["plain_time_over_own"]["high"] < 1 for row in drafting)
    reached = {True: "reached", False: "not reached"}
    return {
        "rows": [{**plain, "plain_time_over_own": None}, *others],
        "fastest": f"*{fastest['name']}*, {interval(fastest['plain_time_over_own'])}",
        "slower": f"{slower} of our {len(drafting)} rows",
        "parameters_m": {name: f"{n / 1e6:.0f}" for name, n in result["parameters"].items()},
        "gate_us": f"{1e6 * (gate_s['fly'] - gate_s['strict']):.0f}",
        "strict_us": f"{1e6 * gate_s['strict']:.0f}",
        "kinds": ", ".join(result["kinds"]),
        "trained": [{**training, "agreement": training["validation"][-1]["agreement"]}] if training else [],
        "forwards_goal": reached[bool(forwards["reached"])],
        "share": f"{forwards['share']:.3f}",
        "time_goal": reached[bool(time["reached"])],
        "assisted": ", ".join(f"K {k}: {interval(ratio)}" for k, ratio in time["ratios"].items()),
    }


def _actionflow(result: Result) -> Result:
    devices = list(result["devices"].values())
    parts = [(mode, part) for mode, parts in devices[0]["breakdown"].items() for part in parts]
    return {
        **{
            part: [{**rows[0], "of": list(rows)} for rows in zip(*(device[part] for device in devices), strict=True)]
            for part in ("layouts", "depth", "lengths")
        },
        "breakdown": [
            {"part": f"{mode}: {part}", "of": [_share(device["breakdown"][mode], part) for device in devices]}
            for mode, part in parts
        ],
    }


def _share(times: Mapping[str, float], part: str) -> Result:
    return {"seconds": times[part], "share": times[part] / sum(times.values())}


VIEWS = views(
    _emulation,
    _speculation,
    _spec_vla,
    _head_recipes,
    _one_pass_drafts,
    _acceptance_rules,
    _lvspec,
    _fly,
    _actionflow,
)
