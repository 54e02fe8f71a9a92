"""What an answer is: the action tokens, or text and then the action tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from specvla_ros.models.checkpoint import Target
from specvla_ros.speculation.accept import ActionIds


@dataclass(frozen=True)
class AnswerFormat:
    """When an answer is complete.

    Args:
        action_dim: action tokens per answer.
        actions: which ids are actions.
        max_text: text tokens that may come before the actions, as embodied chain-of-thought policies write them; 0 for
            OpenVLA, whose first token is an action.
    """

    action_dim: int
    actions: ActionIds
    max_text: int = 0

    @staticmethod
    def from_target(policy: Target, max_text: int) -> "AnswerFormat":
        """A policy's."""
        tokenizer = policy.action_tokenizer
        ids = ActionIds(tokenizer.first_id, tokenizer.vocab_size, bins=len(tokenizer.centers))
        return AnswerFormat(policy.action_dim, ids, max_text)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return self.max_text + self.action_dim

    def place(self, tokens: Sequence[int]) -> int:
        """Action tokens so far: the dimension of the next one."""
        if not self.max_text:
            return len(tokens)
        first, stop = self.actions.first, self.actions.stop
        text = (i for i, token in enumerate(reversed(tokens)) if not first <= token < stop)
        return next(text, len(tokens))

    def in_text(self, tokens: Sequence[int]) -> bool:
        """Whether the next token may be text."""
        return self.max_text > 0 and not self.place(tokens)

    def missing(self, tokens: Sequence[int]) -> int:
        """The most tokens that may still come."""
        place = self.place(tokens)
        return self.action_dim - place if place else self.longest - len(tokens)

    def end(self, tokens: Sequence[int], known: int) -> int:
        """Tokens of the answer if it is complete, else 0.

        Args:
            tokens: committed so far.
            known: how many of them did not complete it.
        """
        for n in range(known + 1, len(tokens) + 1):
            if n == self.longest or self.place(tokens[:n]) == self.action_dim:
                return n
        return 0

    def action(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The action tokens of a complete answer; some are none if the text never came to its end."""
        return tuple(tokens[-self.action_dim :])
