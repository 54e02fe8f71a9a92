# SPDX-License-Identifier: Apache-2.0
"""Drafts chains with a whole decoder, over keys and values of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_kernels.layout import Ancestry, Span, pack_layout
from specvla_ros.models.target import Decoder, ForwardResult
from specvla_ros.speculation.accept import greedy_choice
from specvla_ros.speculation.tree import Tree


@dataclass
class Chain:
    """One request's chain while it grows.

    Attributes:
        slot: its slot.
        root: int64 [], the last committed token.
        wanted: tokens it will have.
        start: the slot's row that `inputs` begin at.
        inputs: [n, hidden], embeddings that the next forward reads; the next token is the one after the last.
        tokens: int64 [], one each.
        gains: [], log-probability of each token given those before it.
    """

    slot: int
    root: Tensor
    wanted: int
    start: int
    inputs: Tensor
    tokens: list[Tensor] = field(default_factory=list)
    gains: list[Tensor] = field(default_factory=list)

    def add(self, token: Tensor, gain: Tensor, embedding: Tensor) -> None:
        """Takes the token after `inputs`, which are then in the KV cache; its embedding is [1, hidden]."""
        self.tokens.append(token)
        self.gains.append(gain)
        self.start += len(self.inputs)
        self.inputs = embedding

    def finish(self) -> Tree:
        """The tokens below the root; none is valid from a NaN on."""
        root = self.root.reshape(1)
        if not self.tokens:
            return Tree.from_root(root)
        gains = torch.nan_to_num(torch.stack(self.gains).float(), nan=-torch.inf, neginf=-torch.inf)
        log_probs = torch.cat((torch.zeros_like(gains[:1]), gains.cumsum(dim=0)))
        n = len(log_probs)
        return Tree(
            tokens=torch.cat((root, torch.stack(self.tokens))),
            ancestry=Ancestry.from_parents(range(-1, n - 1), root.device),
            log_probs=log_probs,
            valid=log_probs > -torch.inf,
            relaxable=torch.ones_like(log_probs, dtype=torch.bool),
            depth=n - 1,
        )


class ChainDecoder:
    """Decodes chains greedily, a forward per token for all of them together.

    Args:
        decoder: of the draft.
        slots: maximum of requests in flight.
        slot_rows: rows of a slot: prompt, answer and the longest chain.

    Attributes:
        keys: [layers, slots, slot_rows, kv_heads, head_dim]; what lies after a chain's `start` is overwritten.
        values: like keys.
        forwards: since this was made.
        rows: that these forwards read.
    """

    def __init__(self, decoder: Decoder, *, slots: int, slot_rows: int) -> None:
        self._decoder = decoder
        self._slot_rows = slot_rows
        config = decoder.config
        shape = (config.num_hidden_layers, slots, slot_rows, config.num_key_value_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.empty_like(self.keys)
        self.forwards = 0
        self.rows = 0

    def grow(self, chains: Sequence[Chain]) -> None:
        """Gives each chain the tokens that it wants; nothing is read back."""
        growing = [chain for chain in chains if chain.wanted]
        while growing:
            result = self._forward(growing)
            # NaN logits give no choice; the chain ends there, but the next forward needs a token that exists.
            chosen = greedy_choice(result.logits).clamp(min=0)
            gains = result.logits.log_softmax(dim=-1).amax(dim=-1)
            following = self._decoder.embed_tokens(chosen)
            for i, chain in enumerate(growing):
                chain.add(chosen[i], gains[i], following[i : i + 1])
            growing = [chain for chain in growing if len(chain.tokens) < chain.wanted]

    def _forward(self, chains: Sequence[Chain]) -> ForwardResult:
        """The logits after each chain's inputs."""
        spans: list[Span] = []
        rows = 0
        for chain in chains:
            stop = chain.start + len(chain.inputs)
            if stop > self._slot_rows:
                raise ValueError(f"row {stop - 1} of slot {chain.slot} lies beyond its {self._slot_rows} rows")
            spans.append(Span(chain.slot, rows, len(chain.inputs), chain.start, is_tree=False))
            rows += len(chain.inputs)
        embeddings = torch.cat([chain.inputs for chain in chains])
        layout = pack_layout([(span, None) for span in spans], self._slot_rows, embeddings.device)
        last = to_device([span.stop - 1 for span in spans], embeddings.device)
        self.forwards += 1
        self.rows += rows
        return self._decoder(embeddings, layout, last, self.keys, self.values)
