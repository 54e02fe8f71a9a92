# SPDX-License-Identifier: Apache-2.0
"""Rules change between frames: what is in flight ends under the rule that it began with."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.draft_heads import policy_with_random_head
from support.nightly import examples
from support.pipelines import PICTURES, frame, plain_tokens, poisoned
from torch import Tensor

from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import Target
from specvla_ros.speculation.accept import Acceptance, Verification
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

TREE = adjusted(DraftSettings(nodes=8, top_k=3, depth=3), temporal=True)
LVSPEC = adjusted(AcceptanceSettings("lvspec"), lvspec_loose_share=1.0)
RULES = {
    "strict": AcceptanceSettings(),
    "bin_distance": AcceptanceSettings("bin_distance", bins=(254,)),
    "fly": adjusted(AcceptanceSettings("fly"), fly_theta=0.0, fly_window=1),
    "lvspec": LVSPEC,
    "composite": AcceptanceSettings("composite", bins=(254,)),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=5, hidden_size=64, layers=2)


@pytest.fixture(scope="module")
def plain(policy: Target):
    return plain_tokens(policy)


@pytest.mark.parametrize("ticks", range(1, 6))
def test_a_rule_that_looks_at_the_image_may_be_set_at_any_moment(policy: Target, plain, ticks: int) -> None:
    """In the midst of a prompt its image's rows are gone in part, and after it all of them."""
    engine = poisoned(policy, EngineSettings("specpipe", prefill_chunks=3, draft=TREE))
    engine.submit(frame(1, 1))
    ended: list[Outcome] = []
    for _ in range(ticks):
        ended += engine.tick()
    engine.set_acceptance(LVSPEC)
    while engine.busy:
        ended += engine.tick()
    later = engine.act(frame(2, 2))
    assert all(isinstance(each, Action) for each in (*ended, later)), (ended, later)
    (first,) = ended
    assert isinstance(first, Action) and isinstance(later, Action)
    assert first.tokens == plain(1) and first.record.acceptance == "strict"
    assert later.tokens != plain(2) and later.record.acceptance == "lvspec", "everything is loose"


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.sampled_from(["frame", "tick", "tick", *RULES]), max_size=40),
    pictures=st.lists(st.integers(0, PICTURES - 1), min_size=40, max_size=40),
    chunks=st.integers(1, 3),
)
def test_requests_of_several_rules_share_a_forward_and_each_keeps_its_own(
    policy: Target, plain, steps: list[str], pictures: list[int], chunks: int
) -> None:
    # No draft of an earlier answer: what a frame accepts then depends on its own picture alone.
    draft = adjusted(TREE, temporal=False)
    chosen = EngineSettings("specpipe", prefill_chunks=chunks, in_order=True, draft=draft)
    engine = poisoned(policy, chosen)
    ended: list[Outcome] = []
    for stamp, (step, picture) in enumerate(zip(steps, pictures, strict=False), start=1):
        if step in RULES:
            engine.set_acceptance(RULES[step])
        elif step == "frame":
            engine.submit(frame(stamp, picture))
        else:
            ended += engine.tick()
    while engine.busy:
        ended += engine.tick()
    for action in ended:
        assert isinstance(action, Action), action
        picture = pictures[action.observation.stamp_ns - 1]
        assert action.tokens == alone(policy, RULES[action.record.acceptance], draft, picture, chunks)
        if action.record.acceptance == "strict":
            assert action.tokens == plain(picture)


def alone(
    policy: Target, acceptance: AcceptanceSettings, draft: DraftSettings, picture: int, chunks: int
) -> tuple[int, ...]:
    settings = EngineSettings("specpipe", prefill_chunks=chunks, draft=draft, acceptance=acceptance)
    action = Engine(policy, settings).act(frame(1, picture))
    assert isinstance(action, Action)
    return action.tokens


@dataclass
class Watching:
    """Strict, and keeps what it is shown."""

    needs_hidden: bool = True
    needs_visual: bool = True
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def accept(self, verification: Verification) -> Acceptance:
        assert verification.hidden is not None and verification.visual is not None
        self.seen.append((verification.hidden, verification.visual))
        return Strict().accept(verification)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_a_rule_is_shown_the_images_rows_and_no_others(policy: Target, chunks: int) -> None:
    engine = poisoned(policy, EngineSettings("specpipe", prefill_chunks=chunks, draft=TREE))
    watching = Watching()
    engine.verifier.rule = watching
    observation = frame(1, 1)
    assert isinstance(engine.act(observation), Action)

    layout = policy.prompt_layout(observation)
    prompt = policy.prompt_embeddings(observation, layout.ids)
    cache = new_cache(policy.decoder, slots=1, slot_rows=len(prompt))
    hidden = packed_forward(policy.decoder, [Segment(0, 0, prompt)], cache).hidden
    image = hidden[1 : 1 + policy.image_tokens]  # after BOS
    assert watching.seen
    for _, visual in watching.seen:
        torch.testing.assert_close(visual[0], image, atol=1e-6, rtol=1e-5)
    first, _ = watching.seen[0]
    torch.testing.assert_close(first[0, 0], hidden[-1], atol=1e-6, rtol=1e-5)  # the root is the prompt's last row


def test_the_last_action_is_never_relaxed_towards(policy: Target, plain) -> None:
    """Accepted because it is near, an action would be repeated for ever: it is a draft for exact acceptance alone."""
    draft = adjusted(DraftSettings(head="none"), temporal=True)
    anything = AcceptanceSettings("bin_distance", bins=(254,), gripper_bins=254)
    engine = poisoned(policy, EngineSettings("spec", draft=draft, acceptance=anything))
    for stamp in range(1, 8):
        action = engine.act(frame(stamp, stamp % PICTURES))
        assert isinstance(action, Action) and action.tokens == plain(stamp % PICTURES)
