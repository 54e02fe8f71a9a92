"""Settings of the engine."""

from dataclasses import dataclass, field

from specvla_ros.acceptance.settings import AcceptanceSettings
from specvla_ros.drafting.settings import DraftSettings
from specvla_ros.errors import UserError

MODES = ("ar", "spec")


@dataclass(frozen=True)
class EngineSettings:
    """How the engine decodes.

    Args:
        mode: `ar`: one request in flight, one node per forward. `spec`: one request, a draft tree per forward.
        max_text_tokens: longest prompt text, in tokens; a KV slot has rows for it behind those of the image.
        max_reasoning_tokens: longest text that the policy writes before its action; 0 for OpenVLA, which writes none.
        max_image_age_s: a frame older than this at admission is dropped; 0 switches the check off (replay).
        draft: where drafted tokens come from; not read in `ar`.
        acceptance: which of them are taken.

    Raises:
        UserError: a value is out of range.
    """

    mode: str = "ar"
    max_text_tokens: int = 128
    max_reasoning_tokens: int = 0
    max_image_age_s: float = 0.0
    draft: DraftSettings = field(default_factory=DraftSettings)
    acceptance: AcceptanceSettings = field(default_factory=AcceptanceSettings)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"decode.mode is '{self.mode}', but it must be one of: {', '.join(MODES)}")
        if self.max_text_tokens < 1:
            raise UserError(f"decode.max_text_tokens must be at least 1, got {self.max_text_tokens}")
        if self.max_reasoning_tokens < 0:
            raise UserError(f"decode.max_reasoning_tokens must be 0 or more, got {self.max_reasoning_tokens}")
        if not self.max_image_age_s >= 0:
            raise UserError(f"max_image_age_s must be 0 (off) or more, got {self.max_image_age_s}")
