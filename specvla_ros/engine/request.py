# SPDX-License-Identifier: Apache-2.0
"""One observation on its way through the engine, and its share of a forward."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specvla_ros.engine.batch import Segment
from specvla_ros.engine.outcome import DecodeRecord, StageTimings
from specvla_ros.engine.pictures import Pictures
from specvla_ros.engine.verifier import Commit, VerifyInput
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.accept import AcceptanceRule
from specvla_ros.speculation.drafters.new_rows import NewRows
from specvla_ros.speculation.drafters.registry import DraftInput
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.tree import Tree


@dataclass(eq=False)
class Request:
    """The state that a request carries between ticks; equal only to itself.

    Attributes:
        observation: what it answers.
        slot: its KV slot.
        layout: the rows of its prompt.
        wait_s: seconds from receipt to admission.
        codec: how its answer ends.
        tree: what the next forward verifies. Its root is the last committed token, whose keys and values are not
            written yet; after a prompt it is the prompt's last row, and its token is not read.
        acceptance: name of its acceptance rule.
        rule: that rule, which it keeps to its end; set by the engine in the tick that begins the prompt.
        pictures: its images as the policy reads them, until the prompt is computed; None: they come with it.
        prompt: [prompt rows, hidden], embeddings; set by the runner in that tick.
        prefix_len: committed rows of the slot.
        tokens: committed answer tokens.
        visual: last hidden states of the image's rows, chunk by chunk, where the acceptance rule asks for them.
        actions: float64 [horizon, dims], of a policy whose head gives them; None: its tokens stand for them.

    The rest is the record of its ticks, for DecodeStats.
    """

    observation: Observation
    slot: int
    layout: PromptLayout
    wait_s: float
    tree: Tree
    codec: Codec
    acceptance: str = "strict"
    rule: AcceptanceRule = field(default_factory=Strict)
    pictures: Pictures | None = None
    prompt: Tensor = field(default_factory=lambda: torch.empty(0))
    prefix_len: int = 0
    tokens: list[int] = field(default_factory=list)
    visual: list[Tensor] = field(default_factory=list)
    actions: Tensor | None = None
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
        """Whether rows of the prompt are still missing."""
        return self.prefix_len < self.layout.rows

    @property
    def root_row(self) -> int:
        """The slot's row of the tree's root."""
        return self.layout.rows - 1 if self.prefilling else self.prefix_len

    def advance(self, prompt_rows: int) -> None:
        """Makes a chunk final that does not end the prompt."""
        self.prefix_len += prompt_rows
        self.tokens_per_forward.append(0)

    def commit(self, commit: Commit) -> None:
        """Makes a forward's rows and tokens final."""
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
        """Leaves out what was drafted beyond the answer's end."""
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
        """Seconds spent in each stage so far."""
        return StageTimings(self.wait_s, self.vision_s, self.prefill_s, self.decode_s)

    def record(self, mode: str, in_flight: int) -> DecodeRecord:
        """How it was decoded."""
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


@dataclass
class ScheduledRequest:
    """One request's share of a forward: a chunk of its prompt, the prompt's end with a drafted tree, or a tree.

    Attributes:
        request: whose rows they are.
        prompt_rows: number of prompt rows among them; 0 after the prompt.
        ends_prompt: whether the prompt's last row is one of them.
        states: [n, hidden], last hidden states of the forward, valid until the next one.
        rows: its own of these.
    """

    request: Request
    prompt_rows: int
    ends_prompt: bool
    states: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: range = range(0)

    @staticmethod
    def next_share(request: Request, chunk_rows: int) -> "ScheduledRequest":
        """The next share of a request whose prompt is cut into chunks of so many rows."""
        left = max(0, request.layout.rows - request.prefix_len)
        rows = min(left, chunk_rows)
        return ScheduledRequest(request, rows, ends_prompt=0 < left == rows)

    @property
    def begins(self) -> bool:
        """Whether the prompt begins with it."""
        return self.request.prefix_len == 0

    @property
    def verifies(self) -> bool:
        """Whether tokens come of it; not of a chunk that does not end the prompt."""
        return self.ends_prompt or not self.prompt_rows

    def segments(self) -> list[Segment]:
        """Its part of the packed batch."""
        request = self.request
        tree, start = request.tree, request.prefix_len
        n = len(tree)
        if not self.prompt_rows:
            positions = request.layout.positions_behind(start, n)
            return [Segment(request.slot, start, tree.tokens, tree.ancestry, wanted=n, positions=positions)]
        stop = start + self.prompt_rows
        chain = Segment(
            request.slot,
            start,
            request.prompt[start:stop],
            wanted=int(self.ends_prompt),
            positions=request.layout.positions_of(start, stop),
            sees_all=not request.layout.causal,
        )
        if not self.ends_prompt or n == 1:
            return [chain]
        drafted = tree.ancestry.without_root()
        positions = request.layout.positions_behind(stop, n - 1)
        return [chain, Segment(request.slot, stop, tree.tokens[1:], drafted, wanted=n - 1, positions=positions)]

    def keep_visual(self) -> None:
        """Keeps the hidden states of the image's rows, for rules that look at them."""
        begin = self.request.prefix_len
        for rows in self.request.layout.visual_rows:
            start, stop = max(0, rows.start - begin), min(self.prompt_rows, rows.stop - begin)
            if start < stop:
                self.request.visual.append(self.hidden[start:stop].clone())  # the next forward overwrites them

    def verify_input(self) -> VerifyInput:
        """What the verifier needs of its tree."""
        request = self.request
        return VerifyInput(
            tree=request.tree,
            position=request.codec.position(request.tokens),
            slot=request.slot,
            root_row=request.root_row,
            rule=request.rule,
            visual=request.visual,
            ids=(*request.layout.ids, *request.tokens),
        )

    def chunk_input(self) -> DraftInput:
        """What a drafter needs of a chunk that does not end the prompt; nothing grows from it."""
        request = self.request
        start, stop = request.prefix_len - self.prompt_rows, request.prefix_len
        return DraftInput(
            slot=request.slot,
            prefix_len=stop,
            new=NewRows(self.hidden, request.prompt[start + 1 : stop + 1]),
            root=request.tree.tokens[0],
            max_depth=0,
            position=0,
            epoch=request.observation.epoch,
            layout=request.layout,
            mid_prompt=True,
            observation=request.observation,
            stream=request.observation.stream,
        )

    def draft_input(self, commit: Commit, embed: Callable[[Tensor], Tensor]) -> DraftInput:
        """What a drafter needs of the rows that a commit has made final.

        Args:
            commit: what this share commits.
            embed: token ids to embeddings.
        """
        request, codec = self.request, self.request.codec
        known = max(0, self.prompt_rows - 1)  # behind the prompt's last row comes the answer
        root = self.rows.stop - len(request.tree)
        new = NewRows(
            self.states[self.rows.start :][:known],
            request.prompt[len(request.prompt) - known :],
            self.states,
            nodes=tuple(root + node for node in commit.nodes),
            tokens=commit.tokens,
            embed=embed,
        )
        return DraftInput(
            slot=request.slot,
            prefix_len=request.prefix_len,
            new=new,
            root=commit.tokens_on_device[-1],
            max_depth=codec.remaining(request.tokens) - 1,
            position=codec.position(request.tokens),
            epoch=request.observation.epoch,
            layout=request.layout,
            answer=tuple(request.tokens),
            in_text=codec.in_text(request.tokens),
            observation=request.observation,
            stream=request.observation.stream,
        )

    @property
    def hidden(self) -> Tensor:
        """[rows, hidden], last hidden states of its rows; those of the tree are the last."""
        return self.states[self.rows.start : self.rows.stop]

    @property
    def tree_hidden(self) -> Tensor:
        """[nodes, hidden], last hidden states of the tree's nodes."""
        return self.hidden[-len(self.request.tree) :]
