"""One request's share of a forward."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.engine.request import Request
from specvla_ros.engine.segment import Segment
from specvla_ros.engine.verifier import Commit, VerifierInput
from specvla_ros.speculation.drafters.protocol import DraftInput


@dataclass
class Share:
    """One request's rows.

    Attributes:
        request: whose they are.
        prompt_rows: of its prompt among them; 0 behind it.
        ends_prompt: whether the prompt's last row is one of them.
        hidden: [rows, hidden], last hidden states behind the forward; those of the tree are the last.
    """

    request: Request
    prompt_rows: int
    ends_prompt: bool
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))

    @staticmethod
    def of(request: Request, chunks: int) -> "Share":
        """The next share of a request whose prompt is spread over so many forwards."""
        length = len(request.prompt)
        left = max(0, length - request.prefix_len)
        rows = min(left, -(-length // chunks))
        return Share(request, rows, ends_prompt=0 < left == rows)

    @property
    def verifies(self) -> bool:
        """Whether tokens come of it; not of a chunk that does not end the prompt."""
        return self.ends_prompt or not self.prompt_rows

    def segments(self) -> list[Segment]:
        """Its part of the packed batch."""
        return self.request.segments(self.prompt_rows)

    def keep_visual(self, image_tokens: int) -> None:
        """Keeps the states of the image's rows, which lie behind BOS, for rules that look at them."""
        start = self.request.prefix_len
        rows = slice(max(0, 1 - start), max(0, min(self.prompt_rows, 1 + image_tokens - start)))
        if self.prompt_rows and rows.start < rows.stop:
            self.request.visual.append(self.hidden[rows])

    def to_verify(self, answer: AnswerFormat) -> VerifierInput:
        """What is verified; the states are known after the forward, see `with_states`."""
        request = self.request
        position = answer.place(request.tokens)
        return VerifierInput(request.tree, request.slot, request.root_row, position, request.rule)

    def with_states(self, part: VerifierInput) -> VerifierInput:
        """With the hidden states of the tree, and of the image's rows."""
        visual = torch.cat(self.request.visual) if self.request.visual else None
        return replace(part, hidden=self._of_tree, visual=visual)

    def prompt_input(self) -> DraftInput:
        """What a drafter is told of a chunk that does not end the prompt; nothing grows from it."""
        request = self.request
        start, stop = request.prefix_len - self.prompt_rows, request.prefix_len
        return DraftInput(
            slot=request.slot,
            prefix_len=stop,
            hidden=self.hidden,
            following=request.prompt[start + 1 : stop + 1],
            root=request.tree.tokens[0],
            levels=0,
            place=0,
            epoch=request.observation.epoch,
            prompt=request.prompt_ids,
            mid_prompt=True,
        )

    def draft_input(self, commit: Commit, answer: AnswerFormat, embed: Callable[[Tensor], Tensor]) -> DraftInput:
        """What a drafter is told of the rows that `commit` has made final."""
        request = self.request
        hidden = self._of_tree[commit.nodes_on_device]
        following = embed(commit.tokens_on_device)
        if self.prompt_rows:
            hidden = torch.cat((self.hidden[: self.prompt_rows - 1], hidden))
            following = torch.cat((request.prompt[len(request.prompt) - self.prompt_rows + 1 :], following))
        return DraftInput(
            slot=request.slot,
            prefix_len=request.prefix_len,
            hidden=hidden,
            following=following,
            root=commit.tokens_on_device[-1],
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
