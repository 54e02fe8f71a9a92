"""Settings of the drafting; without torch, so that a node can check its parameters before anything is loaded."""

from dataclasses import dataclass

from specvla_ros.errors import UserError

CHILDREN = ("top_k", "window_mass")
NO_HEAD = "none"
LEAST_IMAGE_SHARE = 0.001
_MOST_NODES = 64  # a node's ancestors are the bits of one int64


@dataclass(frozen=True)
class DraftSettings:
    """Where drafted tokens come from.

    Args:
        head: directory of the draft head; empty: the folder `draft` of the checkpoint if there is one; `none`: no head.
        fallback_to_ar: decode plainly, with a warning, when no draft can be had.
        top_k: children per node that are considered.
        depth: drafted tokens on the longest path. EAGLE's and Spec-VLA's code counts one less: its 4 is 5 here.
        nodes: of the tree, the root included.
        children: `top_k`, the likeliest; `window_mass`, those whose tolerance covers most of the draft's mass.
        temporal: draft the previous action too, held and extrapolated.
        prompt_lookup_tokens: drafted by looking the last tokens up in prompt and answer; 0: none.
        self_tokens: drafted by the target itself with a share of the image; 0: none.
        self_image_share: of the image's tokens that the target drafts with.

    Raises:
        UserError: a value is out of range, or two do not fit together.
    """

    head: str = ""
    fallback_to_ar: bool = False
    top_k: int = 8
    depth: int = 5
    nodes: int = 50
    children: str = "top_k"
    temporal: bool = False
    prompt_lookup_tokens: int = 0
    self_tokens: int = 0
    self_image_share: float = 0.1

    def __post_init__(self) -> None:
        if self.children not in CHILDREN:
            raise UserError(f"draft.children is '{self.children}', but it must be one of: {', '.join(CHILDREN)}")
        for name, low, high in (("top_k", 1, 64), ("depth", 1, 63), ("nodes", 1, _MOST_NODES)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"draft.{name} must be {low} to {high}, got {getattr(self, name)}")
        for name in ("prompt_lookup_tokens", "self_tokens"):
            if not 0 <= getattr(self, name) < _MOST_NODES:
                raise UserError(f"draft.{name} must be 0 to {_MOST_NODES - 1}, got {getattr(self, name)}")
        if not LEAST_IMAGE_SHARE <= self.self_image_share <= 1:
            raise UserError(f"draft.self_image_share must be {LEAST_IMAGE_SHARE} to 1, got {self.self_image_share}")
        if self.beam_nodes > _MOST_NODES:
            raise UserError(
                f"draft.top_k {self.top_k} with draft.depth {self.depth} takes {self.beam_nodes} nodes in one forward "
                f"of the draft head, which holds {_MOST_NODES}: lower one of them"
            )

    @property
    def beam_nodes(self) -> int:
        """Nodes that the draft head itself runs over: all levels but the last."""
        return self.top_k * (self.depth - 1)
