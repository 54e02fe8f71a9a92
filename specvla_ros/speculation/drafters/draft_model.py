# SPDX-License-Identifier: Apache-2.0
"""A smaller policy of the same vocabulary as the drafter; see `ModelDrafter`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, drafter

if TYPE_CHECKING:
    from specvla_ros.models.target import Target


@dataclass(frozen=True)
class DraftModelSettings:
    """Which model drafts, and how much."""

    directory: str = parameter(
        "",
        "Directory of a smaller policy with the same vocabulary, which drafts: the draft model; empty: none.",
        name="model",
    )
    tokens: int = parameter(
        15,
        "Tokens that the draft model drafts, a forward of it each unless draft.model_lookup_tokens spares some.",
        unit="tokens",
        minimum=1,
        maximum=63,
        name="model_tokens",
    )
    lookup_tokens: int = parameter(
        0,
        "Tokens looked up in prompt and answer that each forward of the draft model verifies for itself (FLy's "
        "multi-level acceleration); 0: none. The same drafts in fewer forwards.",
        unit="tokens",
        minimum=0,
        maximum=63,
        name="model_lookup_tokens",
    )
    center_crop: bool = parameter(False, "As center_crop, for the draft model.", name="model_center_crop")


@drafter("model", settings=DraftModelSettings, order=40)
def _model(context: DraftContext) -> Drafter | None:
    own: DraftModelSettings = context.own("model")
    if not own.directory:
        return None
    from specvla_ros.speculation.drafters.model_drafter import ModelDrafter

    target = context.target
    model = _load(own, target)
    check_vocabulary(model, target)
    if model.cameras not in ((), target.cameras):
        raise UserError(
            f"draft.model: {model.directory} is asked with images of the cameras {', '.join(model.cameras)}, and the "
            f"policy with {', '.join(target.cameras) or 'none'}"
        )
    if model.state_dims not in (0, target.state_dims):
        raise UserError(
            f"draft.model: {model.directory} reads {model.state_dims} numbers of the robot's state, and the policy "
            f"{target.state_dims}"
        )
    slot_rows = context.slot_rows - target.image_tokens + model.image_tokens + own.tokens
    longest = model.decoder.config.max_position_embeddings
    if slot_rows > longest:
        raise UserError(
            f"the draft model {model.directory} needs {slot_rows} rows for a prompt, an answer and what it drafts, but "
            f"has {longest} positions: lower decode.max_text_tokens, decode.max_reasoning_tokens or draft.model_tokens"
        )
    return ModelDrafter(model, tokens=own.tokens, slots=context.slots, slot_rows=slot_rows, lookup=own.lookup_tokens)


def _load(own: DraftModelSettings, target: Target) -> Target:
    """On the target's device and, where a checkpoint can be loaded in it, in its precision.

    Raises:
        UserError: it cannot be loaded.
    """
    from specvla_ros.models.checkpoint import DTYPES, load_target

    dtype = str(target.decoder.dtype).removeprefix("torch.")
    try:
        return load_target(
            Path(own.directory),
            device=str(target.decoder.device),
            dtype=dtype if dtype in DTYPES else "float32",
            unnorm_key=target.unnorm_key,
            center_crop=own.center_crop,
            action_head=target.action_head,
        )
    except UserError as error:
        raise UserError(f"draft.model: {error}") from None


def check_vocabulary(model: Target, target: Target) -> None:
    """Whether a token id means the same to both; a checkpoint without tokenizer is taken at its sizes.

    Raises:
        UserError: it does not.
    """
    refused = f"draft.model {model.directory} cannot draft for {target.directory}: "
    sizes = [each.decoder.config.vocab_size for each in (model, target)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{refused}it has {sizes[0]} token ids, and the policy {sizes[1]}")
    ids = [each.codec.action_ids for each in (model, target)]
    if all(each.bins > 1 for each in ids) and ids[0] != ids[1]:  # other codecs' actions are words of the vocabulary
        ranges = [f"{each.first} to {each.stop - 1} for {each.bins} bins" for each in ids]
        raise UserError(f"{refused}its action tokens are {ranges[0]}, and the policy's {ranges[1]}")
    if model.tokenizer is None or target.tokenizer is None:
        return
    theirs, ours = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if theirs != ours:
        word = min((word for word, id_ in (theirs.items() ^ ours.items())))
        meant = [vocab.get(word, "none") for vocab in (theirs, ours)]
        raise UserError(f"{refused}their tokenizers differ, {word!r} is token {meant[0]} there and {meant[1]} here")
