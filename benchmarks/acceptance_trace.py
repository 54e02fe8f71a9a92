# SPDX-License-Identifier: Apache-2.0
"""Trace-driven acceptance: random weights accept almost nothing, so accept lengths come from a named source."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import torch

from specvla_ros import Engine, UserError
from specvla_ros.lab.planning.limits import SPEC_VLA_RELAXED, AcceptanceLengths, spec_vla_relaxed
from specvla_ros.speculation.settings import NO_HEAD, AcceptanceSettings, DraftSettings, adjusted
from specvla_ros.speculation.tree import Tree

TRACE_HELP = (
    f"Source of the accept lengths: a LIBERO suite of Spec-VLA's table 2 ({', '.join(SPEC_VLA_RELAXED)}), or "
    "chunks:POLICY for a policy of benchmarks/results/draft_nodes.json with trees of the same size, drafted from the "
    "previous answer."
)
# Accepts every action token, so only a tree's depth decides. The acceptance kernel supports this rule.
ANYTHING = AcceptanceSettings("bin_distance", bins=(254,), gripper_bins=254)
_CHUNKS = Path(__file__).parent / "results" / "draft_nodes.json"
_DECK = 200


def trace_lengths(name: str, nodes: int) -> AcceptanceLengths:
    """Returns the accept lengths of a trace.

    Traces of chunks were recorded by tree size, including the root.

    Raises:
        UserError: The name is unknown, or nothing was recorded with this tree size.
    """
    source, _, row = name.partition(":")
    return _of_chunks(row, nodes) if source == "chunks" else spec_vla_relaxed(name)


def _of_chunks(policy: str, nodes: int) -> AcceptanceLengths:
    """Accept lengths for a policy of chunks, whose recording holds forwards only."""
    policies = json.loads(_CHUNKS.read_text(encoding="utf-8"))["policies"]
    if policy not in policies:
        raise UserError(f"{_CHUNKS.name} has no policy '{policy}'; it has: {', '.join(policies)}")
    found, rows = policies[policy], policies[policy]["nodes"]
    if str(nodes) not in rows:
        raise UserError(f"for '{policy}', {_CHUNKS.name} has trees of {', '.join(rows)} nodes, not of {nodes}")
    tokens, forwards = (row["forwards_per_action"] for row in (found["plain"], rows[str(nodes)]))
    return lengths_for(
        f"recorded from the policy '{policy}', drafted from the previous answer, strict", tokens, forwards
    )


def lengths_for(name: str, tokens: float, forwards: float) -> AcceptanceLengths:
    """Returns two neighbouring accept lengths with which answers of `tokens` tokens take `forwards` forwards.

    Every forward verifies, including the prompt's.
    """
    for hundredths in itertools.count():
        shorter, rest = divmod(hundredths, 100)
        lengths = AcceptanceLengths(name, (0.0,) * shorter + (1 - rest / 100, rest / 100))
        if lengths.verifications(round(tokens)) <= forwards:
            return lengths
    raise AssertionError("some length accepts everything")


def trace_drafts(name: str, nodes: int) -> DraftSettings:
    """Returns the drafter for a trace-driven run: the draft head, or the previous answer."""
    settings = DraftSettings(nodes=nodes)
    return adjusted(settings, head=NO_HEAD, temporal=True) if name.startswith("chunks:") else settings


class Trace:
    """Cuts drafted trees to a trace's depths; the remaining nodes are accepted under `ANYTHING`.

    The trace is a shuffled deck of the distribution's quantiles, dealt repeatedly. Each pass has the exact mean, so
    that short runs and different modes get the same lengths.
    """

    def __init__(self, lengths: AcceptanceLengths) -> None:
        self._deck = [lengths.accepted((card + 0.5) / _DECK) for card in range(_DECK)]
        random.Random(0).shuffle(self._deck)
        self._dealt = 0

    def cut(self, tree: Tree) -> Tree:
        """Marks a tree's deeper nodes as padding: they cost the same but are never accepted.

        All other nodes are accepted, including strict drafts, because the choice of random weights depends on rounding.
        """
        if not tree.depth:
            return tree
        length = self._deck[self._dealt % _DECK]
        self._dealt += 1
        valid = tree.valid & (tree.ancestry.depths <= length)
        return replace(tree, valid=valid, relaxable=torch.ones_like(tree.relaxable))

    def follow(self, engine: Engine) -> None:
        """Cuts all further drafts of an engine."""
        drafter = engine.drafter  # settings cannot select a trace
        draft, draft_prompt = drafter.draft, drafter.draft_prompt
        drafter.draft = lambda inputs: [self.cut(tree) for tree in draft(inputs)]  # type: ignore[method-assign]
        drafter.draft_prompt = lambda prompt: self.cut(draft_prompt(prompt))  # type: ignore[method-assign]


def describe(lengths: AcceptanceLengths) -> dict[str, object]:
    """Describes the trace for a result."""
    return {
        "kind": "trace-driven: random weights accept nothing, so each tree is accepted to the trace's next length",
        "name": lengths.name,
        "mean_accepted": lengths.mean,
        "share_by_accept_length": list(lengths.probabilities),
    }
