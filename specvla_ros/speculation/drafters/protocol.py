"""What every drafter is told, and what it says of its work."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftWork:
    """Forwards for drafting, added up.

    Args:
        head_forwards: of the draft head.
        self_forwards: of the target, for drafting.
        self_rows: committed rows that the first of them read in each draft; the others read one per request.
    """

    head_forwards: int = 0
    self_forwards: int = 0
    self_rows: int = 0

    def since(self, before: "DraftWork") -> "DraftWork":
        """What was added."""
        return DraftWork(
            self.head_forwards - before.head_forwards,
            self.self_forwards - before.self_forwards,
            self.self_rows - before.self_rows,
        )


@dataclass(frozen=True)
class DraftInput:
    """One request, with the rows committed since its drafter was last told.

    Args:
        slot: its KV slot.
        prefix_len: committed rows of the slot.
        hidden: [m, hidden], the target's last hidden states of rows `prefix_len - m` to `prefix_len - 1`.
        following: [m, hidden], embedding of the token behind each of these rows; the last is the root's.
        root: int64 [], the last committed token, whose keys and values are not written yet.
        levels: the tree may be this deep: one less than the tokens still missing.
        place: action tokens committed so far, the root included: the dimension of the first drafted token.
        epoch: the instruction epoch.
        prompt: ids of the prompt.
        answer: ids of the answer so far.
        mid_prompt: these rows are a chunk of the prompt that does not end it; nothing is drafted yet.
        in_text: the answer may still be text, which comes before the action.
    """

    slot: int
    prefix_len: int
    hidden: Tensor
    following: Tensor
    root: Tensor
    levels: int
    place: int
    epoch: int = 0
    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    mid_prompt: bool = False
    in_text: bool = False
