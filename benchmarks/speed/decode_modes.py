# SPDX-License-Identifier: Apache-2.0
"""Every decoding mode end to end and transformers' generate: same weights, same prompt, taking turns in one run.

Ours is the real engine with a frame always waiting. Weights are random: time does not depend on their values, but
acceptance does, so it comes from a named trace. An engine's turn first fills the pipeline and then times a number of
actions. Latency runs from taking a frame, which includes resizing and normalising its 640 x 480 image, in parallel with
the ticks (before transformers' generate). Some modes are then compared on quantised weights, taking turns with the same
modes on unquantised ones.

    python -m benchmarks.speed.decode_modes                                  # this CPU: tiny
    python -m benchmarks.speed.decode_modes --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes

Bundled policies with their own weights, images and decoding settings, in ar, spec and auto:

    python -m benchmarks.speed.decode_modes --policies nano,fast,digits --actions 10 --repeats 3

The gain from int8 on a CPU, for short and for long answers:

    python -m benchmarks.speed.decode_modes --sizes 1b --quantization none,w8a8 --formats-only --no-vision --actions 3
    python -m benchmarks.speed.decode_modes --sizes 1b --quantization none,w8a8 --formats-only --no-vision --actions 1 \
        --tokens 53 --trace chunks:digits-2 --nodes 12 --repeats 3

And with the vision, which takes as long as the language model:

    python -m benchmarks.speed.decode_modes --sizes 1b --quantization none,w8a8,w8a8+vision --formats-only --actions 3
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer

from benchmarks.acceptance_trace import TRACE_HELP, describe, trace_drafts, trace_lengths
from benchmarks.harness import (
    FRAMES_FIRST_SEED,
    Device,
    Dtype,
    Out,
    Sizes,
    chosen_names,
    dtype_on,
    finish,
    result_head,
)
from benchmarks.random_policy import (
    NO_PICTURES,
    PICTURES,
    PROMPT,
    SIZES,
    TOKENS,
    VISION,
    RandomPolicy,
    quantized,
    random_policy,
)
from benchmarks.saturated import Contestant, EngineTurns, compete, mode_settings, weight_bytes
from benchmarks.transformers_baseline import GenerateTurns
from specvla_ros import Action, Engine, EngineSettings, Observation
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import bundled_names, find_policy
from specvla_ros.lab.evaluation.frame_sources import lossless, simulation_source
from specvla_ros.lab.planning.limits import AcceptanceLengths
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import require_openvla
from specvla_ros.models.quantization import QUANTIZATIONS
from specvla_ros.speculation.settings import NO_HEAD, DraftSettings

CHUNKS = (1, 2, 3)
FORMATS = f"{', '.join(QUANTIZATIONS)}; with {VISION} for the vision too"
BASELINE, COMPILED, PLAIN = "transformers", "transformers, compiled", "ar"
UNQUANTISED = "none"
_LOSSLESS = ("ar", "pipeline")
_QUANTISED_MODES = (PLAIN, "spec", "specpipe")
_PICTURES, _PERIOD_NS = 60, 200_000_000  # images of a bundled policy, and the time between them in their stamps
_ALONE = (PLAIN, "spec")  # several frames in flight need many actions, these only a few


def main(
    context: typer.Context,
    sizes: Sizes = "tiny",
    policies: Annotated[str, typer.Option(help="Bundled policies, comma-separated, instead of random weights.")] = "",
    device: Device = "cpu",
    dtype: Dtype = "",
    trace: Annotated[str, typer.Option(help=TRACE_HELP)] = "goal",
    nodes: Annotated[int, typer.Option(help="Nodes of a draft tree, including the root.", min=8)] = 16,
    quantization: Annotated[str, typer.Option(help=f"Formats, comma-separated: {FORMATS}.")] = ("none,w8a8,int4,fp8"),
    tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=2)] = TOKENS,
    formats_only: Annotated[
        bool, typer.Option("--formats-only", help="Skip the comparison of all modes; compare formats in ar and spec.")
    ] = False,
    vision: Annotated[bool, typer.Option(help="Send every frame through the vision towers.")] = True,
    actions: Annotated[int, typer.Option(help="Actions timed per turn.", min=1)] = 40,
    repeats: Annotated[int, typer.Option(help="Turns of each contestant.", min=1)] = 5,
    out: Out = None,
) -> None:
    """Measures rate, latency and memory of every mode and of transformers' generate."""
    if policies:
        names = chosen_names("--policies", policies, bundled_names())
        found = {name: _bundled(name, device, actions, repeats) for name in names}
        finish(result_head(context, dtype_on(device, dtype)) | {"policies": found}, out)
        return
    chosen, formats = dtype_on(device, dtype), _formats(quantization)
    lengths, draft = trace_lengths(trace, nodes), trace_drafts(trace, nodes)
    result = result_head(context, chosen, transformers=transformers.__version__) | {
        "acceptance": describe(lengths),
        "prompt_rows": PROMPT,
        "tokens": tokens,
        "tree_nodes": nodes,
        "vision": vision,
        "pictures": PICTURES if vision else NO_PICTURES,
        "sizes": {},
    }
    run = Run(lengths, draft, tokens, actions, repeats)
    for name in sizes.split(","):
        with random_policy(SIZES[name], tokens=tokens, vision=vision, dtype=chosen, device=device) as policy:
            measured = {} if formats_only else {"modes": run.modes(policy)}
            if formats:
                measured["quantized"] = run.quantized(policy, formats, _ALONE if formats_only else _QUANTISED_MODES)
            parameters = sum(p.numel() for p in policy.decoder.parameters())
            result["sizes"][name] = {"parameters": parameters} | measured
    finish(result, out)


def _bundled(name: str, device: str, actions: int, repeats: int) -> dict[str, Any]:
    """Returns the figures of a bundled policy's modes on images of its own episodes."""
    directory, decoding = find_policy(Path(name))
    own = engine_settings_from(params_file=decoding)
    policy = require_openvla(load_target(directory, device=device))
    exact = Engine(policy, lossless(policy, own))
    source = simulation_source(policy, FRAMES_FIRST_SEED, engine=own)
    # Not all answers of a policy are actions.
    seen = [each for i, each in enumerate(islice(source, _PICTURES), 1) if _answers(exact, each, i)]

    def turns_of(settings: EngineSettings) -> EngineTurns:
        frames = (replace(each, stamp_ns=(i + 1) * _PERIOD_NS) for i, each in enumerate(cycle(seen)))
        return EngineTurns(policy, settings, None, lambda: frames, keep=True)  # a turn continues where the last ended

    plain = DraftSettings(head=NO_HEAD)
    settings = {mode: replace(own, mode=mode) for mode in (PLAIN, "spec", "auto")}
    settings["auto, no drafter"] = replace(own, mode="auto", draft=plain)
    turns = {mode: turns_of(each) for mode, each in settings.items()}
    rows = compete(turns, actions=actions, repeats=repeats)
    for row in rows.values():
        row["first_over_ar"] = row["first_action_s"]["p50"] / rows[PLAIN]["first_action_s"]["p50"]
        row["age_over_ar"] = row["image_age_s"] / rows[PLAIN]["image_age_s"]
    return {"modes": rows}


def _answers(engine: Engine, seen: Observation, stamp_ns: int) -> bool:
    """True if the answer to an image is an action."""
    return isinstance(engine.act(replace(seen, stamp_ns=stamp_ns)), Action)


def _formats(quantization: str) -> list[str]:
    """The given formats without `none`."""
    formats = quantization.split(",")
    unknown = [name for name in formats if name.removesuffix(VISION) not in QUANTIZATIONS]
    if unknown:
        raise typer.BadParameter(f"unknown quantisation '{unknown[0]}'; known: {', '.join(QUANTIZATIONS)}")
    return [name for name in formats if name != UNQUANTISED]


@dataclass(frozen=True)
class Run:
    """A comparison of contestants.

    Args:
        lengths: accept lengths of the trace.
        tokens: tokens per answer.
        actions: actions timed per turn.
        repeats: turns of each contestant.
    """

    lengths: AcceptanceLengths
    draft: DraftSettings
    tokens: int
    actions: int
    repeats: int

    def modes(self, policy: RandomPolicy) -> dict[str, Any]:
        """Returns the figures of transformers' generate and of every mode."""
        modes = {"ar": ("ar", 1), "spec": ("spec", 1)}
        modes |= {
            f"{mode}, {n} chunks" if n > 1 else mode: (mode, n) for mode in ("pipeline", "specpipe") for n in CHUNKS
        }
        generates = {BASELINE: GenerateTurns(policy, compiled=False), COMPILED: GenerateTurns(policy, compiled=True)}
        engines = {name: self._engine(policy, mode, chunks) for name, (mode, chunks) in modes.items()}
        rows = self._compete({**generates, **engines})
        for name, (mode, _) in modes.items():
            if mode in _LOSSLESS:
                rows[name]["same_tokens"] = engines[name].tokens == generates[BASELINE].tokens
        for row in rows.values():
            for label, other in (("ar", PLAIN), ("transformers", BASELINE)):
                _add_ratios(row, label, rows[other])
        return rows

    def quantized(self, policy: RandomPolicy, formats: Sequence[str], modes: Sequence[str]) -> dict[str, Any]:
        """Returns figures by format and mode, starting with `none`, or the reason why a format cannot run here."""
        policies, skipped = {UNQUANTISED: policy}, {}
        for name in formats:
            try:
                policies[name] = quantized(policy, name)
                self._engine(policies[name], PLAIN).add_turn(1)
            except Exception as error:  # some formats fail only when they multiply
                policies.pop(name, None)
                skipped[name] = {"skipped": str(error) or type(error).__name__}
        rows = self._compete({(name, mode): self._engine(policies[name], mode) for name in policies for mode in modes})
        for (name, _), row in rows.items():
            _add_ratios(row, "ar", rows[UNQUANTISED, PLAIN])
            _add_ratios(row, "ar_of_format", rows[name, PLAIN])
        return {
            name: {
                "layer_bytes": weight_bytes(policies[name].decoder.layers),
                "modes": {mode: rows[name, mode] for mode in modes},
            }
            for name in policies
        } | skipped

    def _engine(self, policy: RandomPolicy, mode: str, chunks: int = 1) -> EngineTurns:
        settings = mode_settings(mode, self.lengths, tokens=self.tokens, draft=self.draft, chunks=chunks)
        return EngineTurns(policy, settings, self.lengths)

    def _compete(self, contestants: Mapping[Any, Contestant]) -> dict[Any, dict[str, Any]]:
        return compete(contestants, actions=self.actions, repeats=self.repeats)


def _add_ratios(row: dict[str, Any], label: str, other: Mapping[str, Any]) -> None:
    """Adds rate and latency relative to another row."""
    if "skipped" not in row:
        row[f"rate_over_{label}"] = row["action_rate_hz"] / other["action_rate_hz"]
        row[f"latency_over_{label}"] = row["latency_s"]["mean"] / other["latency_s"]["mean"]


if __name__ == "__main__":
    typer.run(main)
