"""The engine's tick loop, without a model: which requests are in each forward, and for how long."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specvla_ros.planning.acceptance_lengths import AcceptanceLengths
from specvla_ros.planning.forward_cost import Forward

_FRAMES = 2000
_WARM_UP_TICKS = 50  # until the pipeline is full
_SEED = 1


@dataclass(frozen=True)
class Mode:
    """One way to decode.

    Args:
        name: as in the tables.
        decode_mode: value of `decode.mode`.
        pipelined: admit a frame as soon as the one before has its prompt behind it.
        nodes: per tree; 1: plain decoding.
        chunks: forwards over which a prompt is spread.
        max_in_flight: requests; a new frame waits while there are so many.
    """

    name: str
    decode_mode: str
    pipelined: bool = False
    nodes: int = 1
    chunks: int = 1
    max_in_flight: int = 64


@dataclass(frozen=True)
class Tick:
    """One tick.

    Args:
        forward: what goes through the model.
        drafting: requests that are drafted for behind the forward, also those that are done with it: the draft is
            launched before the one readback that says so.
    """

    forward: Forward
    drafting: int = 0


@dataclass(frozen=True)
class LoopResult:
    """Averages over many frames, a frame always waiting.

    Args:
        action_rate_hz: actions per second.
        latency_s: mean, from a frame's admission to its action.
        ticks_per_action: mean, of those that became an action.
        dropped: share of the admitted frames that a newer one overtook.
        in_flight: requests at most.
    """

    action_rate_hz: float
    latency_s: float
    ticks_per_action: float
    dropped: float
    in_flight: int


@dataclass
class _Request:
    started_tick: int
    started_s: float
    missing: int
    prompt_done: int = 0


def chunk_rows(prompt_rows: int, chunks: int) -> list[int]:
    """A prompt in nearly equal chunks, the longer ones first."""
    chunks = min(chunks, prompt_rows)
    return [prompt_rows // chunks + (i < prompt_rows % chunks) for i in range(chunks)]


def run_loop(
    mode: Mode, prompt_rows: int, action_tokens: int, lengths: AcceptanceLengths, seconds: Callable[[Tick], float]
) -> LoopResult:
    """Runs the loop; acceptance is drawn from a seed, so that the same arguments give the same result.

    As in the engine: a newer frame is admitted as soon as the newest has its prompt behind it (`pipelined`) or is done;
    a request that finishes cancels the older ones.
    """
    draws = random.Random(_SEED)
    chunks = chunk_rows(prompt_rows, mode.chunks)
    flying: list[_Request] = []
    now, begun_s, admitted, dropped, most = 0.0, 0.0, 0, 0, 0
    latencies: list[float] = []
    ticks: list[int] = []
    for number in _numbers():
        if number == _WARM_UP_TICKS:
            begun_s, admitted, dropped = now, 0, 0
            latencies, ticks = [], []
        if admitted >= _FRAMES:
            break
        if not flying or (
            mode.pipelined and len(flying) < mode.max_in_flight and flying[-1].prompt_done == prompt_rows
        ):
            flying.append(_Request(number, now, action_tokens))
            admitted += 1
        most = max(most, len(flying))
        forward = _forward(flying, mode, chunks)
        _advance(flying, mode, chunks, lengths, draws)
        finished = [each for each in flying if not each.missing]
        newest = finished[-1] if finished else None
        left = flying[flying.index(newest) + 1 :] if newest else flying
        drafting = sum(each.prompt_done == prompt_rows for each in flying) if mode.nodes > 1 else 0
        now += seconds(Tick(forward, drafting))
        if newest:
            latencies.append(now - newest.started_s)
            ticks.append(number + 1 - newest.started_tick)
            dropped += len(flying) - len(left) - 1
        flying = left
    count = len(latencies)
    return LoopResult(
        count / (now - begun_s), sum(latencies) / count, sum(ticks) / count, dropped / (dropped + count), most
    )


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _forward(flying: list[_Request], mode: Mode, chunks: list[int]) -> Forward:
    prompt_rows = sum(chunks)
    reading = [each for each in flying if each.prompt_done < prompt_rows]
    trees = [each for each in flying if each.prompt_done == prompt_rows]
    before = reading[0].prompt_done if reading else 0
    rows = _next_chunk(before, chunks) if reading else 0
    return Forward(
        prompt_rows=rows,
        prompt_before=before,
        image=bool(reading) and not before,
        prompt_ends=before + rows == prompt_rows,
        trees=len(trees),
        nodes=len(trees) * mode.nodes,  # of static size, as a captured graph has them, however few tokens are missing
        # Rows of the prompt, and of the committed tokens but the last, whose row this forward writes. Their number is
        # taken at its mean, for the forwards to be few different ones: at most 3 rows of 290 are off.
        prefix_rows=len(trees) * (prompt_rows + 3),
    )


def _next_chunk(done: int, chunks: list[int]) -> int:
    start = 0
    for rows in chunks:
        if start == done:
            return rows
        start += rows
    raise ValueError(f"{done} prompt rows are not a whole number of chunks {chunks}")


def _advance(
    flying: list[_Request], mode: Mode, chunks: list[int], lengths: AcceptanceLengths, draws: random.Random
) -> None:
    prompt_rows = sum(chunks)
    for each in flying:
        if each.prompt_done < prompt_rows:
            each.prompt_done += _next_chunk(each.prompt_done, chunks)
            each.missing -= int(each.prompt_done == prompt_rows)
            continue
        accepted = lengths.accepted(draws.random()) if mode.nodes > 1 else 0
        each.missing -= min(accepted + 1, each.missing)
