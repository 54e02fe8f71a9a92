# SPDX-License-Identifier: Apache-2.0
"""A drafter whose trees hypothesis draws."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from specvla_kernels.layout import Ancestry
from specvla_ros.speculation.drafters.registry import DraftInput, DraftWork, FinishedAnswer
from specvla_ros.speculation.tree import Tree


class Scripted:
    """Drafts trees of any shape around what a plain decoder said, right, nearly right or wrong."""

    sources = ("script",)
    work = DraftWork()

    def __init__(self, data: st.DataObject, answer: Sequence[int], *, low: int, high: int) -> None:
        self._data = data
        self._answer = answer
        self._low, self._high = low, high

    def draft(self, inputs: Sequence[DraftInput]) -> list[Tree]:
        return [self._tree(each.root, len(each.answer), each.max_depth) for each in inputs]

    def draft_prompt(self, prompt: DraftInput) -> Tree:
        return self._tree(torch.zeros((), dtype=torch.int64), 0, prompt.max_depth)

    def _tree(self, root: torch.Tensor, place: int, levels: int) -> Tree:
        draw = self._data.draw
        parents, depths, tokens, valid = [-1], [0], [int(root)], [True]
        for _ in range(draw(st.integers(0, 12)) if levels else 0):
            parent = draw(st.sampled_from([i for i, depth in enumerate(depths) if depth < levels]))
            at = place + depths[parent]
            right = self._answer[at] if at < len(self._answer) else self._low
            off = draw(st.sampled_from([0, 0, 0, 1, -1, 3, -8]))
            tokens.append(max(self._low, min(self._high, right + off)))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            valid.append(draw(st.integers(0, 9)) > 0)
        log_probs = torch.tensor([0.0, *(draw(st.floats(-5, 0)) for _ in tokens[1:])])
        ancestry = Ancestry.from_parents(parents)
        relaxable = torch.tensor([draw(st.integers(0, 4)) > 0 for _ in tokens])
        return Tree(torch.tensor(tokens), ancestry, log_probs, torch.tensor(valid), relaxable, depth=max(depths))

    def observe(self, answer: FinishedAnswer) -> None:
        pass

    def forget(self, stream: str | None = None) -> None:
        pass

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        pass
