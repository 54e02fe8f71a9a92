"""A plain pipeline of K stages over three ways to keep keys and values: gathered, shifted, or left where they are.

A tick carries the newest frame's prefill and one token of each frame in flight, in one packed forward; stage i has
committed its prompt and i - 1 answer rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.llama import LlamaDecoder

_ROW_MULTIPLE = 16


class Slots:
    """Ours: a frame keeps its slot from its prefill to its action; nothing moves.

    Args:
        decoder: the target.
        prompt_rows: of every frame.
        stages: ticks, and tokens, of a frame.
    """

    def __init__(self, decoder: LlamaDecoder, prompt_rows: int, stages: int) -> None:
        rows = prompt_rows + stages
        self._decoder = decoder
        self.cache = new_cache(decoder, slots=stages, slot_rows=rows + -rows % _ROW_MULTIPLE)
        self.prompt_rows, self.stages = prompt_rows, stages
        self._tokens: list[list[int]] = []  # of each frame in flight, the newest first
        self._roots = torch.empty(0, dtype=torch.int64, device=decoder.device)
        self._alone = Ancestry.from_parents((-1,), decoder.device)
        self._ticks = 0

    def tick(self, prompt: Tensor) -> tuple[int, ...]:
        """Begins a frame and brings the others on by a token; the tokens of the frame that ends, once there is one."""
        self.before()
        segments = [Segment(self.slot_of(0), 0, prompt)]
        for stage in range(1, len(self._tokens) + 1):
            root = self._roots[stage - 1 : stage]
            segments.append(Segment(self.slot_of(stage), self.committed(stage), root, self._alone))
        choices = packed_forward(self._decoder, segments, self.cache).logits.argmax(dim=-1)
        self.after()
        self._ticks += 1
        self._tokens.insert(0, [])
        for tokens, choice in zip(self._tokens, choices.tolist(), strict=True):
            tokens.append(choice)
        self._roots = choices[: self.stages - 1]
        return tuple(self._tokens.pop()) if len(self._tokens) == self.stages else ()

    @property
    def filled(self) -> Sequence[int]:
        """Stages that a frame is in during this tick."""
        return range(len(self._tokens) + 1)

    def committed(self, stage: int) -> int:
        """Rows that a frame brings into a stage."""
        return self.prompt_rows + stage - 1 if stage else 0

    def written(self, stage: int) -> slice:
        """Rows that a stage's forward writes."""
        return slice(self.committed(stage), self.prompt_rows + stage)

    def slot_of(self, stage: int) -> int:
        """Where a stage's frame lies in this tick."""
        return (self._ticks - stage) % self.stages

    def before(self) -> None:
        """What is moved in front of the forward."""

    def after(self) -> None:
        """What is moved behind the forward."""


class Shift(Slots):
    """ActionFlow's: a stage has its place, and behind each tick every frame's rows are copied to the next place."""

    def slot_of(self, stage: int) -> int:
        """The stage's own."""
        return stage

    def after(self) -> None:
        """The oldest first, as its place is the next one's."""
        for stage in reversed(self.filled):
            if stage + 1 < self.stages:
                rows = slice(0, self.committed(stage + 1))
                for store in (self.cache.keys, self.cache.values):
                    store[:, stage + 1, rows].copy_(store[:, stage, rows])


class Naive(Slots):
    """Every frame keeps its own store; each tick gathers them all into one buffer, and takes back what was written."""

    def __init__(self, decoder: LlamaDecoder, prompt_rows: int, stages: int) -> None:
        super().__init__(decoder, prompt_rows, stages)
        cache = self.cache
        self._own = [
            tuple(torch.empty_like(store[:, 0]) for store in (cache.keys, cache.values)) for _ in range(self.stages)
        ]

    def slot_of(self, stage: int) -> int:
        """In the buffer, by age."""
        return stage

    def before(self) -> None:
        """Gathers what was committed."""
        for stage in self.filled:
            self._copy(stage, slice(0, self.committed(stage)), gather=True)

    def after(self) -> None:
        """Takes back what was written."""
        for stage in self.filled:
            self._copy(stage, self.written(stage), gather=False)

    def _copy(self, stage: int, rows: slice, *, gather: bool) -> None:
        own = self._own[super().slot_of(stage)]
        for store, mine in zip((self.cache.keys, self.cache.values), own, strict=True):
            if gather:
                store[:, stage, rows].copy_(mine[:, rows])
            else:
                mine[:, rows].copy_(store[:, stage, rows])


LAYOUTS = {"naive": Naive, "shift": Shift, "slots": Slots}


def moved_bytes(name: str, pipeline: Slots) -> int:
    """Bytes that a full pipeline's tick copies, each read once and written once."""
    keys = pipeline.cache.keys
    row = 2 * keys.shape[0] * keys.shape[3] * keys.shape[4] * keys.element_size()
    stages = range(pipeline.stages)
    written = sum(pipeline.written(stage).stop - pipeline.written(stage).start for stage in stages)
    gathered = sum(pipeline.committed(stage) for stage in stages)  # what is shifted is what the next tick would gather
    return row * {"naive": gathered + written, "shift": gathered, "slots": 0}[name]
