"""What one tick computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TickWork:
    """The work of one tick, from which its time on another device can be told.

    Args:
        images: that went through the vision tower.
        prompts: requests whose prompt was in the forward, whole or in part.
        nodes: tree nodes of all requests in the forward.
        head_forwards: forwards of the draft head.
        head_prompts: prompts that the draft head was fed with.
        self_forwards: of the target, for drafting.
        self_rows: committed rows that the first of them read; the others read one per request.
        finished: requests that became an action or were dropped.
    """

    images: int = 0
    prompts: int = 0
    nodes: int = 0
    head_forwards: int = 0
    head_prompts: int = 0
    self_forwards: int = 0
    self_rows: int = 0
    finished: int = 0
