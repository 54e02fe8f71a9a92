# SPDX-License-Identifier: Apache-2.0
"""The engine commits, forward by forward, what the plain function commits."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.draft_heads import policy_with_random_head
from support.nightly import examples
from support.pipelines import PICTURES, frame, plain_tokens, poisoned

from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import Target
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.accept import AcceptReason
from specvla_ros.speculation.drafters.registry import Drafter, DraftInput
from specvla_ros.speculation.reference import Node, bin_distance, decode, strict
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted
from specvla_ros.speculation.tree import Tree

LENGTH, NODES = 7, 10
BINS = (40, 40, 3, 254, 0, 12, 90)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=5, hidden_size=64, layers=2)


@pytest.fixture(scope="module")
def plain(policy: Target):
    return plain_tokens(policy)


class Scribble(Drafter):
    """Trees around an answer, right or nearly so; the same for the same answer so far."""

    def __init__(self, seed: int, answer: Sequence[int], ids: ActionIds) -> None:
        self.seed, self.answer, self.ids = seed, answer, ids

    def nodes(self, answer: Sequence[int]) -> list[Node]:
        dice = random.Random(repr((self.seed, *answer)))
        depths, nodes = {-1: 0}, []
        for index in range(dice.randrange(NODES)):
            parent = dice.choice([node for node, depth in depths.items() if depth < LENGTH - len(answer) - 1] or [-1])
            position = len(answer) + depths[parent]
            token = self.answer[min(position, LENGTH - 1)] + dice.choice([0, 0, 0, 1, -2, 20, -60])
            log_prob = dice.choice([-0.5, -1.0, -2.0])
            nodes.append(Node(min(max(token, self.ids.first), self.ids.stop - 1), parent, log_prob))
            depths[index] = depths[parent] + 1
        return nodes if len(answer) < LENGTH - 1 else []

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Tree]:
        return [self.tree(request.root, request.answer) for request in inputs]

    def draft_prompt(self, prompt: DraftInput, nodes: int) -> Tree:
        return self.tree(torch.zeros(1), ())

    def tree(self, root: torch.Tensor, answer: Sequence[int]) -> Tree:
        nodes = self.nodes(answer)
        ancestry = Ancestry.from_parents([-1, *(node.parent + 1 for node in nodes)])
        yes = torch.ones(len(nodes) + 1, dtype=torch.bool)
        tokens = torch.tensor([int(root), *(node.token for node in nodes)])
        log_probs = torch.tensor([0.0, *(node.log_prob for node in nodes)])
        return Tree(tokens, ancestry, log_probs, yes, yes, depth=int(ancestry.depths.max()))


def forward(policy: Target, picture: int):
    """The target's choices on a tree, each time from the whole prompt and an empty cache."""
    observation = frame(1, picture)
    prompt = policy.prompt_embeddings(observation, policy.prompt_layout(observation).ids)

    def choices(answer: Sequence[int], nodes: Sequence[Node]) -> list[int]:
        chain = torch.cat((prompt, policy.decoder.embed_tokens(torch.tensor(answer, dtype=torch.int64))))
        segments = [Segment(0, 0, chain)]
        if nodes:
            ancestry = Ancestry.from_parents([node.parent for node in nodes])
            tokens = torch.tensor([node.token for node in nodes])
            segments.append(Segment(0, len(chain), tokens, ancestry, wanted=len(nodes)))
        cache = new_cache(policy.decoder, slots=1, slot_rows=len(chain) + NODES)
        return greedy_choice(packed_forward(policy.decoder, segments, cache).logits).tolist()

    return choices


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), picture=st.integers(0, PICTURES - 1), relaxed=st.booleans())
@torch.inference_mode()
def test_the_engine_commits_what_the_plain_function_commits(
    policy: Target, plain, seed: int, picture: int, relaxed: bool
) -> None:
    ids = policy.codec.action_ids
    drafter = Scribble(seed, plain(picture), ids)

    def bin_of(token: int) -> int | None:
        return min(ids.stop - 1 - token, ids.bins - 1) if ids.first <= token < ids.stop else None

    rule = bin_distance(BINS, bin_of) if relaxed else strict
    commits = decode(drafter.nodes, forward(policy, picture), rule, LENGTH)

    acceptance = AcceptanceSettings("bin_distance", bins=BINS) if relaxed else AcceptanceSettings()
    draft = adjusted(DraftSettings(nodes=NODES), temporal=True)
    engine = poisoned(policy, EngineSettings("spec", draft=draft, acceptance=acceptance))
    engine.drafter.by_name = {"scribble": drafter}
    action = engine.act(frame(1, picture))
    assert isinstance(action, Action)
    assert action.record.tokens_per_forward == tuple(map(len, commits))
    assert action.tokens == tuple(token for tokens in commits for token in tokens)
    if not relaxed:
        assert action.tokens == plain(picture)


def test_without_a_draft_it_is_plain_decoding(policy: Target, plain) -> None:
    with torch.inference_mode():
        commits = decode(lambda answer: (), forward(policy, 1), strict, LENGTH)
    assert commits == [[token] for token in plain(1)]


def test_the_targets_own_choice_is_at_no_distance_and_nothing_else_is_taken_strictly() -> None:
    assert strict(5, 5, 0) == 0 and strict(5, 6, 0) is None
    rule = bin_distance((9,), lambda token: token if token < 100 else None)
    assert [rule(one, other, 0) for one, other in ((50, 50), (50, 59), (50, 60), (100, 100), (100, 50))] == [
        0, 9, None, 0, None,
    ]  # fmt: skip


def test_each_reason_has_a_number_of_its_own() -> None:
    """Messages and recordings hold the numbers."""
    names = ["TARGET", "EXACT", "NEAR", "DEFERRED", "IRRELEVANT", "SHIFTED", "REJECTED"]
    assert [(reason.name, reason.value) for reason in AcceptReason] == list(zip(names, range(7), strict=True))


def test_a_root_is_a_tree_of_one_node() -> None:
    root = Tree.from_root(torch.tensor(3))
    columns = (root.tokens, root.ancestry.parents, root.ancestry.depths, root.log_probs, root.valid, root.relaxable)
    assert [each.shape for each in columns] == [(1,)] * len(columns)


def test_ties_go_to_the_nearest_then_to_the_likelier_then_to_the_first() -> None:
    def nodes(*drafted: tuple[int, float]) -> list[list[int]]:
        tree = [Node(token, -1, log_prob) for token, log_prob in drafted]
        rule = bin_distance((9, 9), lambda token: token)
        return decode(lambda answer: tree, lambda answer, nodes: [50] * (len(nodes) + 1), rule, 2)

    assert nodes((52, -0.1), (51, -3.0)) == [[51, 50]]
    assert nodes((51, -3.0), (49, -0.1)) == [[49, 50]]
    assert nodes((51, -0.1), (49, -0.1)) == [[51, 50]]
