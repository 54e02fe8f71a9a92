# SPDX-License-Identifier: Apache-2.0
"""`specvla plan`: the rates a policy could reach on a device, and the parameters for them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specvla_ros.engine.cuda_graphs import even_rows
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.planning import cost
from specvla_ros.lab.planning.device import Device
from specvla_ros.lab.planning.limits import (
    AUTO,
    MODES,
    NODES,
    AcceptanceLengths,
    ModeLimit,
    loop_on,
    mode_limit,
    spec_vla_relaxed,
)
from specvla_ros.models.settings import WeightFormat
from specvla_ros.settings.parameter import values_of
from specvla_ros.speculation.settings import NO_HEAD, AcceptanceSettings, DraftSettings

_TREES = (8, 16, 24, 32, 48, 64)
_PACKED_NODES = 16
_TOP_K = 8
_AUTO_IN_FLIGHT = EngineSettings("auto").slots_per_stream
AS_GOOD = 1.03  # mode auto's age is that of a few hundred drawn answers
# w8a8_hadamard takes as long as w8a8, but for two small products.
_FORMATS = tuple(each for each in WeightFormat if each is not WeightFormat.W8A8_HADAMARD)
_SUITE = "goal"  # LIBERO suite whose accept lengths the plan assumes
_PLANNED = (
    "decode.mode",
    "decode.max_in_flight",
    "decode.prefill_chunks",
    "draft.head",
    "draft.nodes",
    "draft.depth",
    "draft.top_k",
    "acceptance.rule",
)
_DRAFT_REASONS = {"draft.head": "the folder `draft` of the checkpoint; `specvla train-draft` makes one"}


@dataclass(frozen=True)
class Profile:
    """Parameters for the policy node."""

    settings: EngineSettings
    limit: ModeLimit  # limits of the mode with these parameters
    reasons: Mapping[str, str]  # explanations by the name of what they explain

    @property
    def parameters(self) -> dict[str, Any]:
        """Values by full name: those behind the figures, and all that differ from the default."""
        defaults = values_of(EngineSettings())
        values = values_of(self.settings)
        return {name: value for name, value in values.items() if name in _PLANNED or value != defaults[name]}


def choose(
    model: cost.ModelCost,
    device: Device,
    weights: WeightFormat,
    limits: Sequence[ModeLimit],
    lengths: AcceptanceLengths,
) -> Profile:
    """Mode auto with the trees of the best fixed mode, unless that one clearly acts on younger images."""
    fixed = best_fixed(model, device, weights, limits, lengths)
    trees = fixed.limit.mode
    mode = replace(AUTO, nodes=trees.nodes, depth=trees.depth, robots=trees.robots, max_in_flight=_AUTO_IN_FLIGHT)
    limit = mode_limit(mode, model, device, weights, lengths)
    age_s, fixed_age_s = limit.derated_image_age_s, fixed.limit.derated_image_age_s
    if age_s > AS_GOOD * fixed_age_s or (fixed.limit.fits(device) and not limit.fits(device)):
        return fixed
    settings = replace(fixed.settings, mode=mode.decode_mode, max_in_flight=mode.max_in_flight, prefill_chunks=1)
    reasons = {
        "decode.mode": f"auto acts on images {_milliseconds(age_s)} old (mean over time, derated); {trees.name}, the "
        f"best fixed mode, on images {_milliseconds(fixed_age_s)} old",
        "decode.prefill_chunks": "auto spreads a prompt over several forwards if the measured times make this pay",
        "decode.max_in_flight": f"auto admits up to {mode.max_in_flight} if the measured times make this pay",
        "memory": _memory_reason(limit, device),
    }
    return Profile(settings, limit, {**fixed.reasons, **reasons})


def best_fixed(
    model: cost.ModelCost,
    device: Device,
    weights: WeightFormat,
    limits: Sequence[ModeLimit],
    lengths: AcceptanceLengths,
) -> Profile:
    """The fixed mode that acts on the youngest images, of those that fit in memory (of all, if none does)."""
    ridge = cost.ridge_rows(model, device, weights, device.efficiency)
    fixed = [limit for limit in limits if not limit.mode.chooses]
    fitting = [limit for limit in fixed if limit.fits(device)]
    best = min(fitting or fixed, key=lambda limit: limit.derated_image_age_s)
    pipelined, drafts, chunks = best.mode.pipelined, best.mode.drafts, best.mode.chunks
    verifications = lengths.verifications(model.action_tokens - 1) if drafts else model.action_tokens - 1
    robots = best.mode.robots
    wanted = math.ceil((chunks + verifications) / chunks / robots)
    in_flight = min(wanted, best.mode.max_in_flight) if pipelined else 1  # per robot
    packed = pipelined or robots > 1
    nodes = _nodes(ridge / (in_flight * robots), packed=packed) if drafts else 1
    # A tree need not be deeper than the tokens still missing when it is drafted, without the target's own token.
    depth = max(1, min(best.mode.depth, model.action_tokens - 2)) if drafts else 1
    mode = replace(best.mode, nodes=nodes, depth=depth, max_in_flight=in_flight)
    limit = mode_limit(mode, model, device, weights, lengths)
    reasons = {
        "decode.mode": f"{best.mode.name} acts on images {_milliseconds(limit.derated_image_age_s)} old "
        "(mean over time, derated)",
        "decode.prefill_chunks": _chunk_reason(model, ridge, chunks),
        "decode.max_in_flight": f"{chunks} forward(s) for the prompt and {verifications:.1f} after it, "
        f"a new frame every {chunks}"
        if pipelined
        else "one request at a time",
        "draft.nodes": _node_reason(ridge, in_flight * robots, nodes, packed=packed) if drafts else "no tree",
        **(_DRAFT_REASONS | {"acceptance.rule": _acceptance_reason(lengths)} if drafts else {}),
        "memory": _memory_reason(limit, device),
    }
    settings = EngineSettings(
        mode=best.mode.decode_mode,
        max_in_flight=in_flight,
        streams=robots,
        prefill_chunks=chunks,
        draft=DraftSettings(
            head="" if drafts else NO_HEAD, nodes=nodes, depth=depth, top_k=max(1, min(_TOP_K, nodes // depth))
        ),
        acceptance=lengths.acceptance if drafts else AcceptanceSettings(),
    )
    return Profile(settings, limit, reasons)


def _format_ages(
    limit: ModeLimit, weights: WeightFormat, model: cost.ModelCost, device: Device, lengths: AcceptanceLengths
) -> dict[str, float]:
    """The age [s] of the images acted on with each weight format that the device computes; `limit`: with `weights`."""

    def age_s(other: WeightFormat) -> float:
        if other is weights:
            return limit.derated_image_age_s
        return loop_on(limit.mode, model, device, other, lengths, device.efficiency).image_age_s

    return {each.value: age_s(each) for each in _FORMATS if device.computes(cost.arithmetic_of(each))}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _memory_reason(limit: ModeLimit, device: Device) -> str:
    needed_gb = (limit.kv_bytes + limit.weight_bytes) / 1e9
    needed = f"{needed_gb:.3g} of {device.memory_gb:.0f} GB for weights, keys and values"
    return needed if limit.fits(device) else f"{needed}: IT DOES NOT FIT; try --weights int4"


def _nodes(free_rows: float, *, packed: bool) -> int:
    """The largest tree that is free in a forward without a prompt. With a prompt each node costs, so at most 16."""
    largest = _PACKED_NODES if packed else _TREES[-1]
    return max((size for size in _TREES if size <= min(free_rows, largest)), default=_TREES[0])


def _acceptance_reason(lengths: AcceptanceLengths) -> str:
    settings = lengths.acceptance
    tolerance = f"{settings.rule}, {', '.join(map(str, settings.bins))} bins" if any(settings.bins) else settings.rule
    return (
        f"{tolerance}: the settings behind the lengths of {lengths.name}; a stricter rule accepts "
        "less than planned. `specvla calibrate` finds the tolerance for your policy"
    )


def _chunk_reason(model: cost.ModelCost, ridge: float, chunks: int) -> str:
    crossing = f"the prompt has {model.prompt_rows} rows; memory-bound below {ridge:.0f}, derated"
    return f"whole ({crossing})" if chunks == 1 else crossing


def _node_reason(ridge: float, in_flight: int, nodes: int, *, packed: bool) -> str:
    free = f"{nodes} nodes for each of {in_flight} in flight; {ridge:.0f} rows are free in a forward without a prompt"
    return (
        f"{free}; with a prompt every node costs time; beyond {_PACKED_NODES}, more than it saves" if packed else free
    )


@dataclass(frozen=True)
class ForwardLimit:
    """One row of the table of forwards."""

    name: str
    bytes: float  # sums over its parts
    operations: float  # sums over its parts
    seconds: float  # at the limit, its parts one after the other
    derated_seconds: float  # at the expected efficiency
    bound_by: str  # dominant part of the time: memory (reading and writing) or compute


@dataclass(frozen=True)
class Plan:
    """The figures that `specvla plan` shows."""

    checkpoint: str  # directory, or OpenVLA-7B
    weights: WeightFormat
    device: Device
    model: cost.ModelCost
    lengths: AcceptanceLengths
    ridge_rows: float
    forwards: tuple[ForwardLimit, ...]
    modes: tuple[ModeLimit, ...]
    profile: Profile
    format_ages: Mapping[str, float]  # age of the images acted on [s], derated, by weight format

    @property
    def parameters(self) -> dict[str, Any]:
        """Values by full name of a parameter file for the policy node."""
        weights = {"model.quantization": self.weights.value} if self.weights is not WeightFormat.NONE else {}
        return weights | self.profile.parameters

    @property
    def fits(self) -> bool:
        """True if the chosen profile fits in the device's memory."""
        return self.profile.limit.fits(self.device)

    def as_json(self) -> dict[str, Any]:
        return {
            "note": note(self.device),
            "checkpoint": self.checkpoint,
            "weights": self.weights.value,
            "device": self.device.as_json(),
            "derated": self.device.efficiency.as_json(),
            "model": asdict(self.model),
            "acceptance": {name: getattr(self.lengths, name) for name in ("name", "probabilities", "mean")},
            "ridge_rows": self.ridge_rows,
            "forwards": [asdict(forward) for forward in self.forwards],
            "modes": [mode.as_json() for mode in self.modes],
            "profile": {
                "parameters": self.parameters,
                "limit": self.profile.limit.as_json(),
                "reasons": dict(self.profile.reasons),
            },
        }


def make_plan(
    device: Device, weights: WeightFormat, checkpoint: Path | None = None, robots: int = 1, tokens: int = 0
) -> Plan:
    """Computes the plan for a directory with a config.json, or for OpenVLA-7B; takes about a second.

    `tokens` is the length of an answer; 0: the checkpoint's. Raises UserError if the checkpoint does not give it or has
    another architecture.
    """
    config = cost.OPENVLA_7B if checkpoint is None else cost.planned_config(checkpoint, tokens)
    one_pass = checkpoint is not None and cost.drafts_in_one_pass(checkpoint)
    model = replace(cost.model_cost(config), one_pass=one_pass)
    model = replace(model, action_tokens=tokens) if tokens else model
    lengths = spec_vla_relaxed(_SUITE)
    modes = [replace(mode, robots=robots) for mode in (*MODES, AUTO)]
    ridge = cost.ridge_rows(model, device, weights)
    limits = tuple(mode_limit(mode, model, device, weights, lengths) for mode in modes)
    profile = choose(model, device, weights, limits, lengths)
    return Plan(
        checkpoint="OpenVLA-7B" if checkpoint is None else str(checkpoint),
        weights=weights,
        device=device,
        model=model,
        lengths=lengths,
        ridge_rows=ridge,
        forwards=forward_limits(model, device, weights),
        modes=limits,
        profile=profile,
        format_ages=_format_ages(profile.limit, weights, model, device, lengths),
    )


def forward_limits(model: cost.ModelCost, device: Device, weights: WeightFormat) -> tuple[ForwardLimit, ...]:
    """The forwards that the modes consist of."""
    rows = []
    for name, parts in _forwards(model, device, weights).items():
        read, operations = sum(part.bytes for part in parts), sum(part.operations for part in parts)
        limit_s = cost.roofline_seconds(parts, device)
        derated_s = cost.roofline_seconds(parts, device, device.efficiency)
        reads = math.isclose(read / device.bytes_per_s(), limit_s, rel_tol=0.05)
        rows.append(ForwardLimit(name, read, operations, limit_s, derated_s, "memory" if reads else "compute"))
    return tuple(rows)


def _forwards(model: cost.ModelCost, device: Device, weights: WeightFormat) -> Mapping[str, tuple[cost.Part, ...]]:
    prompt = model.prompt_rows
    prefix = prompt + (model.action_tokens - 1) // 2  # average rows of a request

    def packed(trees: int, nodes: int, prompt_rows: int = 0, before: int = 0) -> tuple[cost.Part, ...]:
        forward = cost.Forward(
            prompt_rows=prompt_rows,
            prompt_before=before,
            image=bool(prompt_rows) and not before,
            prompt_ends=before + prompt_rows == prompt,
            trees=trees,
            nodes=trees * nodes,
            prefix_rows=trees * prefix,
        )
        return cost.forward_parts(forward, model, weights, device.value_bytes)

    first = even_rows(prompt, 2)
    pending = model.action_tokens - 1
    return {
        "decode, 1 row": packed(1, 1),
        f"verify, {NODES} nodes": packed(1, NODES),
        f"vision + prompt of {prompt}": packed(0, 0, prompt),
        f"vision + {prompt} + {pending}x1": packed(pending, 1, prompt),
        **{f"vision + {prompt} + 3x{nodes}": packed(3, nodes, prompt) for nodes in (8, 16, 50)},
        f"vision + chunk of {first} + 2x16": packed(2, 16, first),
        f"chunk of {prompt - first} + 2x16": packed(2, 16, prompt - first, first),
        "verify, 3x16": packed(3, 16),
        f"draft head, {DraftSettings.depth} steps": cost.draft_parts(
            model, weights, device.value_bytes, steps=DraftSettings.depth, rows=NODES, prefix_rows=prefix
        ),
        "draft head, prompt": cost.draft_prompt_parts(model, weights, device.value_bytes),
    }


def note(device: Device) -> str:
    """The notice that the numbers are computed, not measured."""
    if device.kind == "measured":
        return f"Limits from rates measured on {device.name}: computed, no policy ran; a real engine is slower."
    return f"Limits from assumed figures of {device.name}: nothing was measured, no such device was used."
