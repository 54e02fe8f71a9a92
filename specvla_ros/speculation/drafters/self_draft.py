# SPDX-License-Identifier: Apache-2.0
"""The target as its own drafter, with a share of the image; see `SelfDrafter`."""

from __future__ import annotations

from dataclasses import dataclass

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, drafter

KEEPS = ("uniform", "similarity")


@dataclass(frozen=True)
class SelfDraftSettings:
    """What the target drafts for itself."""

    tokens: int = parameter(
        0,
        "Tokens drafted by the policy itself with few image tokens, a forward each; 0: none. For policies that write "
        "text.",
        unit="tokens",
        minimum=0,
        maximum=63,
        name="self_tokens",
    )
    image_share: float = parameter(
        0.1,
        "Share of the image's tokens that draft.self_tokens are drafted with.",
        minimum=0.001,
        maximum=1.0,
        name="self_image_share",
    )
    keep: str = parameter(
        "uniform",
        "Which of the image's tokens draft.self_tokens are drafted with: at even distances (uniform, as in LVSpec), or "
        "those most like the prompt's text (similarity).",
        choices=KEEPS,
        name="self_keep",
    )


@drafter("self", settings=SelfDraftSettings, order=30)
def _self(context: DraftContext) -> Drafter | None:
    own: SelfDraftSettings = context.own("self")
    if not own.tokens:
        return None
    if not context.target.causal_prompt:
        raise UserError(
            "draft.self_tokens leaves image rows out of the prompt, and this policy's, which sees itself both ways, "
            "may begin with them: set it to 0"
        )
    from specvla_ros.speculation.drafters.self_drafter import SelfDrafter

    return SelfDrafter(
        context.target.decoder,
        image_tokens=context.target.image_tokens,
        image_share=own.image_share,
        keep=own.keep,
        tokens=own.tokens,
        slots=context.slots,
        slot_rows=context.slot_rows,
    )
