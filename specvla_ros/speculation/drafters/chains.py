# SPDX-License-Identifier: Apache-2.0
"""Drafts chains with a whole decoder and its own KV cache, optionally accelerated by prompt lookup."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.layout import Ancestry, Span, pack_layout
from specvla_ros.models.target import Decoder, ForwardResult
from specvla_ros.speculation.drafters.prompt_lookup import common_prefix, look_up
from specvla_ros.speculation.tree import Tree


@dataclass
class Chain:
    """One request's growing chain."""

    slot: int
    root: Tensor
    wanted: int  # number of tokens to draft
    start: int  # the slot's row of the first input
    inputs: Tensor  # [n, hidden], embeddings for the next forward; the next token follows the last of them
    # Ids of prompt and answer, searched by lookup, which appends the chain's own.
    text: list[int] = field(default_factory=list)
    # int64 [axes, n], RoPE positions of `inputs` for a model with several per row; None: positions count up with the
    # slot's rows.
    positions: Tensor | None = None
    # Number of first inputs with bidirectional attention (the prompt of a prefix language model).
    both_ways: int = 0
    tokens: list[Tensor] = field(default_factory=list)  # int64 [], one each
    gains: list[Tensor] = field(default_factory=list)

    def add(self, tokens: Tensor, gains: Tensor, embedding: Tensor) -> None:
        """Appends the tokens after `inputs`, [n]; the last one's `embedding`, [1, hidden], becomes the next input."""
        self.tokens += tokens.unbind()
        self.gains += gains.unbind()
        self.start += len(self.inputs) + len(tokens) - 1
        self.inputs, self.both_ways = embedding, 0
        if self.positions is not None:
            self.positions = self.positions[:, -1:] + len(tokens)

    def positions_with(self, guesses: int) -> Tensor | None:
        """RoPE positions of `inputs` and of the guessed tokens after them."""
        if self.positions is None or not guesses:
            return self.positions
        behind = torch.arange(1, 1 + guesses, device=self.positions.device)
        return torch.cat((self.positions, self.positions[:, -1:] + behind), dim=1)

    def finish(self) -> Tree:
        """Returns the tree of the chain's tokens below the root; tokens from the first NaN on are invalid."""
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
    """Decodes chains greedily, one forward per token for all chains together.

    With `lookup`, a max number of tokens, a forward also verifies the next tokens found by prompt lookup, and yields
    those that are the decoder's own choice plus one more (FLy, multi-level acceleration). The tokens are the same in
    fewer forwards, but each forward's choices are then read back.

    Args:
        slot_rows: rows of a slot, for prompt, answer and the longest chain.

    Attributes:
        keys, values: [layers, slots, slot_rows, kv_heads, head_dim]; rows after a chain's `start` are overwritten.
        forwards, rows: number of forwards since construction, and of the rows they read.
    """

    def __init__(self, decoder: Decoder, *, slots: int, slot_rows: int, lookup: int = 0) -> None:
        self._decoder, self._slot_rows, self._lookup = decoder, slot_rows, lookup
        config = decoder.config
        shape = (config.num_hidden_layers, slots, slot_rows, config.num_key_value_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.empty_like(self.keys)
        self.forwards = self.rows = 0

    def grow(self, chains: Sequence[Chain]) -> None:
        """Grows each chain to its wanted number of tokens; without lookup nothing is read back."""
        add = self._add_looked_up if self._lookup else self._add_next
        growing = [chain for chain in chains if chain.wanted]
        while growing:
            add(growing)
            growing = [chain for chain in growing if len(chain.tokens) < chain.wanted]

    def _add_next(self, chains: Sequence[Chain]) -> None:
        tokens, gains, embeddings = self._choices(chains, [()] * len(chains))
        for i, chain in enumerate(chains):
            chain.add(tokens[i : i + 1], gains[i : i + 1], embeddings[i : i + 1])

    def _add_looked_up(self, chains: Sequence[Chain]) -> None:
        """Adds to each chain the correct tokens of the lookup and the one after them."""
        left = [chain.wanted - len(chain.tokens) - 1 for chain in chains]
        guesses = [
            look_up(chain.text, chain.text, min(self._lookup, most)) for chain, most in zip(chains, left, strict=True)
        ]
        tokens, gains, embeddings = self._choices(chains, guesses)
        read = tokens.tolist()
        start = 0
        for chain, guess in zip(chains, guesses, strict=True):
            stop = start + common_prefix(guess, read[start:]) + 1
            chain.text += read[start:stop]
            chain.add(tokens[start:stop], gains[start:stop], embeddings[stop - 1 : stop])
            start += len(guess) + 1

    def _choices(self, chains: Sequence[Chain], guesses: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, log-probabilities and embeddings of the tokens after each chain's inputs and each guessed token."""
        result = self._forward(chains, guesses)
        # NaN logits give no choice. The chain ends there, but the next forward needs a valid token id.
        chosen = greedy_choice(result.logits).clamp(min=0)
        gains = result.logits.log_softmax(dim=-1).amax(dim=-1)
        return chosen, gains, self._decoder.embed_tokens(chosen)

    def _forward(self, chains: Sequence[Chain], guesses: Sequence[Sequence[int]]) -> ForwardResult:
        """Runs a forward that gives logits for each chain's last input row and its guess."""
        device = self._decoder.device
        inputs = [chain.inputs for chain in chains]
        if any(guesses):
            ids = to_device([token for guess in guesses for token in guess], device)
            guessed = self._decoder.embed_tokens(ids).split([len(guess) for guess in guesses])
            inputs = [torch.cat(pair) for pair in zip(inputs, guessed, strict=True)]
        spans: list[Span] = []
        wanted: list[int] = []
        rows = 0
        for chain, mine, guess in zip(chains, inputs, guesses, strict=True):
            stop = chain.start + len(mine)
            if stop > self._slot_rows:
                raise ValueError(f"row {stop - 1} of slot {chain.slot} is beyond its {self._slot_rows} rows")
            spans += _spans(chain, rows, len(mine))
            rows += len(mine)
            wanted += range(rows - 1 - len(guess), rows)
        positions = [chain.positions_with(len(guess)) for chain, guess in zip(chains, guesses, strict=True)]
        own = [each for each in positions if each is not None]
        first_positions = torch.cat(own, dim=1) if own else None
        layout = pack_layout([(span, None) for span in spans], self._slot_rows, device, first_positions)
        self.forwards += 1
        self.rows += rows
        return self._decoder(torch.cat(inputs), layout, to_device(wanted, device), self.keys, self.values)


def _spans(chain: Chain, row: int, rows: int) -> list[Span]:
    """A chain's segments: the bidirectional rows, then the causal ones."""
    first, start = chain.both_ways, chain.start
    both_ways = Span(chain.slot, row, first, start, is_tree=False, sees_all=True)
    causal = Span(chain.slot, row + first, rows - first, start + first, is_tree=False)
    return [span for span in (both_ways, causal) if span.length]
