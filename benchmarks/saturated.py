"""The real engine in real time with a frame always waiting: rate, latency and forwards of one decoding mode."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from acceptance_trace import ANYTHING, Trace
from gpu_memory import GpuMemory
from random_policy import TEXT_TOKENS, RandomPolicy, frame
from timing import synchronise

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.planning.limits import AcceptanceLengths
from specvla_ros.speculation.settings import DraftSettings

_WARM = 12  # actions until a pipeline is full and knows how many requests it should hold


@dataclass(frozen=True)
class Run:
    """How modes are compared.

    Args:
        lengths: accepted tokens, of the trace.
        nodes: of a tree, the root included.
        actions: timed in each turn.
        repeats: turns of each contestant.
    """

    lengths: AcceptanceLengths
    nodes: int
    actions: int
    repeats: int


@dataclass
class Turns:
    """What one mode did, over its turns.

    Attributes:
        latency_s: from a frame's admission to its action.
        rates_hz: actions per second, of each turn.
        forwards, in_flight: of each action.
        accepted: drafted tokens, of each verification.
        tokens: the last action's.
        begun, overtaken: frames.
        peak_bytes: of the GPU's memory, weights included; of the KV cache on a CPU.
        cuda_graphs: how many there are, or why none; empty on a CPU.
    """

    latency_s: list[float] = field(default_factory=list)
    rates_hz: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    begun: int = 0
    overtaken: int = 0
    peak_bytes: int = 0
    cuda_graphs: str = ""

    def summary(self) -> dict[str, object]:
        """Figures for a result."""
        return timing(self.latency_s, self.rates_hz, self.peak_bytes) | {
            "forwards_per_action": statistics.fmean(self.forwards),
            "in_flight": statistics.fmean(self.in_flight),
            "accepted_per_verification": statistics.fmean(self.accepted) if self.accepted else 0.0,
            "overtaken": self.overtaken / max(1, self.begun),
            "cuda_graphs": self.cuda_graphs,
        }


def timing(latency_s: Sequence[float], rates_hz: Sequence[float], peak_bytes: int | None) -> dict[str, object]:
    """Rate and latency; the rate is the median of the turns."""
    return {
        "action_rate_hz": statistics.median(rates_hz),
        "rates_hz": list(rates_hz),
        "latency_s": {
            "mean": statistics.fmean(latency_s),
            "p50": float(np.percentile(latency_s, 50)),
            "p95": float(np.percentile(latency_s, 95)),
        },
        "peak_bytes": peak_bytes,
    }


def settings_of(mode: str, lengths: AcceptanceLengths, *, tokens: int, nodes: int, chunks: int = 1) -> EngineSettings:
    """One mode's settings, with room for as many requests as it can use.

    Args:
        tokens: of an action; plain pipelining has a stage for each.
        nodes: of a tree, the root included.
        chunks: forwards over which a prompt is spread.
    """
    stages = {"pipeline": tokens, "specpipe": 1 + int(np.ceil(lengths.verifications(tokens - 1)))}
    return EngineSettings(
        mode,
        max_in_flight=stages.get(mode, 0),
        prefill_chunks=chunks,
        max_text_tokens=TEXT_TOKENS,
        draft=DraftSettings(nodes=nodes),
        acceptance=ANYTHING,
    )


def add_turn(turns: Turns, policy: RandomPolicy, settings: EngineSettings, trace: Trace, actions: int) -> None:
    """One turn: fills the pipeline, then times so many actions. The engine and its memory live for the turn."""
    device = str(policy.decoder.device)
    on_gpu = GpuMemory(policy.model) if device.startswith("cuda") else None
    if on_gpu is not None:
        on_gpu.begin()
    engine = Engine(policy, settings)
    engine.runner.graphs.warm_up()  # `Engine.warm_up` would also decode an image, and the trace with it
    turns.cuda_graphs = engine.runner.graphs.status
    trace.follow(engine)
    begun: dict[int, float] = {}
    _run(engine, Turns(), min(_WARM, actions), begun)
    synchronise(device)
    started = time.perf_counter()
    done = _run(engine, turns, actions, begun)
    synchronise(device)
    turns.rates_hz.append(done / (time.perf_counter() - started))
    cache = engine.cache
    turns.peak_bytes = on_gpu.end() if on_gpu is not None else cache.keys.nbytes + cache.values.nbytes


def _run(engine: Engine, turns: Turns, actions: int, begun: dict[int, float]) -> int:
    """Whenever the engine has room the next frame is there, taken at that moment; what is in flight stays there.

    Args:
        begun: when each frame was admitted, by its stamp.
    """
    done = 0
    while done < actions:
        if engine.has_room:
            stamp_ns = time.monotonic_ns()
            begun[stamp_ns] = time.perf_counter()
            engine.submit(frame(stamp_ns))
            turns.begun += 1
        for outcome in engine.tick():
            since = begun.pop(outcome.observation.stamp_ns)
            if isinstance(outcome, Drop):
                _expect_overtaken(outcome)
                turns.overtaken += 1
            else:
                turns.latency_s.append(time.perf_counter() - since)
                _add(turns, outcome)
                done += 1
    return done


def _expect_overtaken(drop: Drop) -> None:
    if drop.reason is not DropReason.OVERTAKEN:
        raise RuntimeError(f"a frame was dropped: {drop.reason.value}: {drop.detail}")


def _add(turns: Turns, action: Action) -> None:
    turns.forwards.append(action.record.forwards)
    turns.in_flight.append(action.record.in_flight)
    if action.record.mode in ("spec", "specpipe"):
        turns.accepted += action.record.accept_lengths
    turns.tokens = action.tokens
