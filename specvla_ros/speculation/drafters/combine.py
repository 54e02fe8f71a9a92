# SPDX-License-Identifier: Apache-2.0
"""All drafters together: one tree per request."""

from collections.abc import Sequence
from functools import reduce

import torch

from specvla_kernels.graph_capture import Captures
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.target import Target
from specvla_ros.speculation.drafters.registry import (
    DraftContext,
    Drafter,
    DraftInput,
    DraftPrompt,
    DraftWork,
    FinishedAnswer,
)
from specvla_ros.speculation.settings import DRAFT_FOLDER, DRAFTERS, DraftSettings
from specvla_ros.speculation.tree import Tree


class Drafters:
    """Grows the tree that a request's next forward verifies, with all drafters.

    Args:
        settings: None: nothing is drafted, as plain decoding wants it.
        slot_rows: maximum of committed rows of a slot.
        chunk_step_s: seconds that one action of a chunk takes; 0: unknown.

    Attributes:
        by_name: the drafters that the settings ask for, in the order in which they take nodes.

    Raises:
        UserError: nothing to draft with, or a drafter does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        settings: DraftSettings | None,
        *,
        codec: Codec,
        slots: int,
        slot_rows: int,
        chunk_step_s: float,
    ) -> None:
        self.by_name: dict[str, Drafter] = {}
        self._prompt_end = Tree.from_root(torch.zeros(1, dtype=torch.int64, device=target.decoder.device))
        self._nodes = settings.nodes if settings is not None else 1
        if settings is None:
            return
        context = DraftContext(settings, target, slots, slot_rows, chunk_step_s, codec)
        made = {name: entry.make(context) for name, entry in DRAFTERS.entries().items()}
        self.by_name = {name: drafter for name, drafter in made.items() if drafter is not None}
        if not self.by_name:
            raise UserError(
                f"decode.mode spec has nothing to draft with: {target.directory / DRAFT_FOLDER} is not there; set "
                "draft.head to a draft head's directory (specvla train-draft makes one), or draft.model to that of a "
                "smaller policy, or draft.temporal to true; a policy that writes text may also draft for itself "
                "(draft.self_tokens)"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    @property
    def work(self) -> DraftWork:
        """Forwards for drafting so far."""
        return sum((drafter.work for drafter in self.by_name.values()), start=DraftWork())

    def draft(self, inputs: Sequence[DraftInput]) -> list[Tree]:
        """One tree per request, of at most `draft.nodes` nodes."""
        left = [self._nodes] * len(inputs)
        trees = [[Tree.from_root(request.root)] for request in inputs]
        for i, drafter in enumerate(self.by_name.values(), start=1):
            drafted = drafter.draft(inputs, left, last=i == len(self.by_name))
            for mine, tree in zip(trees, drafted, strict=True):
                mine.append(tree)
            left = [nodes - len(tree) + 1 for nodes, tree in zip(left, drafted, strict=True)]
        return [_joined(mine) for mine in trees]

    def draft_prompt(self, prompt: DraftPrompt) -> Tree:
        """The tree that a prompt's own forward may verify."""
        left = self._nodes
        trees = [self._prompt_end]
        for drafter in self.by_name.values():
            tree = drafter.draft_prompt(prompt, self._prompt_end.tokens, left)
            if tree is not None:
                trees.append(tree)
                left -= len(tree) - 1
        return _joined(trees)

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        for drafter in self.by_name.values():
            drafter.set_tolerance(bins)

    def observe(self, answer: FinishedAnswer) -> None:
        for drafter in self.by_name.values():
            drafter.observe(answer)

    def forget(self, stream: str | None = None) -> None:
        for drafter in self.by_name.values():
            drafter.forget(stream)

    def capture(self, captures: Captures) -> None:
        for drafter in self.by_name.values():
            drafter.capture(captures)

    def release(self) -> None:
        for drafter in self.by_name.values():
            drafter.release()


def _joined(trees: Sequence[Tree]) -> Tree:
    """One tree of all; those that know probabilities come last in the drafters' order, and first here."""
    return reduce(Tree.joined_with, reversed(trees))
