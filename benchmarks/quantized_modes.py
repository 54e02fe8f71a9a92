"""Decoding modes on quantised weights, taking turns with the same modes on weights as they are."""

from typing import Any

from acceptance_trace import Trace
from gpu_memory import weight_bytes
from random_policy import RandomPolicy, quantized
from saturated import Run, Turns, add_turn, settings_of
from shapes import TOKENS

UNQUANTISED, PLAIN = "none", "ar"
MODES = (PLAIN, "spec", "specpipe")


def measure_quantized(policy: RandomPolicy, formats: list[str], run: Run) -> dict[str, Any]:
    """Figures by format and mode, the first format `none`; or why a format cannot run here.

    Rates and latencies are also given over those of plain decoding on weights as they are.

    Args:
        policy: with weights as they are.
        formats: of the decoder's layers, `none` not among them.
        run: how.
    """
    policies, skipped = {UNQUANTISED: policy}, {}
    for name in formats:
        try:
            policies[name] = quantized(policy, name)
            _add_turn(Turns(), policies[name], PLAIN, Trace(run.lengths), run, actions=1)
        except Exception as error:  # some formats only say when they multiply that they cannot
            policies.pop(name, None)
            skipped[name] = {"skipped": str(error) or type(error).__name__}
    turns = {name: {mode: Turns() for mode in MODES} for name in policies}
    traces = {name: {mode: Trace(run.lengths) for mode in MODES} for name in policies}
    for _ in range(run.repeats):
        for name, each in policies.items():
            for mode in MODES:
                _add_turn(turns[name][mode], each, mode, traces[name][mode], run, actions=run.actions)
    rows = {name: {mode: each.summary() for mode, each in modes.items()} for name, modes in turns.items()}
    plain: dict[str, Any] = rows[UNQUANTISED][PLAIN]
    return {name: _format(policies[name], modes, plain) for name, modes in rows.items()} | skipped


def _add_turn(turns: Turns, policy: RandomPolicy, mode: str, trace: Trace, run: Run, *, actions: int) -> None:
    settings = settings_of(mode, run.lengths, tokens=TOKENS, nodes=run.nodes)
    add_turn(turns, policy, settings, trace, actions)


def _format(policy: RandomPolicy, modes: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    for row in modes.values():
        row["rate_over_ar"] = row["action_rate_hz"] / plain["action_rate_hz"]
        row["latency_over_ar"] = row["latency_s"]["mean"] / plain["latency_s"]["mean"]
    return {"layer_bytes": weight_bytes(policy.decoder.layers), "modes": modes}
