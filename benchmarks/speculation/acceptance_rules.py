# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules side by side: on the nano policy's actions, and on a policy that writes text before it acts.

python -m benchmarks.speculation.text_policy --out text-policy
python -m benchmarks.speculation.acceptance_rules --text-policy text-policy --workers 2

Agreement is the share of the committed tokens that are the target's own choice for the same prefix.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import Out, Seed, Work, Workers, finish, of_weights, result_head, show_progress
from benchmarks.results_page import RESULTS
from benchmarks.speculation.text_policy import LONGEST_TEXT
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.compare import Setting, SweepRow, sweep
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings
from specvla_ros.speculation.accept import AcceptReason
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

METRES, RADIANS = 0.002, 0.02
_NEAR = AcceptanceSettings("bin_distance", tolerance_m=METRES, tolerance_rad=RADIANS)
_RULES = {
    "strict": AcceptanceSettings(),
    "bin_distance": _NEAR,
    "fly": AcceptanceSettings("fly"),
    "fly, theta 0.15": adjusted(AcceptanceSettings("fly"), fly_theta=0.15),
    "lvspec, share 0.1": adjusted(AcceptanceSettings("lvspec"), lvspec_loose_share=0.1),
    "lvspec": AcceptanceSettings("lvspec"),
    "composite": replace(_NEAR, rule="composite"),
}
_LOOSE = ("fly", "lvspec", "composite")


def nano_settings() -> list[Setting]:
    """Returns settings for actions alone, with the shipped draft head."""
    spec = EngineSettings("spec", draft=DraftSettings(nodes=16))
    rules = [Setting(name, replace(spec, acceptance=rule)) for name, rule in _RULES.items() if name != "composite"]
    return [Setting("ar", EngineSettings("ar")), *rules]


def text_settings() -> list[Setting]:
    """Returns settings for text and actions, drafted by prompt lookup and from the previous answer, without a head."""
    plain = EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT)
    lookup = adjusted(DraftSettings(nodes=16), prompt_lookup_tokens=8)
    both = adjusted(lookup, nodes=48, temporal=True)
    spec = replace(plain, mode="spec")
    return [
        Setting("ar", plain),
        Setting("strict, lookup", replace(spec, draft=lookup)),
        *(Setting(f"{name}, lookup", replace(spec, draft=lookup, acceptance=_RULES[name])) for name in _LOOSE),
        Setting("strict, lookup and answer before", replace(spec, draft=both)),
        *(
            Setting(f"{name}, lookup and answer before", replace(spec, draft=both, acceptance=_RULES[name]))
            for name in _LOOSE
        ),
    ]


def main(
    context: typer.Context,
    episodes: Annotated[int, typer.Option(help="Episodes per task; a third of them for the text policy.", min=1)] = 60,
    seed: Seed = 0,
    workers: Workers = 2,
    text_policy: Annotated[Path, typer.Option(help="Directory of the text policy.")] = Path("text-policy"),
    work: Work = Path("rules-benchmark"),
    out: Out = RESULTS / "acceptance_rules.json",
) -> None:
    """Runs the missing episodes with every rule."""
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    card = json.loads((text_policy / "card.json").read_text(encoding="utf-8"))
    nano = SimulateSettings(nano_policy())
    writer = SimulateSettings(text_policy, engine=EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT))
    text_plan = replace(plan, episodes=max(1, episodes // 3))
    found = {
        "tolerance": {"metres": METRES, "radians": RADIANS},
        "nano": [rule_row(row) for row in sweep(nano, nano_settings(), plan, work / "nano", show_progress)],
        "text_policy": {key: card[key] for key in ("command", "longest_answer", "held_out_token_accuracy")},
        "text": [rule_row(row) for row in sweep(writer, text_settings(), text_plan, work / "text", show_progress)],
    }
    finish(result_head(context) | of_weights(nano_policy()) | found, out)


def rule_row(row: SweepRow) -> dict[str, Any]:
    """Returns a setting's figures with agreement, tokens by reason of acceptance, and frames without an action."""
    tally = row.summary.decode
    tokens = tally.bins_off.total()
    exact = sum(count for (_, off), count in tally.bins_off.items() if off == 0)
    return row.as_json() | {
        "agreement": exact / tokens if tokens else 0.0,
        "tokens_per_action": tokens / tally.actions if tally.actions else 0.0,
        "why": {AcceptReason(code).name.lower(): count / tokens for code, count in sorted(tally.why.items())},
        "drops": row.summary.drops,
    }


if __name__ == "__main__":
    typer.run(main)
