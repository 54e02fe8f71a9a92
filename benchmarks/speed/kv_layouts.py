# SPDX-License-Identifier: Apache-2.0
"""Cost of moving keys and values: a pipeline's tick with them gathered, shifted, or left in place.

`naive` gathers the frames' keys and values into one contiguous buffer before every forward. `shift` is ActionFlow's: it
copies those of each stage into the next stage's slot. In `slots`, ours, nothing moves. Same packed forward, random
weights, a prompt of 290 rows; all three must give the same tokens. Every pipeline is full when it is timed.

    python -m benchmarks.speed.kv_layouts                                  # this CPU: tiny
    python -m benchmarks.speed.kv_layouts --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.harness import Device, Dtype, Out, Sizes, dtype_on, finish, result_head, take_turns
from benchmarks.random_policy import PROMPT, SIZES, TOKENS, random_decoder
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.decoder import PackedDecoder

_ROW_MULTIPLE = 16


def main(
    context: typer.Context,
    sizes: Sizes = "tiny",
    device: Device = "cpu",
    dtype: Dtype = "",
    stages: Annotated[int, typer.Option(help="Frames in flight and tokens per action.", min=2)] = TOKENS,
    repeats: Annotated[int, typer.Option(help="Turns of each layout.", min=1)] = 15,
    out: Out = None,
) -> None:
    """Times moving keys and values, and the whole tick including it."""
    chosen = dtype_on(device, dtype)
    result = result_head(context, chosen) | {"prompt_rows": PROMPT, "stages": stages, "sizes": {}}
    for name in sizes.split(","):
        with torch.inference_mode():
            decoder = random_decoder(SIZES[name].llama, dtype=chosen, device=device)
            result["sizes"][name] = _measure(decoder, device, stages, repeats)
    finish(result, out)


class Slots:
    """Ours: a frame keeps its slot from prefill to action, for as many ticks as tokens; nothing moves."""

    def __init__(self, decoder: PackedDecoder, prompt_rows: int, stages: int) -> None:
        rows = prompt_rows + stages
        self._decoder = decoder
        self.cache = new_cache(decoder, slots=stages, slot_rows=rows + -rows % _ROW_MULTIPLE)
        self.prompt_rows, self.stages = prompt_rows, stages
        self._tokens: list[list[int]] = []  # of each frame in flight, newest first
        self._roots = torch.empty(0, dtype=torch.int64, device=decoder.device)
        self._alone = Ancestry.from_parents((-1,), decoder.device)
        self._ticks = 0

    def tick(self, prompt: Tensor) -> tuple[int, ...]:
        """Starts a frame, decodes a token of each other frame, and returns the finished frame's tokens, if any."""
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
        """Stages that hold a frame during this tick."""
        return range(len(self._tokens) + 1)

    def committed(self, stage: int) -> int:
        """Committed rows of a frame when it enters a stage."""
        return self.prompt_rows + stage - 1 if stage else 0

    def written(self, stage: int) -> slice:
        """Rows that a stage's forward writes."""
        return slice(self.committed(stage), self.prompt_rows + stage)

    def slot_of(self, stage: int) -> int:
        """The slot of a stage's frame in this tick."""
        return (self._ticks - stage) % self.stages

    def before(self) -> None:
        """Moves rows for the coming forward."""

    def after(self) -> None:
        """Moves rows for the next tick's forward."""


class Shift(Slots):
    """ActionFlow's: a slot belongs to a stage, and after each tick every frame's rows are copied into the next slot."""

    def slot_of(self, stage: int) -> int:
        """The stage's own slot."""
        return stage

    def after(self) -> None:
        """Shifts the oldest frame first, because the next frame's rows go into its slot."""
        for stage in reversed(self.filled):
            if stage + 1 < self.stages:
                rows = slice(0, self.committed(stage + 1))
                for store in (self.cache.keys, self.cache.values):
                    store[:, stage + 1, rows].copy_(store[:, stage, rows])


class Naive(Slots):
    """Every frame has its own store; each tick gathers them all into one buffer and copies new rows back."""

    def __init__(self, decoder: PackedDecoder, prompt_rows: int, stages: int) -> None:
        super().__init__(decoder, prompt_rows, stages)
        cache = self.cache
        self._own = [
            tuple(torch.empty_like(store[:, 0]) for store in (cache.keys, cache.values)) for _ in range(self.stages)
        ]

    def slot_of(self, stage: int) -> int:
        """The frame's place in the buffer, by age."""
        return stage

    def before(self) -> None:
        """Gathers the committed rows."""
        for stage in self.filled:
            self._copy(stage, slice(0, self.committed(stage)), gather=True)

    def after(self) -> None:
        """Copies the written rows back."""
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
    """Returns the bytes that a full pipeline's tick copies, each read once and written once."""
    keys = pipeline.cache.keys
    row = 2 * keys.shape[0] * keys.shape[3] * keys.shape[4] * keys.element_size()
    stages = range(pipeline.stages)
    written = sum(pipeline.written(stage).stop - pipeline.written(stage).start for stage in stages)
    gathered = sum(
        pipeline.committed(stage) for stage in stages
    )  # shifted rows are those that the next tick would gather
    return row * {"naive": gathered + written, "shift": gathered, "slots": 0}[name]


def _measure(decoder: PackedDecoder, device: str, stages: int, repeats: int) -> dict[str, Any]:
    shape = (2 * stages, PROMPT, decoder.config.hidden_size)
    generator = torch.Generator(device).manual_seed(0)
    prompts = torch.randn(shape, generator=generator, device=device, dtype=decoder.dtype)
    pipelines = {name: layout(decoder, PROMPT, stages) for name, layout in LAYOUTS.items()}
    finished = {name: [pipeline.tick(prompt) for prompt in prompts] for name, pipeline in pipelines.items()}
    same = all(tokens == finished["slots"] for tokens in finished.values())
    if not same:
        raise SystemExit("the layouts do not give the same tokens")
    ticks = {name: partial(pipeline.tick, prompts[0]) for name, pipeline in pipelines.items()}
    tick_s = take_turns(ticks, repeats, device)
    move_s = take_turns({name: partial(_move, pipeline) for name, pipeline in pipelines.items()}, repeats, device)
    rows = {
        name: {
            "moved_bytes": moved_bytes(name, pipeline),
            "move_s": move_s[name],
            "tick_s": tick_s[name],
            "tick_over_slots": tick_s[name] / tick_s["slots"],
        }
        for name, pipeline in pipelines.items()
    }
    return {
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "same_tokens": same,
        "actions_compared": sum(map(bool, finished["slots"])),
        "layouts": rows,
    }


def _move(pipeline: Slots) -> None:
    """Performs one tick's moves without its forward; the store's content is not used afterwards."""
    pipeline.before()
    pipeline.after()


if __name__ == "__main__":
    typer.run(main)
