"""Settings of the engine."""

from dataclasses import dataclass, field

from specvla_ros.errors import UserError
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings

_SLOTS = {"ar": 1, "spec": 1, "pipeline": 7, "specpipe": 4}
MODES = tuple(_SLOTS)
_DRAFTING = ("spec", "specpipe")
_PIPELINED = ("pipeline", "specpipe")
MOST_SLOTS = 64
MOST_CHUNKS = 16


@dataclass(frozen=True)
class EngineSettings:
    """How the engine decodes.

    Args:
        mode: `ar`: one request in flight, one node per forward. `spec`: one request, a draft tree per forward.
            `pipeline` (ActionFlow): a forward carries the newest frame's prefill and one node of every request in
            flight. `specpipe`: the same with a draft tree of every request.
        max_in_flight: requests in flight at most, of the pipelined modes; 0: 7 for `pipeline`, 4 for `specpipe`.
        prefill_chunks: forwards over which a prompt is spread, in the pipelined modes.
        in_order: every frame that was begun is finished, and actions wait for those of older frames; otherwise a frame
            is dropped when a newer one overtakes it. For the pipelined modes.
        max_text_tokens: longest prompt text, in tokens; a KV slot has rows for it behind those of the image.
        max_reasoning_tokens: longest text that the policy writes before its action; 0 for OpenVLA, which writes none.
        max_image_age_s: a frame older than this at admission is dropped; 0 switches the check off (replay).
        draft: where drafted tokens come from; not read in `ar` and `pipeline`.
        acceptance: which of them are taken.

    Raises:
        UserError: a value is out of range.
    """

    mode: str = "ar"
    max_in_flight: int = 0
    prefill_chunks: int = 1
    in_order: bool = False
    max_text_tokens: int = 128
    max_reasoning_tokens: int = 0
    max_image_age_s: float = 0.0
    draft: DraftSettings = field(default_factory=DraftSettings)
    acceptance: AcceptanceSettings = field(default_factory=AcceptanceSettings)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"decode.mode is '{self.mode}', but it must be one of: {', '.join(MODES)}")
        for name, low, high in (("max_in_flight", 0, MOST_SLOTS), ("prefill_chunks", 1, MOST_CHUNKS)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"decode.{name} must be {low} to {high}, got {getattr(self, name)}")
        if self.max_text_tokens < 1:
            raise UserError(f"decode.max_text_tokens must be at least 1, got {self.max_text_tokens}")
        if self.max_reasoning_tokens < 0:
            raise UserError(f"decode.max_reasoning_tokens must be 0 or more, got {self.max_reasoning_tokens}")
        if not self.max_image_age_s >= 0:
            raise UserError(f"max_image_age_s must be 0 (off) or more, got {self.max_image_age_s}")

    def check_action_head(self) -> None:
        """Whether an output head of action tokens alone can write these answers.

        Raises:
            UserError: text may come before the actions.
        """
        if self.max_reasoning_tokens:
            raise UserError(
                f"model.action_head gives no logits to text, but decode.max_reasoning_tokens is "
                f"{self.max_reasoning_tokens}: set it to 0, or model.action_head to false"
            )

    @property
    def drafts(self) -> bool:
        """Whether the mode verifies drafts."""
        return self.mode in _DRAFTING

    @property
    def tree_nodes(self) -> int:
        """Of a request's tree at most, the root included."""
        return self.draft.nodes if self.drafts else 1

    @property
    def slots(self) -> int:
        """Requests in flight at most."""
        return self.max_in_flight or _SLOTS[self.mode] if self.mode in _PIPELINED else 1

    @property
    def chunks(self) -> int:
        """Forwards over which a prompt is spread."""
        return self.prefill_chunks if self.mode in _PIPELINED else 1
