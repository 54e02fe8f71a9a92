"""What each mode could reach: the tick loop over forward costs."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from specvla_ros.errors import UserError
from specvla_ros.planning.cost import Forward, ModelCost, WeightFormat, draft_part, forward_parts, least_seconds
from specvla_ros.planning.device import LIMIT, Device, Efficiency, derated
from specvla_ros.speculation.settings import DraftSettings

TREE_DEPTH = DraftSettings().depth - 1  # as Spec-VLA (section 5.1) and EAGLE count: one less

# Spec-VLA (arXiv 2507.22424), table 2, relaxed acceptance: accepted tokens per verification on each LIBERO suite, the
# target's own token not counted.
SPEC_VLA_RELAXED = {"goal": 1.56, "object": 1.30, "spatial": 1.05, "long": 1.03}


@dataclass(frozen=True)
class AcceptanceLengths:
    """A distribution of accepted tokens.

    Args:
        name: for reports.
        probabilities: of 0, 1, … accepted tokens.
    """

    name: str
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if min(self.probabilities) < 0 or abs(sum(self.probabilities) - 1) > 1e-9:
            raise UserError(f"acceptance lengths '{self.name}' must be probabilities that sum to 1")

    @property
    def mean(self) -> float:
        """Accepted tokens per verification where enough tokens are missing."""
        return sum(length * share for length, share in enumerate(self.probabilities))

    def accepted(self, uniform: float) -> int:
        """The length at a quantile.

        Args:
            uniform: 0 to 1.
        """
        for length, share in enumerate(self.probabilities):
            uniform -= share
            if uniform < 0:
                return length
        return len(self.probabilities) - 1

    def verifications(self, tokens: int) -> float:
        """Expected verifications for so many tokens; each commits its accepted tokens and one of the target's."""
        expected = [0.0]
        for missing in range(1, tokens + 1):
            rest = (share * expected[max(0, missing - length - 1)] for length, share in enumerate(self.probabilities))
            expected.append(1.0 + sum(rest))
        return expected[tokens]


def spec_vla_relaxed(suite: str) -> AcceptanceLengths:
    """A binomial distribution over the tree's levels with Spec-VLA's mean.

    Only the mean is Spec-VLA's. Of three shapes tried (binomial over 4 and over 5 levels, and a chance per token, which
    is geometric), this one comes nearest to a roofline worked out by hand earlier: it is fitted, not observed. The
    geometric one needs 2.84 instead of 2.72 verifications for the six tokens behind a prefill on Goal, and loses more
    frames in specpipe: 36 % instead of 29 %, with 2 chunks 12 % instead of 4 %.

    Raises:
        UserError: no such suite.
    """
    if suite not in SPEC_VLA_RELAXED:
        raise UserError(f"there are no acceptance lengths of '{suite}'; known: {', '.join(SPEC_VLA_RELAXED)}")
    share = SPEC_VLA_RELAXED[suite] / TREE_DEPTH
    probabilities = tuple(
        math.comb(TREE_DEPTH, length) * share**length * (1 - share) ** (TREE_DEPTH - length)
        for length in range(TREE_DEPTH + 1)
    )
    return AcceptanceLengths(f"Spec-VLA relaxed, LIBERO-{suite.title()}", probabilities)


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


NODES = 16  # one tile of a matrix product's rows; the best size for latency is flat between 8 and 32

MODES = (
    Mode("ar", "ar"),
    Mode("spec", "spec", nodes=NODES),
    Mode("pipeline", "pipeline", pipelined=True),
    Mode("pipeline, 2 chunks", "pipeline", pipelined=True, chunks=2),
    Mode("pipeline, 3 chunks", "pipeline", pipelined=True, chunks=3),
    Mode("specpipe", "specpipe", pipelined=True, nodes=NODES),
    Mode("specpipe, 2 chunks", "specpipe", pipelined=True, nodes=NODES, chunks=2),
    Mode("specpipe, 3 chunks", "specpipe", pipelined=True, nodes=NODES, chunks=3),
)


@dataclass(frozen=True)
class ModeLimit:
    """One row of the table.

    Args:
        mode: which.
        action_rate_hz, latency_s: mean, at the limit.
        derated_rate_hz, derated_latency_s: the same at the efficiency to expect.
        ticks_per_action: forwards from a frame's admission to its action, mean.
        dropped: share of the admitted frames that a newer one overtakes.
        in_flight: requests at most.
        kv_bytes: of the slots for them.
        weight_bytes: of all weights, with the draft head's where there is one.
    """

    mode: Mode
    action_rate_hz: float
    latency_s: float
    derated_rate_hz: float
    derated_latency_s: float
    ticks_per_action: float
    dropped: float
    in_flight: int
    kv_bytes: float
    weight_bytes: float

    @property
    def oldest_image_s(self) -> float:
        """Age of the image behind an action when the next one replaces it, derated: its latency and a period."""
        return self.derated_latency_s + 1.0 / self.derated_rate_hz

    def fits(self, device: Device) -> bool:
        """Whether weights, keys and values find room."""
        return self.kv_bytes + self.weight_bytes <= device.memory_gb * 1e9


def tick_seconds(tick: Tick, *, model: ModelCost, device: Device, weights: WeightFormat) -> float:
    """Least time of a tick. The draft head's forward over the prompt is left out: it may run beside the next frame."""
    seconds = least_seconds(forward_parts(tick.forward, model, weights, device.value_bytes), device)
    if not tick.drafting:
        return seconds
    draft = draft_part(
        model,
        device.value_bytes,
        steps=TREE_DEPTH,
        rows=tick.drafting * NODES,
        prefix_rows=tick.drafting * model.prompt_rows,
    )
    return seconds + draft.seconds(device)


def mode_limit(
    mode: Mode, model: ModelCost, device: Device, weights: WeightFormat, lengths: AcceptanceLengths
) -> ModeLimit:
    """Runs the tick loop at the limit and derated."""

    def run(efficiency: Efficiency) -> LoopResult:
        reached = device.at(bandwidth=efficiency.bandwidth, compute=efficiency.compute)

        @cache
        def seconds(tick: Tick) -> float:
            return tick_seconds(tick, model=model, device=reached, weights=weights) + efficiency.forward_s

        return run_loop(mode, model.prompt_rows, model.action_tokens, lengths, seconds)

    best, expected = run(LIMIT), run(derated(device))
    slot_rows = model.prompt_rows + model.action_tokens + (mode.nodes if mode.nodes > 1 else 0)
    return ModeLimit(
        mode,
        best.action_rate_hz,
        best.latency_s,
        expected.action_rate_hz,
        expected.latency_s,
        best.ticks_per_action,
        best.dropped,
        best.in_flight,
        float(best.in_flight * slot_rows * model.kv_values * device.value_bytes),
        model.memory_bytes(weights, device.value_bytes, draft=mode.nodes > 1),
    )
