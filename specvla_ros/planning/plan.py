"""A whole plan: forwards, modes and the chosen profile of one checkpoint on one device."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specvla_ros.models.config import read_config
from specvla_ros.planning.acceptance_lengths import TREE_DEPTH, AcceptanceLengths, spec_vla_relaxed
from specvla_ros.planning.choose import Profile, choose
from specvla_ros.planning.device_limits import DeviceLimits
from specvla_ros.planning.forward_cost import (
    Forward,
    Part,
    draft_part,
    draft_prompt_part,
    forward_parts,
    least_seconds,
    ridge_rows,
    total_bytes,
    total_operations,
)
from specvla_ros.planning.mode_limits import MODES, NODES, ModeLimit, derated, mode_limit
from specvla_ros.planning.model_cost import ModelCost, WeightFormat, model_cost
from specvla_ros.planning.openvla_7b import OPENVLA_7B
from specvla_ros.planning.tick_loop import chunk_rows

SUITE = "goal"


@dataclass(frozen=True)
class ForwardLimit:
    """One row of the table of forwards.

    Args:
        name: what goes through the model.
        bytes, operations: of all its parts.
        seconds: at least, its parts one behind the other.
        derated_seconds: at the efficiency to expect.
        bound_by: what most of the time is for: reading or computing.
    """

    name: str
    bytes: float
    operations: float
    seconds: float
    derated_seconds: float
    bound_by: str


@dataclass(frozen=True)
class Plan:
    """Everything that `specvla plan` shows.

    Args:
        checkpoint: its directory, or OpenVLA-7B.
        weights: format of the decoder's matrices.
        device: limits, with their sources.
        model: counts from the shapes.
        lengths: accepted tokens per verification.
        ridge_rows: from which on the decoder is bound by computing.
        forwards, modes: the tables.
        profile: chosen parameters.
    """

    checkpoint: str
    weights: WeightFormat
    device: DeviceLimits
    model: ModelCost
    lengths: AcceptanceLengths
    ridge_rows: float
    forwards: tuple[ForwardLimit, ...]
    modes: tuple[ModeLimit, ...]
    profile: Profile

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "note": note(self.device),
            "checkpoint": self.checkpoint,
            "weights": self.weights.value,
            "device": self.device.as_json(),
            "derated": asdict(derated(self.device)),
            "model": asdict(self.model),
            "acceptance": {**asdict(self.lengths), "mean": self.lengths.mean},
            "ridge_rows": self.ridge_rows,
            "forwards": [asdict(each) for each in self.forwards],
            "modes": [_mode_json(each) for each in self.modes],
            "profile": {**asdict(self.profile), "reasons": dict(self.profile.reasons)},
        }


def make_plan(device: DeviceLimits, weights: WeightFormat, checkpoint: Path | None = None) -> Plan:
    """Computes everything; takes about a second.

    Args:
        checkpoint: directory with a config.json; None: OpenVLA-7B.

    Raises:
        UserError: the directory is no checkpoint, or the device has no units for this weight format.
    """
    model = model_cost(OPENVLA_7B if checkpoint is None else read_config(checkpoint))
    lengths = spec_vla_relaxed(SUITE)
    ridge = ridge_rows(model, device, weights)
    limits = tuple(mode_limit(mode, model, device, weights, lengths) for mode in MODES)
    return Plan(
        checkpoint="OpenVLA-7B" if checkpoint is None else str(checkpoint),
        weights=weights,
        device=device,
        model=model,
        lengths=lengths,
        ridge_rows=ridge,
        forwards=forward_limits(model, device, weights),
        modes=limits,
        profile=choose(model, device, weights, limits, lengths),
    )


def forward_limits(model: ModelCost, device: DeviceLimits, weights: WeightFormat) -> tuple[ForwardLimit, ...]:
    """The forwards that the modes are made of."""
    efficiency = derated(device)
    reached = device.at(bandwidth=efficiency.bandwidth, compute=efficiency.compute)
    rows = []
    for name, parts in _forwards(model, device, weights).items():
        reading_s = sum(part.bytes for part in parts) / device.bytes_per_s()
        seconds = least_seconds(parts, device)
        rows.append(
            ForwardLimit(
                name,
                total_bytes(parts),
                total_operations(parts),
                seconds,
                least_seconds(parts, reached) + efficiency.forward_s,
                "reading" if math.isclose(reading_s, seconds, rel_tol=0.05) else "computing",
            )
        )
    return tuple(rows)


def _forwards(model: ModelCost, device: DeviceLimits, weights: WeightFormat) -> Mapping[str, tuple[Part, ...]]:
    prompt = model.prompt_rows
    prefix = prompt + 3  # rows that a request behind its prompt has on average

    def packed(trees: int, nodes: int, prompt_rows: int = 0, before: int = 0) -> tuple[Part, ...]:
        forward = Forward(
            prompt_rows=prompt_rows,
            prompt_before=before,
            image=bool(prompt_rows) and not before,
            prompt_ends=before + prompt_rows == prompt,
            trees=trees,
            nodes=trees * nodes,
            prefix_rows=trees * prefix,
        )
        return forward_parts(forward, model, weights, device.value_bytes)

    first, *others = chunk_rows(prompt, 2)
    pending = model.action_tokens - 1
    return {
        "decode, 1 row": packed(1, 1),
        f"verify, {NODES} nodes": packed(1, NODES),
        f"vision + prompt of {prompt}": packed(0, 0, prompt),
        f"vision + {prompt} + {pending}x1": packed(pending, 1, prompt),
        f"vision + {prompt} + 3x8": packed(3, 8, prompt),
        f"vision + {prompt} + 3x16": packed(3, 16, prompt),
        f"vision + {prompt} + 3x50": packed(3, 50, prompt),
        f"vision + chunk of {first} + 2x16": packed(2, 16, first),
        f"chunk of {sum(others)} + 2x16": packed(2, 16, sum(others), first),
        "verify, 3x16": packed(3, 16),
        f"draft head, {TREE_DEPTH} steps": (
            draft_part(model, device.value_bytes, steps=TREE_DEPTH, rows=NODES, prefix_rows=prefix),
        ),
        "draft head, prompt": (draft_prompt_part(model, device.value_bytes),),
    }


def note(device: DeviceLimits) -> str:
    """What these numbers are."""
    if device.kind == "measured":
        return f"Limits from rates measured on {device.name}: computed, no policy ran; a real engine is slower."
    return f"Limits from assumed figures of {device.name}: nothing here was measured, and no such device ran."


def _mode_json(limit: ModeLimit) -> dict[str, Any]:
    return {**asdict(limit), "oldest_image_s": limit.oldest_image_s}
