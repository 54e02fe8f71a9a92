"""One request's share of a forward that has just run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_ros.drafting.draft_input import DraftInput
from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.engine.request import Request
from specvla_ros.engine.verify import Commit, ToVerify


@dataclass(frozen=True)
class Share:
    """One request's rows.

    Args:
        request: whose they are.
        hidden: [rows, hidden], last hidden states of all its rows; those of the tree are the last.
        prefill: whether the prompt was among them.
    """

    request: Request
    hidden: Tensor
    prefill: bool

    def keep_visual(self, image_tokens: int) -> None:
        """Keeps the states of the image's rows, which lie behind BOS, for rules that look at them."""
        if self.prefill:
            self.request.visual = self.hidden[1 : 1 + image_tokens]

    def to_verify(self, answer: AnswerFormat) -> ToVerify:
        """What the acceptance rule judges."""
        request = self.request
        return ToVerify(request.tree, self._of_tree, answer.place(request.tokens), request.visual)

    def draft_input(self, commit: Commit, answer: AnswerFormat, embed: Callable[[Tensor], Tensor]) -> DraftInput:
        """What a drafter is told of the rows that `commit` has made final."""
        request = self.request
        hidden = self._of_tree[list(commit.nodes)]
        following = embed(commit.on_device)
        if self.prefill:
            hidden = torch.cat((self.hidden[: len(request.prompt) - 1], hidden))
            following = torch.cat((request.prompt[1:], following))
        return DraftInput(
            slot=request.slot,
            prefix_len=request.prefix_len,
            hidden=hidden,
            following=following,
            root=commit.on_device[-1],
            levels=answer.missing(request.tokens) - 1,
            place=answer.place(request.tokens),
            epoch=request.observation.epoch,
            prompt=request.prompt_ids,
            answer=tuple(request.tokens),
            in_text=answer.in_text(request.tokens),
        )

    @property
    def _of_tree(self) -> Tensor:
        return self.hidden[-len(self.request.tree) :]
