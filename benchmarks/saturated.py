# SPDX-License-Identifier: Apache-2.0
"""The real engine with a frame always waiting: rate, latency, forwards and memory of a decoding mode."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.acceptance_trace import ANYTHING, Trace
from benchmarks.harness import synchronise
from benchmarks.random_policy import TEXT_TOKENS, frame
from specvla_ros import Action, Engine, EngineSettings, Observation
from specvla_ros.engine.batch import TickWork
from specvla_ros.engine.outcome import DropReason, Outcome
from specvla_ros.engine.pace import mean_age
from specvla_ros.engine.prepared_images import PreparedImages, prepared_images
from specvla_ros.lab.planning.limits import AcceptanceLengths
from specvla_ros.lab.tally import percentiles
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.quantization import RoundedLinear
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import DraftSettings

_WARM = 12  # actions until a pipeline is full and has found its number of requests


def make_engine(target: Target, settings: EngineSettings, trace: Trace | None = None, *, graphs: bool = True) -> Engine:
    """Returns a warmed-up engine; with `trace`, its accept lengths follow the trace."""
    engine = Engine(target, settings)
    if graphs:
        engine.warm_up()
    else:
        engine.act(target.blank_observation())
        engine.close("")
    if trace is not None:
        trace.follow(engine)
    return engine


class Saturated:
    """An engine with a frame always waiting: the next one is admitted whenever there is room.

    Its images have just been prepared on a separate thread, as in a camera's callback.

    Args:
        now: the clock, in seconds.
        after_tick: called with each tick's work, before the clock is read for its outcomes.

    Attributes:
        admitted_s: admission time of each frame by stamp, in order.
        prepared_s: preparation time of each frame's images in seconds, by stamp.
        waiting: the next frame; None if none is left.
    """

    def __init__(
        self,
        engine: Engine,
        frames: Iterator[Observation],
        now: Callable[[], float] = time.perf_counter,
        after_tick: Callable[[TickWork], None] = lambda _: None,
    ) -> None:
        self._engine, self._frames, self._now, self._after_tick = engine, frames, now, after_tick
        self.admitted_s: dict[int, float] = {}
        self.prepared_s: dict[int, float] = {}
        self._camera = ThreadPoolExecutor(1)
        self.waiting, self._prepared = self._next()

    def tick(self) -> list[tuple[Outcome, float]]:
        """Runs a tick and returns its outcomes, each with the seconds since its frame's admission."""
        if self.waiting is not None and self._engine.has_room:
            pictures, self.prepared_s[self.waiting.stamp_ns] = self._prepared.result()
            self.admitted_s[self.waiting.stamp_ns] = self._now()
            self._engine.submit(self.waiting, pictures)
            self.waiting, self._prepared = self._next()
        outcomes = self._engine.tick()
        self._after_tick(self._engine.last_work)
        return [(outcome, self._now() - self.admitted_s[outcome.observation.stamp_ns]) for outcome in outcomes]

    def _next(self) -> tuple[Observation | None, Future[tuple[PreparedImages | None, float]]]:
        """The next frame and a future of its prepared images."""
        observation = next(self._frames, None)
        return observation, self._camera.submit(_prepared, self._engine.target, observation)


def _prepared(target: Target, observation: Observation | None) -> tuple[PreparedImages | None, float]:
    """An observation's prepared images and the preparation time in seconds."""
    started = time.perf_counter()
    pictures = prepared_images(target, observation) if observation is not None else None
    if pictures is not None:
        pictures.prepare()
    return pictures, time.perf_counter() - started


class Contestant(Protocol):
    """A contestant that takes turns with others."""

    def add_turn(self, actions: int) -> None:
        """Times a number of actions."""

    def summary(self) -> dict[str, Any]:
        """Returns the figures over all turns."""


def compete(contestants: Mapping[Any, Contestant], *, actions: int, repeats: int) -> dict[Any, dict[str, Any]]:
    """Lets contestants take turns and returns their figures."""
    for _ in range(repeats):
        for contestant in contestants.values():
            contestant.add_turn(actions)
    return {name: contestant.summary() for name, contestant in contestants.items()}


def random_frames() -> Iterator[Observation]:
    """Endless images of a camera."""
    return (frame(time.monotonic_ns()) for _ in itertools.count())


class EngineTurns:
    """A decoding mode as a contestant. Its engine and memory exist for one turn or, with `keep`, for all turns.

    Args:
        lengths: accept lengths of a trace to follow; None: the policy's own.
        frames: makes the images of a turn.
    """

    def __init__(
        self,
        policy: OpenVLATarget,
        settings: EngineSettings,
        lengths: AcceptanceLengths | None,
        frames: Callable[[], Iterator[Observation]] = random_frames,
        *,
        graphs: bool = True,
        keep: bool = False,
    ) -> None:
        self._policy, self._settings, self._frames = policy, settings, frames
        self._trace = Trace(lengths) if lengths is not None else None
        self._graphs, self._keep = graphs, keep
        self._engine: Engine | None = None
        self._latency_s: list[float] = []
        self._first_s: list[float] = []  # latency of first actions
        self._begun_ns = 0  # stamp of the answer whose first action is out
        self._prepared_s: list[float] = []
        self._rates_hz: list[float] = []
        self._ages_s: list[float] = []
        self._actions: list[Action] = []
        self._admitted = self._overtaken = self._peak_bytes = 0
        self._cuda_graphs = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The last action's tokens."""
        return self._actions[-1].tokens

    def add_turn(self, actions: int) -> None:
        """Fills the pipeline, then times a number of actions; frames in flight stay in flight in between."""
        device = str(self._policy.decoder.device)
        memory = GpuMemory(self._policy.model) if device.startswith("cuda") else None
        if memory is not None:
            memory.begin()
        fresh = self._engine is None
        engine = self._engine or make_engine(self._policy, self._settings, self._trace, graphs=self._graphs)
        engine.reset()
        engine.takes_partial = True
        run = Saturated(engine, self._frames())
        done = 0
        while done < min(_WARM, actions):
            done += sum(isinstance(outcome, Action) and not outcome.partial for outcome, _ in run.tick())
        admitted = len(run.admitted_s)
        synchronise(device)
        started, acted = time.perf_counter(), list[tuple[float, float]]()
        while len(acted) < actions:
            for outcome, seconds in run.tick():
                prepared_s = run.prepared_s[outcome.observation.stamp_ns]
                self._prepared_s.append(prepared_s)
                if self._add(outcome, prepared_s + seconds):
                    acted.append((time.perf_counter(), prepared_s + seconds))
        synchronise(device)
        self._rates_hz.append(len(acted) / (time.perf_counter() - started))
        self._ages_s.append(mean_age(acted))
        self._admitted += len(run.admitted_s) - admitted
        self._cuda_graphs = str(engine.describe().get("cuda_graphs", ""))
        store = engine.cache.keys.nbytes + engine.cache.values.nbytes
        if fresh:
            self._peak_bytes = memory.end() if memory is not None else store
        self._engine = engine if self._keep else None

    def _add(self, outcome: Outcome, seconds: float) -> bool:
        """True if a robot acts on the outcome, an answer's first actions; the only drop allowed is being overtaken."""
        if isinstance(outcome, Action):
            stamp_ns = outcome.observation.stamp_ns
            first = stamp_ns != self._begun_ns
            self._begun_ns = stamp_ns if outcome.partial else 0
            if first:
                self._first_s.append(seconds)
            if not outcome.partial:
                self._latency_s.append(seconds)
                self._actions.append(outcome)
            return first
        if outcome.reason is not DropReason.OVERTAKEN:
            raise RuntimeError(f"a frame was dropped: {outcome.reason.value}: {outcome.detail}")
        self._overtaken += 1
        return False

    def summary(self) -> dict[str, Any]:
        """Returns the figures for a result."""
        records = [action.record for action in self._actions]
        return rate_and_latency(self._latency_s, self._rates_hz, self._peak_bytes) | {
            "first_action_s": _percentiles(self._first_s),
            "image_age_s": statistics.median(self._ages_s),
            "pictures_s": statistics.fmean(self._prepared_s),
            "forwards_per_action": statistics.fmean(record.forwards for record in records),
            "in_flight": statistics.fmean(record.in_flight for record in records),
            "overtaken": self._overtaken / max(1, self._admitted),
            "cuda_graphs": self._cuda_graphs,
        }


def rate_and_latency(latency_s: Sequence[float], rates_hz: Sequence[float], peak_bytes: int | None) -> dict[str, Any]:
    """Returns the figures that every contestant has.

    Args:
        latency_s: seconds of each action.
        rates_hz: actions per second of each turn; the rate is their median.
        peak_bytes: peak of GPU memory, including weights, or on a CPU size of the KV cache; None if unknown.
    """
    return {
        "action_rate_hz": statistics.median(rates_hz),
        "rates_hz": list(rates_hz),
        "latency_s": _percentiles(latency_s),
        "peak_bytes": peak_bytes,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {name: value for name, value in percentiles(seconds).items() if name in ("mean", "p50", "p95")}


def mode_settings(
    mode: str, lengths: AcceptanceLengths, *, tokens: int, draft: DraftSettings, chunks: int = 1
) -> EngineSettings:
    """Returns a mode's settings, with room for as many requests as it can use.

    Args:
        tokens: tokens per action; plain pipelining has one stage per token.
        chunks: forwards over which a prompt is spread.
    """
    stages = {"pipeline": tokens, "specpipe": 1 + int(np.ceil(lengths.verifications(tokens - 1)))}
    return EngineSettings(
        mode,
        max_in_flight=stages.get(mode, 0),
        prefill_chunks=chunks,
        max_text_tokens=TEXT_TOKENS,
        draft=draft,
        acceptance=ANYTHING,
    )


@dataclass
class GpuMemory:
    """Peak GPU memory of a contestant while others keep theirs: shared weights plus its own allocations."""

    model: nn.Module

    def __post_init__(self) -> None:
        self._weights = weight_bytes(self.model)
        self._kept = 0  # its own bytes from previous turns
        self._before = 0

    def begin(self) -> None:
        """Releases unused memory; call it before a turn."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> int:
        """Returns the turn's peak in bytes."""
        mine = self._weights + self._kept - self._before
        self._kept += torch.cuda.memory_allocated() - self._before
        return torch.cuda.max_memory_allocated() + mine


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of parameters, buffers and packed weights; those without storage count 0."""
    tensors = [*model.parameters(), *model.buffers()]
    packed = [module.packed for module in model.modules() if isinstance(module, RoundedLinear) and module.packed]
    stored = sum(_stored_bytes(tensor) for tensor in tensors if not tensor.is_meta)
    return stored + sum(weight.nbytes for weight in packed)


def _stored_bytes(tensor: Tensor) -> int:
    """Stored bytes of a tensor; a quantised one reports its original dtype and is flattened to its parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)
