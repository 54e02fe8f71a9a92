# SPDX-License-Identifier: Apache-2.0
"""LVSpec (arXiv 2604.05650) with its drafters, baselines and sweeps, on a policy that writes text before it acts.

python -m benchmarks.speculation.text_policy --out text-policy
python -m benchmarks.speculation.text_policy --layers 2 --out text-2
python -m benchmarks.speculation.text_policy --layers 1 --out text-1
python -m benchmarks.papers.lvspec --text-policy text-policy --draft-policies text-2,text-1 --episodes 20 --workers 2

The paper's Self-SD: the policy drafts a chain for itself with a tenth of the image's tokens, evenly spaced. Std.-SD: a
smaller model of its family drafts. All rows have the same starts. Success at the simulated table is the judge.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness import Out, Seed, Work, Workers, finish, of_weights, result_head, show_progress
from benchmarks.papers.lvspec_baselines import EmbeddingRelevance, RandomRelaxation
from benchmarks.results_page import RESULTS, weights_digest
from benchmarks.speculation.acceptance_rules import rule_row
from benchmarks.speculation.text_policy import LONGEST_TEXT
from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.compare import Setting, SweepRow, sweep
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, policy_of
from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.models.target import Target
from specvla_ros.speculation.accept import Acceptance, AcceptanceRule, Verification
from specvla_ros.speculation.rules.registry import RuleContext, rule
from specvla_ros.speculation.settings import AcceptanceSettings, adjusted

K = 10  # drafted tokens, section 4
_FLY = dict(fly_window=4, fly_theta=0.2)  # appendix C: W for this K, theta as for all models except Qwen2.5-VL-32B
_TIMED_FRAMES = 16


@rule("random", settings=RandomRelaxation)
def _random(context: RuleContext) -> RandomRelaxation:
    made: RandomRelaxation = context.own("random")
    return made


@rule("lvspec_embeddings")
def _embeddings(context: RuleContext) -> EmbeddingRelevance:
    return EmbeddingRelevance.of_target(context.own("lvspec"), context.target)


PRESET: dict[str, Any] = dict(mode="spec", preset="lvspec-paper", max_reasoning_tokens=LONGEST_TEXT)
PAPER = engine_settings_from(**PRESET, draft_self_tokens=K)


def loosened(name: str, **values: Any) -> Setting:
    """Returns LVSpec with changed parameters."""
    return Setting(name, replace(PAPER, acceptance=adjusted(PAPER.acceptance, **values)))


def drafted(name: str, acceptance: AcceptanceSettings, **values: Any) -> Setting:
    """Returns a setting with another rule and changed drafter parameters."""
    return Setting(name, replace(PAPER, acceptance=acceptance, draft=adjusted(PAPER.draft, **values)))


def by_lot(share: float) -> Setting:
    """Returns random relaxation with LVSpec's share of loose tokens."""
    name = f"random relaxation, {share:g}"
    return drafted(name, adjusted(AcceptanceSettings("random"), **{"random.share": share}))


def by_embeddings() -> Setting:
    """Returns LVSpec with the relevance from token and image embeddings and LVSpec's own parameters."""
    unshifted = adjusted(PAPER.acceptance, lvspec_shift=0)
    return Setting(
        "by embeddings, without shift", replace(PAPER, acceptance=replace(unshifted, rule="lvspec_embeddings"))
    )


def by_smaller(directory: Path) -> list[Setting]:
    """Returns settings with a smaller policy of the family as the draft model, strict and with LVSpec."""
    layers = read_checkpoint_json(directory / "config.json").inner("text_config").whole("num_hidden_layers")
    drafts = engine_settings_from(**PRESET, draft_model=str(directory), draft_model_tokens=K)
    name = f"{layers}-layer draft model"
    return [Setting(f"naive SD, {name}", replace(drafts, acceptance=STRICT)), Setting(f"LVSpec, {name}", drafts)]


LVSPEC = Setting("LVSpec", PAPER)
NO_SHIFT = loosened("LVSpec without shift", lvspec_shift=0)
STRICT, FLY = AcceptanceSettings(), adjusted(AcceptanceSettings("fly"), **_FLY)
# Settings by table; a setting in several tables runs once. The paper's tables 2, 3 and 6 are without the shift.
TABLES = {
    "LVSpec and its baselines (the paper's tables 1 and 2, figure 7)": [
        Setting("plain", replace(PAPER, mode="ar", acceptance=STRICT)),
        drafted("naive SD", STRICT, self_image_share=1.0),
        drafted("SpecVLM", STRICT),
        drafted("SpecVLM, tokens by similarity", STRICT, self_keep="similarity"),
        drafted("FLy", FLY),
        drafted("FLy without window", adjusted(FLY, fly_window=0)),
        *(by_lot(share) for share in (0.2, 0.5, 0.7)),
        NO_SHIFT,
        LVSPEC,
    ],
    "The loose share λ, without shift (the paper's table 3)": [
        *(loosened(f"lambda {share:g}", lvspec_shift=0, lvspec_loose_share=share) for share in (0.0, 0.2, 0.5)),
        NO_SHIFT,
        loosened("lambda 0.9", lvspec_shift=0, lvspec_loose_share=0.9),
    ],
    "N, the image's tokens that a relevance is averaged over, without shift (the paper's table 3)": [
        *(loosened(f"N {n}", lvspec_shift=0, lvspec_top_n=n) for n in (1, 5)),
        NO_SHIFT,
        loosened("N 100", lvspec_shift=0, lvspec_top_n=100),
    ],
    "Relevance from embeddings (the paper's table 6)": [NO_SHIFT, by_embeddings()],
    "K, drafted tokens": [
        *(drafted(f"K {k}", PAPER.acceptance, self_tokens=k, nodes=1 + k) for k in (2, 5)),
        LVSPEC,
        drafted("K 20", PAPER.acceptance, self_tokens=20, nodes=21),
    ],
}
SIZES = "Sizes of the draft model (the paper's Std.-SD and appendix D)"


def main(
    context: typer.Context,
    episodes: Annotated[int, typer.Option(help="Episodes per task.", min=1)] = 20,
    seed: Seed = 0,
    workers: Workers = 2,
    text_policy: Annotated[Path, typer.Option(help="Directory of the text policy.")] = Path("text-policy"),
    draft_policies: Annotated[str, typer.Option(help="Directories of smaller policies, comma-separated.")] = "",
    work: Work = Path("lvspec-benchmark"),
    out: Out = RESULTS / "lvspec.json",
) -> None:
    """Runs the missing episodes with every setting."""
    base = SimulateSettings(text_policy, engine=EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT))
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    smaller = [setting for name in draft_policies.split(",") if name for setting in by_smaller(Path(name))]
    tables = TABLES | ({SIZES: [LVSPEC, *smaller]} if smaller else {})
    settings = {setting.name: setting for rows in tables.values() for setting in rows}
    rows = sweep(base, list(settings.values()), plan, work, show_progress)
    policy = policy_of(base)
    frames = list(islice(simulation_source(policy, seed, engine=base.engine), _TIMED_FRAMES))
    found = {
        "text_policy": _described(policy, text_policy),
        "tables": {title: [setting.name for setting in shown] for title, shown in tables.items()},
        "rows": [_row(row, policy, frames) for row in rows],
    }
    finish(result_head(context) | of_weights(nano_policy()) | found, out)


def _described(policy: Target, directory: Path) -> dict[str, Any]:
    """Description of the measured policy."""
    card = json.loads((directory / "card.json").read_text(encoding="utf-8"))
    return {key: card[key] for key in ("command", "longest_answer", "held_out_token_accuracy")} | {
        "weights": weights_digest(directory),
        "parameters": policy.describe()["parameters"],
        "image_tokens": policy.image_tokens,
    }


def _row(row: SweepRow, policy: Target, frames: Sequence[Observation]) -> dict[str, Any]:
    settings = row.setting.engine
    share = rule_share(policy, settings, frames) if settings.mode == "spec" else None
    return rule_row(row) | {"rule_share_of_tick": share}


@dataclass
class RuleClock:
    """Wraps a rule and times its decisions in seconds."""

    rule: AcceptanceRule
    seconds: float = 0.0

    @property
    def needs_hidden(self) -> bool:
        return self.rule.needs_hidden

    @property
    def needs_visual(self) -> bool:
        return self.rule.needs_visual

    def accept(self, verification: Verification) -> Acceptance:
        """Calls the rule and times it; on a CPU the work is finished on return."""
        started = time.perf_counter()
        accepted = self.rule.accept(verification)
        self.seconds += time.perf_counter() - started
        return accepted


def rule_share(policy: Target, settings: EngineSettings, frames: Sequence[Observation]) -> float:
    """Returns the rule's share of a frame's ticks, including vision and drafting: median over frames, on a CPU."""
    engine = Engine(policy, settings)
    engine.warm_up()
    clock = RuleClock(engine.verifier.rule)
    engine.verifier.rule = clock
    shares = []
    for stamp, frame in enumerate(frames, start=1):
        clock.seconds, started = 0.0, time.perf_counter()
        engine.act(replace(frame, stamp_ns=stamp))
        shares.append(clock.seconds / (time.perf_counter() - started))
    return median(shares)


if __name__ == "__main__":
    typer.run(main)
