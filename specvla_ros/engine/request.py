"""One observation on its way through the engine."""

from dataclasses import dataclass, field

from torch import Tensor

from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import DecodeRecord, StageTimings
from specvla_ros.engine.segment import Segment
from specvla_ros.engine.verifier import Commit
from specvla_ros.speculation.accept import AcceptanceRule
from specvla_ros.speculation.tree import Tree


@dataclass(eq=False)
class Request:
    """The state that a request carries between ticks; each is itself alone, whatever it holds.

    Attributes:
        observation: what it answers.
        slot: its KV slot.
        prompt: [prompt_len, hidden], embeddings; its keys and values may come in chunks.
        prompt_ids: the prompt's text.
        wait_s: seconds from receipt to admission.
        tree: what the next forward verifies. Its root is the last committed token, whose keys and values are not
            written yet; behind a prompt it is the prompt's last row, and its token is not read.
        rule: decides which drafts are accepted, from its first token to its last.
        prefix_len: committed rows of the slot.
        tokens: committed answer tokens.
        visual: last hidden states of the image's rows, chunk by chunk, where the acceptance rule asks for them.

    The rest is the record of its ticks, for DecodeStats.
    """

    observation: Observation
    slot: int
    prompt: Tensor
    prompt_ids: tuple[int, ...]
    wait_s: float
    tree: Tree
    rule: AcceptanceRule
    prefix_len: int = 0
    tokens: list[int] = field(default_factory=list)
    visual: list[Tensor] = field(default_factory=list)
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
        return self.prefix_len < self.prompt.shape[0]

    @property
    def root_row(self) -> int:
        """The slot's row of the tree's root."""
        return self.prompt.shape[0] - 1 if self.prefilling else self.prefix_len

    def segments(self, prompt_rows: int) -> list[Segment]:
        """Its share of the next forward: a chunk of the prompt, its end with what is drafted behind it, or a tree.

        Args:
            prompt_rows: of the prompt, in this forward; 0 behind it.
        """
        n, start = len(self.tree), self.prefix_len
        if not prompt_rows:
            return [Segment(self.slot, start, self.tree.tokens, self.tree.ancestry, wanted=n)]
        stop = start + prompt_rows
        ends = stop == len(self.prompt)
        chain = Segment(self.slot, start, self.prompt[start:stop], wanted=int(ends))
        if not ends or n == 1:
            return [chain]
        behind = self.tree.ancestry.without_root()
        return [chain, Segment(self.slot, stop, self.tree.tokens[1:], behind, wanted=n - 1)]

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

    def record(self, mode: str, acceptance: str, in_flight: int) -> DecodeRecord:
        """How it was decoded."""
        return DecodeRecord(
            mode=mode,
            acceptance=acceptance,
            tokens_per_forward=tuple(self.tokens_per_forward),
            accept_lengths=tuple(self.accept_lengths),
            tree_nodes=tuple(self.tree_nodes),
            bins_off=tuple(self.bins_off),
            why=tuple(self.why),
            tick_s=tuple(self.tick_s),
            in_flight=in_flight,
        )
