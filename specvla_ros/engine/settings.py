"""Settings of the engine."""

from dataclasses import dataclass

from specvla_ros.errors import UserError

MODES = ("ar",)


@dataclass(frozen=True)
class EngineSettings:
    """How the engine decodes.

    Args:
        mode: `ar`: one request in flight, one node per forward.
        max_text_tokens: longest prompt text, in tokens; a KV slot has rows for it behind those of the image.
        max_image_age_s: a frame older than this at admission is dropped; 0 switches the check off (replay).

    Raises:
        UserError: a value is out of range.
    """

    mode: str = "ar"
    max_text_tokens: int = 128
    max_image_age_s: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"decode.mode is '{self.mode}', but it must be one of: {', '.join(MODES)}")
        if self.max_text_tokens < 1:
            raise UserError(f"decode.max_text_tokens must be at least 1, got {self.max_text_tokens}")
        if not self.max_image_age_s >= 0:
            raise UserError(f"max_image_age_s must be 0 (off) or more, got {self.max_image_age_s}")
