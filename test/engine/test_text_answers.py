# SPDX-License-Identifier: Apache-2.0
"""Policies that write text before they act: every drafter and rule on a random model, held against plain decoding."""

import numpy as np
import pytest
from support.checkpoints import bins_of
from support.draft_heads import policy_with_random_head
from support.draft_models import FOLDER, with_model, write_draft_model
from support.nightly import nightly_but

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.accept import AcceptReason
from specvla_ros.speculation.drafters.chains import ChainDecoder
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

LONGEST_TEXT = 24
FRAMES = 10
DRAFTS = {
    "head": DraftSettings(),
    "lookup": adjusted(DraftSettings(nodes=9), prompt_lookup_tokens=8, temporal=True),
    "self": adjusted(DraftSettings(nodes=7), self_tokens=4),
    "self, by similarity": adjusted(DraftSettings(nodes=7), self_tokens=4, self_keep="similarity"),
    "model": adjusted(DraftSettings(head="none"), model=FOLDER, model_tokens=6),
    "model, looked up": adjusted(DraftSettings(head="none"), model=FOLDER, model_tokens=15, model_lookup_tokens=10),
    "all": adjusted(
        DraftSettings(nodes=24, children="window_mass"), prompt_lookup_tokens=6, temporal=True, self_tokens=3
    ),
}
# Words may differ where the target is unsure or the image does not matter; where they end, and numbers, may not.
BINS = 9
RULES = {
    "fly": adjusted(AcceptanceSettings("fly"), fly_theta=0.1, fly_window=1),
    "lvspec": adjusted(AcceptanceSettings("lvspec"), lvspec_loose_share=0.2, lvspec_top_n=4, lvspec_shift=2),
    "composite": adjusted(
        AcceptanceSettings("composite", bins=(BINS,), gripper_bins=BINS), fly_theta=0.1, fly_window=1
    ),
}


@pytest.fixture(scope="module", params=nightly_but(lambda seed: seed == 1, [1, 2]))
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    shape = dict(seed=request.param, hidden_size=64, layers=2, text=1.2)
    made = policy_with_random_head(tmp_path_factory.mktemp("writer"), **shape)
    write_draft_model(made, noise=0.05)
    return made


def outcomes(policy: OpenVLATarget, settings: EngineSettings) -> list[Outcome]:
    engine = Engine(policy, with_model(policy, settings))
    drafting = [getattr(each, "chains", None) for each in engine.drafter.by_name.values()]
    caches: list[KVCache | ChainDecoder] = [each for each in drafting if isinstance(each, ChainDecoder)]
    for cache in (engine.cache, *caches):
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    images = (np.random.default_rng(i).integers(0, 256, (48, 64, 3), dtype=np.uint8) for i in range(FRAMES))
    return [engine.act(Observation(image, "put carrot on plate", i + 1)) for i, image in enumerate(images)]


def essence(outcome: Outcome) -> tuple[object, ...]:
    if isinstance(outcome, Action):
        return outcome.tokens, sum(outcome.record.tokens_per_forward)
    return outcome.reason, outcome.detail


@pytest.mark.parametrize("draft", nightly_but(lambda draft: draft == "all", DRAFTS))
def test_strict_yields_the_plain_decoders_words_and_actions(policy: OpenVLATarget, draft: str) -> None:
    plain = outcomes(policy, EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT))
    spec = outcomes(policy, EngineSettings("spec", max_reasoning_tokens=LONGEST_TEXT, draft=DRAFTS[draft]))
    assert list(map(essence, spec)) == list(map(essence, plain))
    assert any(sum(each.record.accept_lengths) for each in spec if isinstance(each, Action)) or draft == "head"
    lengths = [sum(each.record.tokens_per_forward) for each in plain if isinstance(each, Action)]
    assert len(lengths) >= 3 and max(lengths) > 2, "the random policy writes nothing: choose another seed"


@pytest.mark.parametrize("rule", RULES)
def test_loose_rules_end_in_actions_and_say_why(policy: OpenVLATarget, rule: str) -> None:
    chosen = EngineSettings("spec", max_reasoning_tokens=LONGEST_TEXT, draft=DRAFTS["all"], acceptance=RULES[rule])
    found = [each for each in outcomes(policy, chosen) if isinstance(each, Action)]
    assert found
    ids = bins_of(policy).tokenizer
    for action in found:
        assert all(map(ids.is_action, action.tokens))
        record = action.record
        assert len(record.why) == len(record.bins_off) == sum(record.tokens_per_forward)
        if rule == "composite":
            words, acted = record.why[:-2], record.bins_off[-2:]
            assert set(words) <= {AcceptReason.TARGET, AcceptReason.EXACT, AcceptReason.DEFERRED, AcceptReason.NEAR}
            assert all(off <= BINS for off in acted)


def test_an_answer_that_was_given_before_takes_one_forward(policy: OpenVLATarget) -> None:
    draft = adjusted(DraftSettings(nodes=1 + LONGEST_TEXT + 2), temporal=True)
    engine = Engine(policy, EngineSettings("spec", max_reasoning_tokens=LONGEST_TEXT, draft=draft))
    for seed in range(FRAMES):
        image = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        first, second = (engine.act(Observation(image, "put carrot on plate", 2 * seed + i)) for i in (1, 2))
        assert essence(second) == essence(first)
        if isinstance(first, Action) and isinstance(second, Action):
            assert second.record.forwards == 1
