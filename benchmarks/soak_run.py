"""The soak's loop: frames, new instructions and mode switches at random, and what is checked behind every tick."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from soak_policy import INSTRUCTIONS

from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, DropCounter, DropReason, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import Target

PICTURES = 8
_FRAME, _NEW_PICTURE, _NEW_EPOCH, _SWITCH = 0.6, 0.2, 0.01, 0.02  # chances per tick
_SAMPLES = 200
_FAULTS = (DropReason.ENGINE_FAULT, DropReason.NOT_FINITE, DropReason.NOT_AN_ACTION, DropReason.BAD_INSTRUCTION)
_PAGE = 4096


@dataclass
class Phase:
    """What so many ticks came to.

    Attributes:
        margins: between the two best logits, where an action first differs from the plain decoder's.
        cuda_graphs: how many there are, or why none; empty on a CPU.
        memory: (tick, resident bytes, bytes allocated on the GPU), a sample now and then.
        failures: of the checks behind every tick, the first few.
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
        """Takes note of a failure."""
        if len(self.failures) < 10:
            self.failures.append(what)


class Soak:
    """One engine, and the world around it.

    Args:
        policy: the target.
        seed: of everything that happens.
    """

    def __init__(self, policy: Target, seed: int) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        pixels = np.random.default_rng(seed)
        self._pictures = [pixels.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(PICTURES)]
        self._engine = Engine(policy, EngineSettings())
        self._engine.warm_up()
        self.plain = {
            (picture, text): self._decoded(picture, text) for picture in range(PICTURES) for text in INSTRUCTIONS
        }
        self._pending: set[int] = set()
        self._stamp_ns = self._last_action_ns = 0
        self._picture, self._epoch, self._instruction = 0, 0, INSTRUCTIONS[0]

    def run(self, ticks: int, choices: Sequence[EngineSettings]) -> Phase:
        """Ticks in the first of some settings; where there are more, it switches between them at random."""
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
        """Between the target's two best logits behind a prefix of an answer."""
        decoder = self._policy.decoder
        prompt = self._policy.prompt_embeddings(seen, self._policy.prompt_ids(seen.instruction))
        answer = decoder.embed_tokens(torch.tensor(prefix, dtype=torch.int64, device=decoder.device))
        rows = torch.cat((prompt, answer))
        cache = new_cache(decoder, slots=1, slot_rows=len(rows))
        best, second = packed_forward(decoder, [Segment(0, 0, rows)], cache).logits[0].topk(2).values.tolist()
        return float(best - second)

    def _check_slots(self, phase: Phase) -> None:
        engine = self._engine
        held = {request.slot for request in engine.scheduler.requests}
        if len(held) != self._engine.in_flight or engine.cache.free_slots + len(held) != engine.cache.slots:
            phase.fail(
                f"{engine.cache.slots} slots, {engine.cache.free_slots} free, {self._engine.in_flight} in flight"
            )

    def _check_end(self, phase: Phase) -> None:
        self._check_slots(phase)
        if self._engine.busy or self._pending:
            phase.fail(f"{len(self._pending)} frames never ended")
        self._pending.clear()

    def _memory(self) -> tuple[int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
        on_gpu = torch.cuda.memory_allocated() if self._policy.decoder.device.type == "cuda" else 0
        return resident, on_gpu
