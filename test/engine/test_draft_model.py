# SPDX-License-Identifier: Apache-2.0
"""A draft model in the engine: what it costs, when it is right, and which one is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import edit_json, load_openvla, write_checkpoint
from support.draft_models import write_draft_model
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.drafters.model_drafter import ModelDrafter
from specvla_ros.speculation.settings import DraftSettings, adjusted

LONGEST_TEXT = 40


def load(directory: Path, **shape: float) -> OpenVLATarget:
    write_random_checkpoint(directory, **shape)  # type: ignore[arg-type]
    loaded = load_openvla(directory, device="cpu")
    loaded.model.to(torch.float64)
    loaded.decoder.lm_head.to(torch.float64)
    write_draft_model(loaded, noise=0.0)
    return loaded


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return load(tmp_path_factory.mktemp("actor"), seed=3, hidden_size=64, layers=2)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return load(tmp_path_factory.mktemp("writer"), seed=4, hidden_size=64, layers=2, text=1.4)


def engine_of(policy: OpenVLATarget, tokens: int, *, text: int = 0, lookup: int = 0) -> Engine:
    """A poisoned engine whose only source is a draft model that is the target once more."""
    model = dict(model=str(policy.directory / "model"), model_tokens=tokens, model_lookup_tokens=lookup)
    draft = adjusted(DraftSettings(nodes=64), **model)
    engine = Engine(policy, EngineSettings("spec", draft=draft, max_reasoning_tokens=text))
    (drafter,) = engine.drafter.by_name.values()
    assert engine.drafter.sources == ("model",) and isinstance(drafter, ModelDrafter)
    for cache in (engine.cache, drafter.chains):
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    return engine


def frame(stamp_ns: int) -> Observation:
    image = np.random.default_rng(stamp_ns).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns)


@pytest.mark.parametrize(("tokens", "committed"), [(1, (1, 2, 2, 2)), (2, (1, 3, 3)), (15, (1, 6)), (63, (1, 6))])
def test_the_target_itself_is_right_with_every_action_token(
    actor: OpenVLATarget, tokens: int, committed: tuple[int, ...]
) -> None:
    plain, spec = Engine(actor, EngineSettings("ar")), engine_of(actor, tokens)
    for stamp in range(1, 4):
        ours, theirs = spec.act(frame(stamp)), plain.act(frame(stamp))
        assert isinstance(ours, Action) and isinstance(theirs, Action)
        assert ours.tokens == theirs.tokens
        assert ours.record.tokens_per_forward == committed


@pytest.mark.parametrize("tokens", [4, 15, 25])
def test_the_target_itself_is_right_with_every_word(writer: OpenVLATarget, tokens: int) -> None:
    plain = Engine(writer, EngineSettings(max_reasoning_tokens=LONGEST_TEXT))
    spec = engine_of(writer, tokens, text=LONGEST_TEXT)
    whole = 0
    for stamp in range(1, 9):
        ours, theirs = spec.act(frame(stamp)), plain.act(frame(stamp))
        assert type(ours) is type(theirs)
        if isinstance(ours, Action) and isinstance(theirs, Action):
            assert ours.tokens == theirs.tokens
            assert sum(ours.record.tokens_per_forward) == theirs.record.forwards
            *before, _ = ours.record.accept_lengths  # the last is cut at the answer's end
            assert before == [nodes - 1 for nodes in ours.record.tree_nodes[:-1]]
            whole += before.count(tokens)
    assert whole, "the random policy writes too little: choose another seed"


def test_lookup_for_the_draft_model_changes_its_forwards_alone(writer: OpenVLATarget) -> None:
    found = []
    for lookup in (0, 10):
        engine = engine_of(writer, 15, text=LONGEST_TEXT, lookup=lookup)
        ended = [engine.act(frame(stamp)) for stamp in range(1, 5)]
        records = [
            (each.tokens, each.record.tokens_per_forward, each.record.tree_nodes)
            for each in ended
            if isinstance(each, Action)
        ]
        assert records, "the random policy writes too much: choose another seed"
        found.append((records, engine.drafter.work))
    (plain, without), (looked_up, with_lookup) = found
    assert looked_up == plain
    assert with_lookup.model_forwards < without.model_forwards


def test_a_tick_counts_the_draft_models_forwards_rows_and_images(actor: OpenVLATarget) -> None:
    engine = engine_of(actor, 3)
    engine.submit(frame(1))
    work = []
    while engine.busy:
        engine.tick()
        work.append(engine.last_work.drafting)
    rows = actor.image_tokens + len(actor.prompt.ids("put carrot on plate"))
    found = [(each.model_forwards, each.model_rows, each.model_images) for each in work]
    assert found == [(3, rows + 1 + 2, 1), (1, 2, 0), (0, 0, 0)]


def test_a_preset_of_a_chain_asks_for_a_draft_model(actor: OpenVLATarget) -> None:
    with pytest.raises(UserError, match=r"has no drafter: draft\.head is none; .*draft\.model"):
        Engine(actor, engine_settings_from(mode="spec", preset="fly-paper"))
    chosen = engine_settings_from(mode="spec", preset="fly-paper", draft_model=str(actor.directory / "model"))
    engine = Engine(actor, chosen)
    assert (engine.drafter.sources, engine.settings.preset_summary) == (("model",), "fly-paper")
    own = chosen.draft.drafters["model"]
    assert (own.tokens, own.lookup_tokens) == (15, 10)


def refused(policy: OpenVLATarget, directory: Path, message: str) -> None:
    draft = adjusted(DraftSettings(), model=str(directory))
    with pytest.raises(UserError, match=message):
        Engine(policy, EngineSettings("spec", draft=draft))


def test_another_vocabulary_is_refused(actor: OpenVLATarget, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "words")
    text = (other / "tokenizer.json").read_text()
    assert '"q": ' in text and '"z": ' in text
    swapped = text.replace('"q": ', '"?q": ').replace('"z": ', '"q": ').replace('"?q": ', '"z": ')
    (other / "tokenizer.json").write_text(swapped)
    refused(actor, other, r"cannot draft for .*: their tokenizers differ, e\.g\. 'q' is token \d+ and \d+$")
    wider = write_checkpoint(tmp_path / "wider")
    edit_json(wider / "config.json", lambda config: config.update(pad_to_multiple_of=32))
    refused(actor, wider, r"cannot draft for .*: its action tokens are \d+ to \d+ for 255 bins, but the policy's are")
    refused(actor, tmp_path / "nowhere", r"draft\.model: .*nowhere")


def test_a_model_with_too_few_positions_is_refused(actor: OpenVLATarget, tmp_path: Path) -> None:
    short = write_checkpoint(tmp_path / "short")
    edit_json(short / "config.json", lambda config: config["text_config"].update(max_position_embeddings=300))
    refused(actor, short, r"needs \d+ rows .* has 300 positions: lower decode\.max_text_tokens")
