"""What drafting has cost."""

from dataclasses import dataclass


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
