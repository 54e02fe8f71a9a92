# SPDX-License-Identifier: Apache-2.0
"""The draft head as a drafter: locating, loading and configuring it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from specvla_ros.errors import UserError
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter
from specvla_ros.speculation.settings import DRAFTERS

if TYPE_CHECKING:
    from specvla_ros.models.codecs.codec import Codec
    from specvla_ros.models.decoder import PackedDecoder


def answer_ids(codec: Codec, least: int) -> range | None:
    """The ids possible in an answer; None if any id is possible, or there are fewer than `least`.

    If an answer cannot start with text it has none, and its legal ids are the same to the end.
    """
    ids = None if codec.in_text(()) else codec.legal_ids(())
    return ids if ids is not None and len(ids) >= least else None


@DRAFTERS.register("head", order=90)
def _head(context: DraftContext) -> Drafter | None:
    directory = context.settings.head_directory(context.target.directory)
    if directory is None or not (context.settings.head or directory.is_dir()):
        return None
    import torch

    from specvla_ros.models.quantization import fast_format, quantize_layer
    from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
    from specvla_ros.speculation.drafters.eagle.head import load_draft_head
    from specvla_ros.speculation.drafters.eagle.tree_growth import WindowMass

    settings, codec = context.settings, context.codec
    decoder = cast("PackedDecoder", context.target.decoder)
    if decoder.config.deepstack:
        raise UserError(
            f"draft.head {directory} cannot draft for {context.target.directory}: draft heads do not support models "
            "with image features in their first layers; leave draft.head empty, or use draft.model or draft.temporal"
        )
    head = load_draft_head(directory, decoder)
    if 1 < head.parallel_depth < settings.depth:
        raise UserError(
            f"{directory} drafts {head.parallel_depth} tokens in one forward, but draft.depth is "
            f"{settings.depth}: lower it"
        )
    # With a target in 8 bits, another draft would take most of a tick, and drafts do not affect the tokens. In float64
    # there are no such products.
    weights = fast_format(decoder.layers)
    if weights and decoder.dtype != torch.float64:
        quantize_layer(head.layer, weights)
    window, ids = None, None if settings.whole_vocabulary else answer_ids(codec, settings.top_k)
    if settings.children == "window_mass":
        if codec.action_ids.first >= codec.action_ids.stop:
            raise UserError("draft.children window_mass needs a policy that writes bins: set it to top_k")
        dimensions, text = context.target.codec.max_tokens, codec.in_text(())
        actions = codec.action_ids.counted_from(ids.start if ids else 0)
        window = WindowMass.from_actions(settings.top_k, actions, dimensions, decoder.device, text=text)
    return EagleDrafter(
        head,
        decoder,
        settings,
        slots=context.slots,
        slot_rows=context.slot_rows,
        window=window,
        ids=ids,
        # The first forward after a prompt commits a token, and each later one commits its own last token.
        captured_depth=codec.max_tokens - 2,
    )
