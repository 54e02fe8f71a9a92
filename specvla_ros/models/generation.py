# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding rules of a checkpoint, as transformers' generate reads them.

A repetition penalty counts all ids before a token, including the prompt's; in a tree, the ids on the node's own path.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.repetition_penalty import EarlierIds, penalised_choice
from specvla_ros.errors import UserError
from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.settings.json_file import shown

USUAL_NEW_TOKENS = 20  # transformers' default length of an answer


@dataclass(frozen=True)
class GreedyRules:
    """Logit processing before the argmax."""

    # Logits of earlier ids are divided by it if positive, else multiplied (CTRL, arXiv 1909.05858, as in transformers'
    # RepetitionPenaltyLogitsProcessor); 1: no penalty.
    repetition_penalty: float = 1.0
    allowed_ids: tuple[int, ...] = ()  # the only ids that may be generated, applied after the penalty; empty: all
    max_new_tokens: int | None = None  # generate's limit on an answer's length; None: not given

    @property
    def changes_choices(self) -> bool:
        return self.penalises or bool(self.allowed_ids)

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0

    def choose(self, logits: Tensor, tokens: Tensor, ancestors: Tensor, earlier: EarlierIds | None) -> Tensor:
        """The choice after each node, int64 [nodes of all trees]; the logits change in place. Nothing is read back.

        Args:
            logits: float32 [nodes of all trees, vocab].
            tokens, ancestors: int64 [nodes of all trees], see `Tree`.
            earlier: the ids of prompt and answer up to each tree's root; None: no penalty.
        """
        excluded = _others(self.allowed_ids, logits.shape[1], logits.device) if self.allowed_ids else None
        if earlier is not None:
            return penalised_choice(logits, self.repetition_penalty, tokens, ancestors, earlier, excluded)
        return greedy_choice(logits if excluded is None else logits.masked_fill_(excluded, -torch.inf))


NO_RULES = GreedyRules()


@cache  # uploaded once: in a tick, a copy waits for the device
def _others(allowed_ids: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """Mask of all other ids, bool [vocab]."""
    others = torch.ones(vocab, dtype=torch.bool)
    others[list(allowed_ids)] = False
    return others.to(device)


# Other settings that change greedy decoding in transformers' generate, with their neutral values.
PLAIN: dict[str, tuple[object, ...]] = {
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static"),  # the other is "quantized"
    "constraints": (None,),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "max_time": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "penalty_alpha": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None,),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "force_words_ids": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}


def read_generation(directory: Path) -> GreedyRules:
    """Reads the rules of a generation_config.json. Sampling is ignored; a missing file means no rules.

    Raises UserError for an unsupported setting: the policy would act differently than under its own code.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return NO_RULES
    given = read_checkpoint_json(path)
    for name, plain in PLAIN.items():
        if name in given.raw and given.raw[name] not in plain:
            raise UserError(
                f"{path}: {name} is {shown(given.raw[name])}, which changes the answers and is not supported; remove "
                "it if the policy was not trained or evaluated with it"
            )
    return GreedyRules(
        repetition_penalty=given.number("repetition_penalty", 1.0, above=0.0, maximum=1e3),
        max_new_tokens=given.whole("max_new_tokens", None, minimum=1),
    )


def refuse_max_length(directory: Path) -> None:
    """Refuses a generation_config.json whose length limit includes the prompt (max_length)."""
    path = directory / "generation_config.json"
    length = read_checkpoint_json(path).raw.get("max_length") if path.exists() else None
    if length not in (None, USUAL_NEW_TOKENS):
        raise UserError(
            f"{path}: max_length is {shown(length)}, which includes the prompt and is not supported: give the length "
            "of an answer as max_new_tokens instead"
        )


def read_end_ids(directory: Path) -> frozenset[int]:
    """Reads the end token ids from generation_config.json, else config.json; UserError if neither has them."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = read_checkpoint_json(path).raw.get("eos_token_id") if path.exists() else None
        ids = found if isinstance(found, list) else [found]
        if found is not None:
            if not ids or not all(type(i) is int and i >= 0 for i in ids):
                raise UserError(f"{path}: eos_token_id must be a token id, or a list of them; copy the file again")
            return frozenset(ids)
    raise UserError(f"{directory} does not say which token ends an answer: add eos_token_id to generation_config.json")
