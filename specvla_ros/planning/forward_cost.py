"""Bytes and operations of one packed forward, and the least time that a device needs for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from specvla_ros.planning.device_limits import Arithmetic, DeviceLimits
from specvla_ros.planning.model_cost import ModelCost, WeightFormat

_MANY_ROWS = 4096  # more than any forward has


@dataclass(frozen=True)
class Forward:
    """What goes through the model together.

    Args:
        prompt_rows: of the newest frame's prompt in this forward: all, a chunk, or none.
        prompt_before: rows of that prompt that earlier forwards computed.
        image: whether the frame goes through the vision towers first.
        prompt_ends: whether the chunk is the prompt's last, so that it yields a token.
        trees: requests behind their prompt.
        nodes: tree nodes of all of them, roots included.
        prefix_rows: committed rows of all of them.
    """

    prompt_rows: int = 0
    prompt_before: int = 0
    image: bool = False
    prompt_ends: bool = True
    trees: int = 0
    nodes: int = 0
    prefix_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows of every matrix product in the decoder."""
        return self.prompt_rows + self.nodes


@dataclass(frozen=True)
class Part:
    """A share of a forward whose reading and computing may overlap.

    Args:
        name: vision, decoder, attention, head or draft.
        bytes: read and written; activations are left out, they stay in the caches.
        operations: multiplications and additions, each counted.
        rows: of the matrix products, on which a measured rate depends.
        arithmetic: what they are computed in.
    """

    name: str
    bytes: float
    operations: float
    rows: int
    arithmetic: Arithmetic = Arithmetic.DENSE

    def seconds(self, device: DeviceLimits) -> float:
        """The larger of reading and computing."""
        if not self.rows:
            return 0.0
        return max(
            self.bytes / device.bytes_per_s(), self.operations / device.operations_per_s(self.arithmetic, self.rows)
        )


def forward_parts(forward: Forward, model: ModelCost, weights: WeightFormat, dtype_bytes: int) -> tuple[Part, ...]:
    """The parts of one forward, in the order in which they run."""
    chosen_rows = forward.nodes + int(bool(forward.prompt_rows) and forward.prompt_ends)
    parts = [
        Part(
            "decoder",
            model.decoder_values * weights.value_bytes(dtype_bytes),
            2.0 * model.decoder_values * forward.rows,
            forward.rows,
            weights.arithmetic,
        ),
        Part("attention", _kv_bytes(forward, model, dtype_bytes), _attention_operations(forward, model), forward.rows),
        Part("head", model.head_values * dtype_bytes, 2.0 * model.head_values * chosen_rows, chosen_rows),
    ]
    if forward.image:
        parts.insert(0, Part("vision", model.vision_values * dtype_bytes, model.vision_operations, model.prompt_rows))
    return tuple(part for part in parts if part.rows)


def _kv_bytes(forward: Forward, model: ModelCost, dtype_bytes: int) -> float:
    """Every row of a prompt or tree is written once; it and the rows before it are read once."""
    read = forward.prompt_before + forward.prefix_rows + forward.rows
    return float((read + forward.rows) * model.kv_values * dtype_bytes)


def _attention_operations(forward: Forward, model: ModelCost) -> float:
    """Causal: half of the pairs within a prompt; a node sees its prefix, and at most its tree."""
    chunk = forward.prompt_rows * (forward.prompt_before + (forward.prompt_rows + 1) / 2)
    nodes_per_tree = forward.nodes / forward.trees if forward.trees else 0.0
    trees = nodes_per_tree * (forward.prefix_rows + forward.nodes)
    return model.pair_operations * (chunk + trees)


def draft_part(model: ModelCost, dtype_bytes: int, *, steps: int, rows: int, prefix_rows: int) -> Part:
    """One draft for all requests in flight.

    Args:
        steps: forwards of the draft head, one behind the other: the depth of the tree.
        rows: tree nodes of all requests, shared out over the steps.
        prefix_rows: committed rows of all requests.
    """
    read = steps * (model.draft_values + prefix_rows * model.draft_kv_values)
    return Part("draft", float(read * dtype_bytes), 2.0 * model.draft_values * rows, rows)


def draft_prompt_part(model: ModelCost, dtype_bytes: int) -> Part:
    """The draft head over one prompt."""
    rows = model.prompt_rows
    values = model.draft_values + 2 * rows * model.draft_kv_values
    return Part("draft prompt", float(values * dtype_bytes), 2.0 * model.draft_values * rows, rows)


def total_bytes(parts: Sequence[Part]) -> float:
    """Of all parts."""
    return sum(part.bytes for part in parts)


def total_operations(parts: Sequence[Part]) -> float:
    """Of all parts."""
    return sum(part.operations for part in parts)


def least_seconds(parts: Sequence[Part], device: DeviceLimits) -> float:
    """Parts run one behind the other: the sum of what each needs, which is more than the larger of the two sums."""
    return sum(part.seconds(device) for part in parts)


def ridge_rows(model: ModelCost, device: DeviceLimits, weights: WeightFormat) -> float:
    """Rows from which on the decoder's matrices are bound by computing: below it, a row more costs nothing.

    Of measured rates: the rows up to which a product takes no more than a tenth longer than with one row. One row
    rarely reaches the bandwidth of a plain read, and measured times scatter.
    """

    def computing_s(rows: int) -> float:
        return 2.0 * model.decoder_values * rows / device.operations_per_s(weights.arithmetic, rows)

    reading_s = model.decoder_values * weights.value_bytes(device.value_bytes) / device.bytes_per_s()
    if not device.tflops_by_rows or weights.arithmetic is not Arithmetic.DENSE:
        return max(1.0, reading_s / computing_s(1))
    free_s = 1.1 * max(reading_s, computing_s(1))
    rows = 1.0
    for size in sorted({size for size in device.tflops_by_rows if size > 1} | {_MANY_ROWS}):
        crossing = size * free_s / computing_s(size)
        rows = max(rows, min(crossing, size))
        if crossing < size:
            break
    return rows
