# SPDX-License-Identifier: Apache-2.0
"""The state of one observation in the engine."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specvla_ros.engine.answer_prefix import NO_PREFIX, AnswerPrefix
from specvla_ros.engine.outcome import DecodeRecord, StageTimings
from specvla_ros.engine.prepared_images import PreparedImages
from specvla_ros.engine.verifier import Commit
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.accept import AcceptanceRule
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.tree import Tree


@dataclass(eq=False)
class Request:
    """A request's state between ticks; compared by identity."""

    observation: Observation
    slot: int
    layout: PromptLayout
    chunk_rows: int  # rows of each prompt chunk but the last
    wait_s: float  # seconds from receipt to admission
    # The tree that the next forward verifies. Its root is the last committed token, whose keys and values are not
    # written yet. After a prompt the root is the prompt's last row, and its token is not read.
    tree: Tree
    codec: Codec
    given: AnswerPrefix = NO_PREFIX
    acceptance: str = "strict"
    spread: int = 1  # forwards over which its prompt is spread
    # Whether the vision towers process its images beside the forward of others, in the tick before its prompt.
    ahead: bool = False
    others: int = 0  # its robot's other requests in flight when its prompt starts
    drafts: bool = True  # whether its answer is drafted
    # Its acceptance rule, set by the engine in the tick that starts the prompt and kept to the end.
    rule: AcceptanceRule = field(default_factory=Strict)
    # Its vision input, until the prompt is computed; None if that is computed with the prompt.
    images: PreparedImages | None = None
    # [prompt rows, hidden], embeddings; set by the runner in the tick that starts the prompt.
    prompt: Tensor = field(default_factory=lambda: torch.empty(0))
    prefix_len: int = 0  # committed rows of the slot
    tokens: list[int] = field(init=False)  # committed answer tokens, the given ones first
    # Last hidden states of the image's rows, chunk by chunk, if the acceptance rule needs them.
    visual: list[Tensor] = field(default_factory=list)
    # float64 [horizon, dims], from the policy's action head; None: they are decoded from the tokens.
    actions: Tensor | None = None
    late: bool = False  # True once a newer image's action was released: only its text can still be used
    released_actions: int = 0  # number of actions released before the answer was complete
    first_forwards: int = 0  # verifying forwards until then; 0: no action was
    ended_early: bool = False  # with the actions released
    spent_s: float = 0.0  # time since its start, in the seconds of `Engine.tick_time`
    # Records for DecodeStats, per decoded token or tick.
    bins_off: list[int] = field(default_factory=list)
    why: list[int] = field(default_factory=list)
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens_per_forward: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    tree_nodes: list[int] = field(default_factory=list)
    tick_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [*self.given.tokens]

    @property
    def prefilling(self) -> bool:
        return self.prefix_len < self.layout.rows

    @property
    def verified(self) -> int:
        """Number of forwards that verified its answer."""
        return sum(tokens > 0 for tokens in self.tokens_per_forward)

    @property
    def root_row(self) -> int:
        """The slot's row of the tree's root."""
        return self.layout.rows - 1 if self.prefilling else self.prefix_len

    def advance(self, prompt_rows: int) -> None:
        """Commits a chunk that does not end the prompt; 0 rows while its images are processed ahead of it."""
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
        """Drops tokens committed beyond the answer's end."""
        beyond = len(self.tokens) - length
        if beyond > 0:
            del self.tokens[length:], self.bins_off[-beyond:], self.why[-beyond:]
            self.tokens_per_forward[-1] -= beyond
            self.accept_lengths[-1] = min(self.accept_lengths[-1], self.tokens_per_forward[-1])

    def book_time(self, tick_s: float, vision_s: float, *, prefill: bool) -> None:
        """Adds a tick's time to the stage it served; the vision tower runs in the first tick of a prefill."""
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
