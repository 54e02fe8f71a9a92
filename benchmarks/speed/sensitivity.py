# SPDX-License-Identifier: Apache-2.0
"""Time per action over the lengths of answer and prompt, for each mode (ActionFlow, figure 5).

The real engine with a frame always waiting, without vision, with random weights; acceptance comes from a named trace.
Longer answers have more requests in flight, and more of them are overtaken; `specpipe, in order` overtakes none.

    python -m benchmarks.speed.sensitivity                                  # this CPU: tiny
    python -m benchmarks.speed.sensitivity --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from benchmarks.acceptance_trace import TRACE_HELP, describe, trace_drafts, trace_lengths
from benchmarks.harness import Device, Dtype, Out, Sizes, dtype_on, finish, result_head
from benchmarks.random_policy import NO_PICTURES, SIZES, TEXT_TOKENS, RandomPolicy, random_codec, random_policy
from benchmarks.saturated import EngineTurns, compete, mode_settings
from specvla_ros.lab.planning.limits import AcceptanceLengths
from specvla_ros.speculation.settings import DraftSettings

IN_ORDER = "specpipe, in order"
MODES = ("ar", "spec", "pipeline", "specpipe", IN_ORDER)


def main(
    context: typer.Context,
    sizes: Sizes = "tiny",
    device: Device = "cpu",
    dtype: Dtype = "",
    tokens: Annotated[str, typer.Option(help="Tokens per action, comma-separated.")] = "7,16,24,32",
    prompts: Annotated[str, typer.Option(help=f"Prompt rows, comma-separated, more than {TEXT_TOKENS}.")] = (
        "64,160,290,512"
    ),
    trace: Annotated[str, typer.Option(help=TRACE_HELP)] = "goal",
    nodes: Annotated[int, typer.Option(help="Nodes of a draft tree, including the root.", min=8)] = 16,
    actions: Annotated[int, typer.Option(help="Actions timed per turn.", min=1)] = 20,
    repeats: Annotated[int, typer.Option(help="Turns of each mode.", min=1)] = 3,
    out: Out = None,
) -> None:
    """Measures the time per action of every mode over the lengths of answer and prompt."""
    chosen = dtype_on(device, dtype)
    lengths = trace_lengths(trace, nodes)
    result = result_head(context, chosen) | {
        "acceptance": describe(lengths),
        "tree_nodes": nodes,
        "pictures": NO_PICTURES,
        "sizes": {},
    }
    for name in sizes.split(","):
        with random_policy(SIZES[name], vision=False, dtype=chosen, device=device) as policy:
            points = [
                _point(_reshaped(policy, count, rows), lengths, trace_drafts(trace, nodes), actions, repeats)
                for count in map(int, tokens.split(","))
                for rows in map(int, prompts.split(","))
            ]
        parameters = sum(p.numel() for p in policy.decoder.parameters())
        result["sizes"][name] = {"parameters": parameters, "points": points}
    finish(result, out)


def _reshaped(policy: RandomPolicy, tokens: int, rows: int) -> RandomPolicy:
    """The same weights with another length of answer and prompt."""
    if rows <= TEXT_TOKENS:
        raise typer.BadParameter(f"a prompt of {rows} rows must be longer than its {TEXT_TOKENS} rows of text")
    decoder = policy.decoder
    generator = torch.Generator(decoder.device).manual_seed(rows)
    shape = (rows, decoder.config.hidden_size)
    embeddings = torch.randn(shape, generator=generator, device=decoder.device, dtype=decoder.dtype)
    codec = random_codec(policy.model.config.token_vocab_size, tokens)
    return replace(policy, prompt_rows=rows, embeddings=embeddings, codec=codec)


def _point(
    policy: RandomPolicy, lengths: AcceptanceLengths, draft: DraftSettings, actions: int, repeats: int
) -> dict[str, Any]:
    """Every mode at one length of answer and prompt, taking turns."""
    tokens = len(policy.codec.names)
    contestants = {}
    for mode in MODES:
        name, in_order = mode.partition(",")[0], mode == IN_ORDER
        settings = mode_settings(name, lengths, tokens=tokens, draft=draft, in_order=in_order)
        contestants[mode] = EngineTurns(policy, settings, lengths)
    rows = compete(contestants, actions=actions, repeats=repeats)
    for row in rows.values():
        row["seconds_per_action"] = 1 / row["action_rate_hz"]
    return {
        "tokens": tokens,
        "prompt_rows": policy.prompt_rows,
        "same_tokens": contestants["ar"].tokens == contestants["pipeline"].tokens,
        "modes": rows,
    }


if __name__ == "__main__":
    typer.run(main)
