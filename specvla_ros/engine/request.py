"""One observation on its way through the engine."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specvla_kernels.layout import Ancestry
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import DecodeRecord, StageTimings
from specvla_ros.engine.segment import Segment


@dataclass
class Request:
    """The state that a request carries between ticks.

    Attributes:
        observation: what it answers.
        slot: its KV slot.
        prompt: [prompt_len, hidden], embeddings.
        prefix_len: committed rows of the slot.
        wait_s: seconds from receipt to admission.
        tokens: committed action tokens. The last one's keys and values are not written yet: it is the next root.

    The rest is the record of its ticks, for DecodeStats.
    """

    observation: Observation
    slot: int
    prompt: Tensor
    wait_s: float
    prefix_len: int = 0
    tokens: list[int] = field(default_factory=list)
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

    def segment(self) -> Segment:
        """Its share of the next forward: the prompt, then one tree per tick."""
        if self.prefilling:
            return Segment(self.slot, 0, self.prompt)
        root = torch.tensor(self.tokens[-1:], dtype=torch.int64, device=self.prompt.device)
        return Segment(self.slot, self.prefix_len, root, ancestry=Ancestry.of((-1,)))

    def timings(self) -> StageTimings:
        """Seconds spent in each stage so far."""
        return StageTimings(self.wait_s, self.vision_s, self.prefill_s, self.decode_s)

    def record(self, mode: str, in_flight: int) -> DecodeRecord:
        """How it was decoded."""
        return DecodeRecord(
            mode=mode,
            tokens_per_forward=tuple(self.tokens_per_forward),
            accept_lengths=tuple(self.accept_lengths),
            tree_nodes=tuple(self.tree_nodes),
            tick_s=tuple(self.tick_s),
            in_flight=in_flight,
        )
