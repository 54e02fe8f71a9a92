"""What one tick computed."""

from dataclasses import dataclass, field

from specvla_ros.drafting.draft_work import DraftWork


@dataclass(frozen=True)
class TickWork:
    """The work of one tick, from which its time on another device can be told.

    Args:
        images: that went through the vision tower.
        prompts: in the forward; a chunk counts for its share of its prompt.
        nodes: tree nodes of all requests in the forward.
        drafting: forwards for drafting.
        head_prompts: prompts that the draft head was fed with; a chunk counts for its share.
        finished: requests that became an action or were dropped.
    """

    images: int = 0
    prompts: float = 0.0
    nodes: int = 0
    drafting: DraftWork = field(default_factory=DraftWork)
    head_prompts: float = 0.0
    finished: int = 0
