# SPDX-License-Identifier: Apache-2.0
"""LVSpec with its two drafters in the engine: forward by forward what its equations say of dense forwards.

With one picture in the prompt, and with several pictures of different sizes whose rows have several RoPE positions.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.draft_heads import policy_with_random_head
from support.draft_models import FOLDER, with_model, write_draft_model
from support.lvspec_reading import plain_reading
from support.nightly import nightly_but
from support.pipelines import poisoned
from support.random_qwen_vl import SHAPES, add_vla0, write_qwen_vl
from torch import Tensor

from benchmarks.papers.text_target import TextCodec
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget
from specvla_ros.models.generation import GreedyRules
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout, Target
from specvla_ros.speculation.accept import Acceptance, AcceptanceRule, AcceptReason, Verification
from specvla_ros.speculation.rules.lvspec import LVSpec
from specvla_ros.speculation.rules.registry import make_rule

LONGEST_TEXT, LONGEST_PROMPT = 24, 400
FRAMES = 6
VLA0 = """
MODEL:
  QWEN: {horizon: 1, num_cam: 3, rgb_img_size: '112,84', tiled_rgb_imgs: false, add_vision_id: true,
         num_bins_actions: 500, history: 1, action_type: original}
DATALOADER:
  ROBOVERSE: {cfg_opts: 'IMAGE.crop_img:1.0:IMAGE.img_size:112'}
"""
DRAFTERS: dict[str, dict[str, Any]] = {
    "Std.-SD": dict(draft_model=FOLDER),
    "Self-SD": dict(draft_self_tokens=10),
    "Self-SD, by similarity": dict(draft_self_tokens=10, draft_self_keep="similarity"),
}


@pytest.fixture(
    scope="module", params=nightly_but(lambda pictures: pictures == "one picture", ["one picture", "three pictures"])
)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("writer")
    make = of_one_picture if request.param == "one picture" else of_three_pictures
    made = make(directory)
    write_draft_model(made, noise=0.3)
    return made


def of_one_picture(directory: Path) -> Target:
    return policy_with_random_head(directory, seed=3, hidden_size=64, layers=2, text=1.4)


def of_three_pictures(directory: Path) -> Target:
    """VLA-0's prompt; what it writes is taken for text, and hangs on what it sees."""
    add_vla0(write_qwen_vl(directory, SHAPES[1], seed=5), config=VLA0)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("model.") and "norm" in name:
            tensor.fill_(1.0)
        elif name.startswith("model.layers."):
            tensor *= 2.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    made = load_target(directory, device="cpu")
    assert isinstance(made, QwenVLTarget)
    made.model.to(torch.float64)
    codec = TextCodec(made.codec.end_ids, made.decoder.config.vocab_size)  # type: ignore[attr-defined]
    return replace(made, policy=replace(made.policy, codec=codec, generation=GreedyRules()))


@dataclass
class Watching:
    """A rule that keeps the chains it is shown."""

    rule: AcceptanceRule
    needs_hidden: bool = True
    needs_visual: bool = True
    chains: list[list[int]] = field(default_factory=list)

    def accept(self, verification: Verification) -> Acceptance:
        trees = verification.trees
        assert trees.parents.tolist() == [list(range(-1, trees.tokens.shape[1] - 1))] and trees.valid.all()
        self.chains.append(trees.tokens[0, 1:].tolist())
        return self.rule.accept(verification)


def frame(policy: Target, stamp_ns: int) -> Observation:
    generator = np.random.default_rng(stamp_ns)
    images = {name: generator.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in policy.cameras}
    return Observation(images, "put carrot on plate", stamp_ns)


def answers(policy: Target, settings: EngineSettings) -> list[tuple[Action, list[list[int]]]]:
    """The actions of some frames, each with the chains that its forwards verified."""
    engine = poisoned(policy, with_model(policy, replace(settings, max_text_tokens=LONGEST_PROMPT)))
    found = []
    for stamp in range(1, FRAMES + 1):
        watching = Watching(make_rule(settings.acceptance, engine.target))
        engine.verifier.rule = watching
        action = engine.act(frame(policy, stamp))
        if isinstance(action, Action):
            found.append((action, watching.chains))
    assert len(found) >= 3, "the random policy writes too much: choose another seed"
    return found


def dense(policy: Target, layout: PromptLayout, rows: Tensor) -> Tensor:
    """[n, hidden], last hidden states of a whole sequence in one forward."""
    cache = new_cache(policy.decoder, slots=1, slot_rows=len(rows))
    segment = Segment(0, 0, rows, positions=layout.positions_of(0, len(rows)))
    return packed_forward(policy.decoder, [segment], cache).hidden


def committed_by_equations(
    policy: Target, observation: Observation, chains: list[list[int]], rule: LVSpec
) -> list[list[int]]:
    """What each forward commits to, given what it was drafted."""
    layout = policy.prompt_layout(observation)
    prompt, image = policy.prompt_embeddings(observation, layout.ids), np.concatenate([*layout.visual_rows])
    assert len(image) == policy.image_tokens
    answer: list[int] = []
    commits: list[list[int]] = []
    for chain in chains:
        ids = torch.tensor([*answer, *chain], dtype=torch.int64)
        hidden = dense(policy, layout, torch.cat((prompt, policy.decoder.embed_tokens(ids))))
        before = len(prompt) + len(answer)
        target = policy.decoder.logits(hidden[before - 1 :]).argmax(dim=-1).tolist()
        states = hidden.numpy()
        commits.append(plain_reading(chain, target, states[before:], states[image], rule)[1])
        answer += commits[-1]
    return commits


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_forward_commits_what_the_equations_say(policy: Target, drafter: str) -> None:
    own = DRAFTERS[drafter]
    chosen = engine_settings_from(mode="spec", preset="lvspec-paper", max_reasoning_tokens=LONGEST_TEXT, **own)
    whys: set[AcceptReason] = set()
    drafted: list[int] = []
    for action, chains in answers(policy, chosen):
        commits = committed_by_equations(policy, action.observation, chains, LVSpec(0.7, 10, 63))
        record = action.record
        *whole, _ = record.tokens_per_forward  # the last is cut at the answer's end
        assert [len(each) for each in commits[:-1]] == whole
        said = [token for commit in commits for token in commit][: sum(record.tokens_per_forward)]
        assert tuple(said[-len(action.tokens) :]) == action.tokens
        drafted += map(len, chains)
        whys |= {AcceptReason(code) for code in record.why}
    assert max(drafted) == 10
    assert whys == {AcceptReason.TARGET, AcceptReason.EXACT, AcceptReason.IRRELEVANT, AcceptReason.SHIFTED}


@pytest.mark.parametrize("drafter", nightly_but(lambda drafter: drafter == next(iter(DRAFTERS)), DRAFTERS))
def test_with_nothing_loosened_it_is_plain_decoding(policy: Target, drafter: str) -> None:
    plain = EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT)
    strict = engine_settings_from(
        mode="spec",
        preset="lvspec-paper",
        max_reasoning_tokens=LONGEST_TEXT,
        acceptance_lvspec_loose_share=0.0,
        acceptance_lvspec_shift=0,
        **DRAFTERS[drafter],
    )
    ours, theirs = ([action.tokens for action, _ in answers(policy, each)] for each in (strict, plain))
    assert ours == theirs
