"""What each way to decode can reach on a device."""

from dataclasses import dataclass
from functools import cache

from specvla_ros.planning.acceptance_lengths import TREE_DEPTH, AcceptanceLengths
from specvla_ros.planning.device_limits import DeviceLimits
from specvla_ros.planning.forward_cost import draft_part, forward_parts, least_seconds
from specvla_ros.planning.model_cost import ModelCost, WeightFormat
from specvla_ros.planning.tick_loop import LoopResult, Mode, Tick, run_loop

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
class Efficiency:
    """What is reached of a device.

    Args:
        bandwidth, compute: shares of 1.
        forward_s: of every tick beside its reading and computing: launches, and the one readback.
    """

    bandwidth: float
    compute: float
    forward_s: float


LIMIT = Efficiency(1.0, 1.0, 0.0)
DERATED = Efficiency(0.8, 0.6, 0.0003)
MEASURED = Efficiency(1.0, 1.0, 0.0003)  # a measured rate holds its losses


def derated(device: DeviceLimits) -> Efficiency:
    """What to expect of a device."""
    return MEASURED if device.kind == "measured" else DERATED


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

    def fits(self, device: DeviceLimits) -> bool:
        """Whether weights, keys and values find room."""
        return self.kv_bytes + self.weight_bytes <= device.memory_gb * 1e9


def tick_seconds(tick: Tick, *, model: ModelCost, device: DeviceLimits, weights: WeightFormat) -> float:
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
    mode: Mode, model: ModelCost, device: DeviceLimits, weights: WeightFormat, lengths: AcceptanceLengths
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
