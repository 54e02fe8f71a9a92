# SPDX-License-Identifier: Apache-2.0
"""One observation on its way through the engine."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specvla_ros.engine.mailbox import Pictures
from specvla_ros.engine.outcome import DecodeRecord, StageTimings
from specvla_ros.engine.verifier import Commit
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.accept import AcceptanceRule
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.tree import Tree


@dataclass(eq=False)
class Request:
    """The state that a request carries between ticks; equal only to itself."""

    observation: Observation
    slot: int
    layout: PromptLayout
    chunk_rows: int  # rows of each of the prompt's chunks but the last
    wait_s: float  # seconds from receipt to admission
    # What the next forward verifies. Its root is the last committed token, whose keys and values are not written yet;
    # after a prompt it is the prompt's last row, and its token is not read.
    tree: Tree
    codec: Codec
    acceptance: str = "strict"
    spread: int = 1  # forwards that its prompt is spread over
    others: int = 0  # requests of its robot in flight when it was begun
    drafts: bool = True  # whether its answer is drafted
    # Its acceptance rule to its end; set by the engine in the tick that begins the prompt.
    rule: AcceptanceRule = field(default_factory=Strict)
    # Its images as the policy reads them, until the prompt is computed; None: they come with it.
    pictures: Pictures | None = None
    # [prompt rows, hidden], embeddings; set by the runner in that tick.
    prompt: Tensor = field(default_factory=lambda: torch.empty(0))
    prefix_len: int = 0  # committed rows of the slot
    tokens: list[int] = field(default_factory=list)  # committed answer tokens
    # Last hidden states of the image's rows, chunk by chunk, where the acceptance rule asks for them.
    visual: list[Tensor] = field(default_factory=list)
    # float64 [horizon, dims], of a policy whose head gives them; None: its tokens stand for them.
    actions: Tensor | None = None
    handed_out: int = 0  # of its actions, before its answer was complete
    spent_s: float = 0.0  # since it was begun, in the seconds of `Engine.tick_time`
    # The record of its ticks, for DecodeStats.
    bins_off: list[int] = field(default_factory=list)
    why: list[int] = field(default_factory=list)
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens_per_forward: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    tree_nodes: list[int] = field(default_factory=list)
    tick_s: list[float] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        return self.prefix_len < self.layout.rows

    @property
    def verified(self) -> int:
        """Forwards that verified its answer."""
        return sum(tokens > 0 for tokens in self.tokens_per_forward)

    @property
    def root_row(self) -> int:
        """The slot's row of the tree's root."""
        return self.layout.rows - 1 if self.prefilling else self.prefix_len

    def advance(self, prompt_rows: int) -> None:
        """Makes a chunk final that does not end the prompt."""
        self.prefix_len += prompt_rows
        self.tokens_per_forward.append(0)

    def commit(self, commit: Commit) -> None:
        count = len(commit.nodes)
        if not self.prefilling or len(self.tree) > 1:
            self.accept_lengths.append(count - 1)
            self.tree_nodes.append(len(self.tree))
        self.prefix_len = self.root_row + count
        self.tokens += commit.tokens
        self.bins_off += commit.bins_off
        self.why += commit.why
        self.tokens_per_forward.append(count)

    def cut(self, length: int) -> None:
        """Drops tokens drafted beyond the answer's end."""
        beyond = len(self.tokens) - length
        if beyond > 0:
            del self.tokens[length:], self.bins_off[length:], self.why[length:]
            self.tokens_per_forward[-1] -= beyond
            self.accept_lengths[-1] = min(self.accept_lengths[-1], self.tokens_per_forward[-1])

    def book_time(self, tick_s: float, vision_s: float, *, prefill: bool) -> None:
        """Books the tick to the stage it served: the vision tower runs in the tick that begins a prefill."""
        self.tick_s.append(tick_s)
        if prefill:
            self.vision_s += vision_s
            self.prefill_s += tick_s - vision_s
        else:
            self.decode_s += tick_s

    def timings(self) -> StageTimings:
        return StageTimings(self.wait_s, self.vision_s, self.prefill_s, self.decode_s)

    def record(self, mode: str, in_flight: int) -> DecodeRecord:
        return DecodeRecord(
            mode=mode,
            acceptance=self.acceptance,
            tokens_per_forward=tuple(self.tokens_per_forward),
            accept_lengths=tuple(self.accept_lengths),
            tree_nodes=tuple(self.tree_nodes),
            bins_off=tuple(self.bins_off),
            why=tuple(self.why),
            tick_s=tuple(self.tick_s),
            in_flight=in_flight,
        )
