# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about greedy decoding, as transformers' generate reads it.

A repetition penalty counts all ids before a token, those of the prompt too; in a tree, the ids on the node's own path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_kernels.layout import Ancestry
from specvla_ros.errors import UserError
from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.settings.json_file import shown

USUAL_NEW_TOKENS = 20  # transformers' default length of an answer


@dataclass(frozen=True)
class GreedyRules:
    """What is done to logits before the largest is taken."""

    # Logits of earlier ids are divided by it if positive, else multiplied (CTRL, arXiv 1909.05858, as transformers'
    # RepetitionPenaltyLogitsProcessor); 1: none.
    repetition_penalty: float = 1.0
    allowed_ids: tuple[int, ...] = ()  # the only ids that may be answered, after the penalty; empty: all
    max_new_tokens: int | None = None  # length at which generate would end an answer; None: the file does not say

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0

    def apply(self, logits: Tensor, trees: Sequence[tuple[Tensor, Ancestry]], seen: Tensor | None) -> Tensor:
        """Logits as the rules leave them; nothing is read back.

        Args:
            logits: float32 [nodes of all trees, vocab].
            trees: tokens int64 [n] and ancestry of each request's tree, in the logits' order.
            seen: bool [requests, vocab], the ids of prompt and answer up to each tree's root; None: nothing penalises.
        """
        if seen is not None:
            parts = zip(trees, seen, strict=True)
            counted = torch.cat([_seen_at_nodes(tokens, ancestry, before) for (tokens, ancestry), before in parts])
            penalty = self.repetition_penalty
            logits = torch.where(counted, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if not self.allowed_ids:
            return logits
        return logits.masked_fill(_others(self.allowed_ids, logits.shape[1], logits.device), -torch.inf)


NO_RULES = GreedyRules()


@cache  # uploaded once: in a tick, a copy waits for the device
def _others(allowed_ids: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """Bool [vocab]: all other ids."""
    others = torch.ones(vocab, dtype=torch.bool)
    others[list(allowed_ids)] = False
    return others.to(device)


def _seen_at_nodes(tokens: Tensor, ancestry: Ancestry, before: Tensor) -> Tensor:
    """Bool [n, vocab]: the ids before each node's successor, the node's own included."""
    n, vocab = len(tokens), len(before)
    if n == 1:
        return before[None]
    nodes = torch.arange(n, device=tokens.device)
    on_path = (ancestry.ancestors[:, None] >> nodes & 1).to(torch.uint8)
    on_path[:, 0] = 0  # the root is among those before; behind a prompt its token stands for nothing
    counts = torch.zeros(n, vocab, dtype=torch.uint8, device=tokens.device)
    counts.scatter_add_(1, tokens.clamp(0, vocab - 1).expand(n, n), on_path)
    return counts.bool() | before


def seen_ids(ids: Sequence[Sequence[int]], vocab: int, device: torch.device) -> Tensor:
    """Ids of several requests to bool [requests, vocab]."""
    flat = [request * vocab + i for request, mine in enumerate(ids) for i in {*mine}]
    seen = torch.zeros(len(ids) * vocab, dtype=torch.bool, device=device)
    return seen.index_fill(0, to_device(flat, device), True).view(len(ids), vocab)


# What else changes greedy decoding in transformers' generate, with the values that do not.
PLAIN: dict[str, tuple[object, ...]] = {
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static"),  # another is "quantized"
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
    """The rules of a generation_config.json; sampling is never done, and a missing file asks for nothing.

    UserError if it asks for what is not done here: the policy would act otherwise than under its own code.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return NO_RULES
    given = read_checkpoint_json(path)
    for name, plain in PLAIN.items():
        if name in given.raw and given.raw[name] not in plain:
            raise UserError(
                f"{path}: {name} is {shown(given.raw[name])}, which changes what it answers and is not supported; if "
                "it was not trained or evaluated so, take it out"
            )
    return GreedyRules(
        repetition_penalty=given.number("repetition_penalty", 1.0, above=0.0, maximum=1e3),
        max_new_tokens=given.whole("max_new_tokens", None, minimum=1),
    )


def refuse_max_length(directory: Path) -> None:
    """For a policy whose code leaves the length to the file: UserError where it is counted with the prompt."""
    path = directory / "generation_config.json"
    length = read_checkpoint_json(path).raw.get("max_length") if path.exists() else None
    if length not in (None, USUAL_NEW_TOKENS):
        raise UserError(
            f"{path}: max_length is {shown(length)}, which counts the prompt too and is not supported: give the length "
            "of an answer as max_new_tokens in its place"
        )


def read_end_ids(directory: Path) -> frozenset[int]:
    """The ids that end an answer: generation_config.json's, else config.json's; UserError if neither says it."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = read_checkpoint_json(path).raw.get("eos_token_id") if path.exists() else None
        ids = found if isinstance(found, list) else [found]
        if found is not None:
            if not ids or not all(type(i) is int and i >= 0 for i in ids):
                raise UserError(f"{path}: eos_token_id must be a token id, or a list of them; copy the file again")
            return frozenset(ids)
    raise UserError(f"{directory} does not say which token ends an answer: add eos_token_id to generation_config.json")
