# SPDX-License-Identifier: Apache-2.0
"""A soak of the real engine: frames, new instructions and mode switches at random, over many ticks of every mode.

Every action must be the plain decoder's for its frame, every frame must end once, no slot may leak, and memory must not
grow. Where rounding decides a tie otherwise, the two best logits must be nearer than a stated bound.

    PYTHONPATH=test python -m faults.soak                                  # this CPU
    PYTHONPATH=test python -m faults.soak --device cuda --dtype float32    # a GPU

Exit code 1: a check failed; the JSON file says which.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from support.checkpoints import bins_of
from torch import nn

from benchmarks.harness import Device, Out, finish, result_head
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, DropCounter, DropReason, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.plans import NanoShape
from specvla_ros.lab.training.artifacts import save_draft_head, save_weights
from specvla_ros.lab.training.nano import write_nano
from specvla_ros.models.checkpoint import DTYPES, load_target
from specvla_ros.models.families.openvla.target import OpenVLATarget, require_openvla
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.settings import DRAFT_FOLDER, DraftSettings, adjusted

# Logits of the soak's policy spread over about ±5; a rounding in its two layers moves them by less than this.
MARGINS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.4}
# By the slope over the second half of the ticks. If 5000 ticks kept a frame of the soak's each, that would be 45 MiB.
RESIDENT_GROWTH, GPU_GROWTH = 8 << 20, 4 << 20
_TREE = adjusted(DraftSettings(nodes=16, top_k=4, depth=4), temporal=True)
PICTURES = 8
_FRAME, _NEW_PICTURE, _NEW_EPOCH, _SWITCH = 0.6, 0.2, 0.01, 0.02  # probabilities per tick
_SAMPLES = 200
_FAULTS = (
    DropReason.ENGINE_FAULT,
    DropReason.NOT_FINITE,
    DropReason.NOT_AN_ACTION,
    DropReason.BROKEN_OFF,
    DropReason.BAD_INSTRUCTION,
)
_PAGE = 4096
INSTRUCTIONS = ("lift the red block", "push the green block", "put the blue block in the box")
_SHAPE = NanoShape(image_size=56, patch_size=14, vision_dim=32, vision_depth=2, hidden_size=64, layers=2, head_dim=32)
_STATISTICS = {"soak": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}}}


def phases() -> dict[str, list[EngineSettings]]:
    """The settings of each phase: one mode by itself, then all of them in random order."""
    every = [EngineSettings(mode, draft=_TREE) for mode in ("ar", "spec")]
    every += [
        EngineSettings(mode, prefill_chunks=chunks, in_order=in_order, draft=_TREE)
        for mode, chunks, in_order in product(("pipeline", "specpipe"), (1, 2, 3), (False, True))
    ]
    alone = {
        "ar": every[0],
        "spec": every[1],
        "pipeline": EngineSettings("pipeline"),
        "specpipe": EngineSettings("specpipe", prefill_chunks=2, draft=_TREE),
    }
    return {name: [settings] for name, settings in alone.items()} | {"switching": every}


def main(
    context: typer.Context,
    ticks: Annotated[int, typer.Option(help="Of each mode, and of switching between them.", min=10)] = 10000,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of everything that happens.")] = 0,
    out: Out = None,
) -> None:
    """Runs every phase and checks it."""
    with tempfile.TemporaryDirectory() as directory:
        policy = soak_policy(Path(directory), dtype=dtype, device=device)
        soak = Soak(policy, seed)
        found = {name: soak.run(ticks, choices).as_json(dtype) for name, choices in phases().items()}
    passed = not any(phase["failures"] for phase in found.values())
    result = result_head(context, DTYPES[dtype]) | {
        "ticks": ticks,
        "shapes": _shapes(policy),
        "different_answers": len(set(soak.plain.values())),
        "pictures": PICTURES,
        "bounds": {"margin": MARGINS[dtype], "resident_growth": RESIDENT_GROWTH, "gpu_growth": GPU_GROWTH},
        "passed": passed,
        "phases": found,
    }
    finish(result, out)
    raise typer.Exit(0 if passed else 1)


def _growth(ticks: np.ndarray, memory: np.ndarray) -> float:
    """Bytes over the second half, by a line through it."""
    ticks, memory = (column[len(column) // 2 :] for column in (ticks, memory))
    slope = np.polyfit(ticks - ticks[0], memory - memory[0], 1)[0]
    return float(slope * (ticks[-1] - ticks[0]))


def _shapes(policy: OpenVLATarget) -> dict[str, int]:
    llama = policy.decoder.config
    return {
        "hidden_size": llama.hidden_size,
        "layers": llama.num_hidden_layers,
        "heads": llama.num_attention_heads,
        "vocab_size": llama.vocab_size,
        "image_tokens": policy.image_tokens,
    }


@dataclass
class Phase:
    """What happened in so many ticks.

    Attributes:
        margins: between the two best logits, where an action first differs from the plain decoder's.
        cuda_graphs: their number, or why there are none; empty on a CPU.
        memory: (tick, resident bytes, bytes allocated on the GPU), a sample now and then.
        failures: of the checks after every tick, the first few.
    """

    cuda_graphs: str = ""
    submitted: int = 0
    actions: int = 0
    forwards: int = 0
    switches: int = 0
    epochs: int = 0
    margins: list[float] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(default_factory=list)
    drops: DropCounter = field(default_factory=DropCounter)
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        """Records a failure, if there are not many yet."""
        if len(self.failures) < 10:
            self.failures.append(what)

    def as_json(self, dtype: str) -> dict[str, Any]:
        """Figures for a result; checks what only the end of a phase can tell."""
        ticks, resident, on_gpu = (np.array(column, dtype=np.float64) for column in zip(*self.memory, strict=True))
        grown, grown_on_gpu = _growth(ticks, resident), _growth(ticks, on_gpu)
        widest = max(self.margins, default=0.0)
        if not self.actions:
            self.fail("there was no action")
        if widest > MARGINS[dtype]:
            self.fail(f"an action differs where the two best logits are {widest:g} apart")
        if grown > RESIDENT_GROWTH:
            self.fail(f"resident memory grew by {grown / 2**20:.1f} MiB")
        if grown_on_gpu > GPU_GROWTH:
            self.fail(f"memory on the GPU grew by {grown_on_gpu / 2**20:.1f} MiB")
        return {
            "cuda_graphs": self.cuda_graphs,
            "submitted": self.submitted,
            "actions": self.actions,
            "forwards_per_action": self.forwards / self.actions if self.actions else 0.0,
            "epochs": self.epochs,
            "switches": self.switches,
            "drops": {name: count for name, count in self.drops.by_name().items() if count},
            "different_actions": len(self.margins),
            "difference_rate": len(self.margins) / self.actions if self.actions else 0.0,
            "widest_margin": widest,
            "resident_growth": grown,
            "gpu_growth": grown_on_gpu,
            "resident_bytes": int(resident[-1]),
            "failures": self.failures,
        }


class Soak:
    """One engine, and the world around it.

    Args:
        policy: the target.
        seed: seed of everything that happens.
    """

    def __init__(self, policy: OpenVLATarget, seed: int) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        pixels = np.random.default_rng(seed)
        self._pictures = [pixels.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(PICTURES)]
        self._engine = Engine(policy, EngineSettings("ar"))
        self._engine.warm_up()
        self.plain = {
            (picture, text): self._decoded(picture, text) for picture in range(PICTURES) for text in INSTRUCTIONS
        }
        self._pending: set[int] = set()
        self._stamp_ns = self._last_action_ns = 0
        self._picture, self._epoch, self._instruction = 0, 0, INSTRUCTIONS[0]

    def run(self, ticks: int, choices: Sequence[EngineSettings]) -> Phase:
        """Ticks in the first of the settings; where there are more, it switches between them at random."""
        phase = Phase()
        self._engine.switch(choices[0])
        phase.cuda_graphs = str(self._engine.describe().get("cuda_graphs", ""))
        for tick in range(ticks):
            if self._random.random() < _NEW_EPOCH:
                self._new_epoch(phase)
            if len(choices) > 1 and self._random.random() < _SWITCH:
                self._take(phase, self._engine.switch(self._random.choice(choices)))
                phase.switches += 1
            if self._random.random() < _FRAME:
                self._take(phase, self._engine.submit(self._frame()))
                phase.submitted += 1
            self._take(phase, self._engine.tick())
            self._check_slots(phase)
            if tick % max(1, ticks // _SAMPLES) == 0:
                phase.memory.append((tick, *self._memory()))
        self._take(phase, self._engine.flush())
        self._check_end(phase)
        return phase

    def _decoded(self, picture: int, instruction: str) -> tuple[int, ...]:
        """The plain decoder's answer."""
        self._engine.reset()
        outcome = self._engine.act(Observation(self._pictures[picture], instruction, stamp_ns=1))
        assert isinstance(outcome, Action)
        self._engine.reset()
        return outcome.tokens

    def _new_epoch(self, phase: Phase) -> None:
        self._take(phase, self._engine.flush())
        self._epoch += 1
        self._instruction = self._random.choice(INSTRUCTIONS)
        phase.epochs += 1

    def _frame(self) -> Observation:
        """The next frame; the same picture stays for a while, so that earlier actions are good drafts."""
        if self._random.random() < _NEW_PICTURE:
            self._picture = self._random.randrange(PICTURES)
        self._stamp_ns += self._random.randint(1, 100)
        self._pending.add(self._stamp_ns)
        image, name = self._pictures[self._picture], str(self._picture)
        return Observation(image, self._instruction, self._stamp_ns, frame_id=name, epoch=self._epoch)

    def _take(self, phase: Phase, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            stamp_ns = outcome.observation.stamp_ns
            if stamp_ns not in self._pending:
                phase.fail(f"the frame of stamp {stamp_ns} ended twice")
            self._pending.discard(stamp_ns)
            if isinstance(outcome, Action):
                self._check_action(phase, outcome)
            else:
                phase.drops.add(outcome.reason)
                if outcome.reason in _FAULTS:
                    phase.fail(f"{outcome.reason.value}: {outcome.detail}")

    def _check_action(self, phase: Phase, action: Action) -> None:
        seen = action.observation
        phase.actions += 1
        phase.forwards += action.record.forwards
        if seen.stamp_ns <= self._last_action_ns:
            phase.fail("an action is older than the one before it")
        self._last_action_ns = seen.stamp_ns
        if seen.epoch != self._epoch:
            phase.fail("an action of an older instruction came through")
        plain = self.plain[int(seen.frame_id), seen.instruction]
        if action.tokens != plain:
            same = next(i for i, (a, b) in enumerate(zip(action.tokens, plain, strict=True)) if a != b)
            phase.margins.append(self._margin(seen, plain[:same]))

    @torch.inference_mode()
    def _margin(self, seen: Observation, prefix: Sequence[int]) -> float:
        """The difference between the target's two best logits after a prefix of an answer."""
        decoder = self._policy.decoder
        prompt = self._policy.prompt_embeddings(seen, self._policy.prompt.ids(seen.instruction))
        answer = decoder.embed_tokens(torch.tensor(prefix, dtype=torch.int64, device=decoder.device))
        rows = torch.cat((prompt, answer))
        cache = new_cache(decoder, slots=1, slot_rows=len(rows))
        best, second = packed_forward(decoder, [Segment(0, 0, rows)], cache).logits[0].topk(2).values.tolist()
        return float(best - second)

    def _check_slots(self, phase: Phase) -> None:
        engine, cache = self._engine, self._engine.cache
        held = {request.slot for request in engine.scheduler.requests}
        if len(held) != len(engine.scheduler.requests) or cache.free_slots + len(held) != cache.slots:
            phase.fail(f"{cache.slots} slots, {cache.free_slots} free, {len(engine.scheduler.requests)} in flight")

    def _check_end(self, phase: Phase) -> None:
        self._check_slots(phase)
        if self._engine.busy or self._pending:
            phase.fail(f"{len(self._pending)} frames never ended")
        self._pending.clear()

    def _memory(self) -> tuple[int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
        on_gpu = torch.cuda.memory_allocated() if self._policy.decoder.device.type == "cuda" else 0
        return resident, on_gpu


@torch.no_grad()
def soak_policy(directory: Path, *, dtype: str, device: str) -> OpenVLATarget:
    """Writes the checkpoint with a draft head, and loads it."""
    write_nano(directory, _SHAPE, INSTRUCTIONS, _STATISTICS, seed=0)
    policy = require_openvla(load_target(directory, device="cpu", dtype="float32"))
    _spread(policy)
    save_weights(directory / "model.safetensors", policy.model.checkpoint_tensors())
    save_draft_head(directory / DRAFT_FOLDER, _head(policy))
    return require_openvla(load_target(directory, device=device, dtype=dtype))


def _spread(policy: OpenVLATarget) -> None:
    """Makes weights large enough for answers to differ, and the output head give actions only."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.decoder.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
    tokenizer, head = bins_of(policy).tokenizer, policy.decoder.lm_head.weight
    head[: tokenizer.first_id] = 0.0
    head[tokenizer.vocab_size :] = 0.0


def _head(policy: OpenVLATarget) -> EagleHead:
    head = EagleHead(policy.decoder.config).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            nn.init.ones_(parameter)
    return head


if __name__ == "__main__":
    typer.run(main)
