# SPDX-License-Identifier: Apache-2.0
"""Times a forward compiled for its size by torch.compile on a CPU, beside the engine's own.

python -m benchmarks.speed.compiled_forward

The nano policy's decoder: our forward of one tree in one slot, the same written plainly, that one compiled, and its
matrix products alone, in turns; then the engine's ticks after an answer's first. The compiled forward takes a slot's
keys and values as tensors of their own and masks the rows that a node does not see. The engine does not use it.
"""

import statistics
import time
from itertools import islice
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch._inductor.utils import fresh_cache

from benchmarks.harness import FRAMES_FIRST_SEED, Out, finish, of_weights, result_head, take_turns
from benchmarks.results_page import RESULTS
from benchmarks.speed.revision_ticks import Decoding
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import DraftSettings

ROWS = {"ar": 1, "spec": DraftSettings().nodes}  # of a decode step, and of a draft tree
SLOT_ROWS, PREFIX = 200, 120
REPEATS = 200
_ANSWERS = 60


@torch.inference_mode()
def main(
    context: typer.Context,
    repeats: Annotated[int, typer.Option(help="Turns.", min=3)] = REPEATS,
    out: Out = RESULTS / "compiled_forward_cpu.json",
) -> None:
    """Measures every number of rows."""
    policy = load_target(nano_policy(), device="cpu")
    decoder = policy.decoder
    assert isinstance(decoder, PackedDecoder)
    cases = [
        case(decoder, rows, repeats) | {"mode": mode, "tick_s": tick_s(policy, mode)} for mode, rows in ROWS.items()
    ]
    finish(result_head(context, decoder.dtype) | of_weights(nano_policy()) | {"cases": cases}, out)


def case(decoder: PackedDecoder, rows: int, repeats: int) -> dict[str, object]:
    """Times a tree whose nodes, but the root, are all the root's children."""
    cache = new_cache(decoder, slots=3, slot_rows=SLOT_ROWS)
    for store in (cache.keys, cache.values):
        store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(0)))
    ids = torch.arange(rows) + 5
    tree = Segment(0, PREFIX, ids, Ancestry.from_parents([-1] + [0] * (rows - 1)), wanted=rows)
    mask = torch.full((rows, SLOT_ROWS), -torch.inf)
    mask[:, : PREFIX + 1] = 0
    mask.view(-1)[PREFIX :: SLOT_ROWS + 1] = 0
    positions = PREFIX + (torch.arange(rows) > 0).long()
    cos, sin = (each[:, None] for each in decoder.rotation(positions))
    kept = [tensor[i, 0] for tensor in (cache.keys, cache.values) for i in range(len(decoder.layers))]
    given = (ids, cos, sin, torch.arange(PREFIX, PREFIX + rows), mask, kept)

    def plain(ids: Tensor, cos: Tensor, sin: Tensor, places: Tensor, mask: Tensor, kept: list[Tensor]) -> Tensor:
        x = decoder.embed_tokens.weight[ids]
        for layer, keys, values in zip(decoder.layers, kept, kept[len(kept) // 2 :], strict=False):
            assert isinstance(layer, DecoderLayer)
            x = layer_forward(layer, x, cos, sin, places, mask, keys, values)
        return F.linear(norm(x, decoder.norm), decoder.lm_head.weight)

    started = time.perf_counter()
    compiled = torch.compile(plain, dynamic=False)
    with fresh_cache():  # an earlier run's would be read in place of compiling
        logits = compiled(*given)
    compile_s = time.perf_counter() - started
    expected = packed_forward(decoder, [tree], cache).logits
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    products = [(torch.randn(rows, matrix.shape[1]), matrix) for matrix in matrices(decoder)]
    ways = {
        "engine": lambda: packed_forward(decoder, [tree], cache),
        "plain": lambda: plain(*given),
        "compiled": lambda: compiled(*given),
        "products": lambda: [F.linear(x, matrix) for x, matrix in products],
    }
    return {"rows": rows, "seconds": take_turns(ways, repeats, "cpu"), "compile_s": compile_s}


def tick_s(policy: Target, mode: str) -> float:
    """Median seconds of the engine's ticks after an answer's first."""
    frames = islice(simulation_source(policy, FRAMES_FIRST_SEED), _ANSWERS)
    decoding = Decoding(policy, mode, [{"images": each.images, "instruction": each.instruction} for each in frames])
    answers = [decoding.action()[1] for _ in range(_ANSWERS)]
    return statistics.median(wall_s for ticks in answers[_ANSWERS // 3 :] for _, wall_s in ticks[1:])


def layer_forward(
    layer: DecoderLayer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    mask: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """A Llama layer over one slot, keys and values [slot_rows, heads, head_dim]."""
    q, k, v = layer.split_heads(F.linear(norm(x, layer.input_norm), layer.qkv.weight))
    keys.index_copy_(0, places, turned(k, cos, sin))
    values.index_copy_(0, places, v)
    scores = turned(q, cos, sin).transpose(0, 1) @ keys.permute(1, 2, 0) * layer.head_dim**-0.5 + mask
    attended = (scores.softmax(-1) @ values.transpose(0, 1)).transpose(0, 1).flatten(1)
    x = x + F.linear(attended, layer.out.weight)
    gate, up = F.linear(norm(x, layer.post_norm), layer.gate_up.weight).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, layer.down.weight)


def norm(x: Tensor, module: torch.nn.Module) -> Tensor:
    """RMS norm with a module's weight."""
    weight, eps = module.weight, module.eps
    assert isinstance(weight, Tensor) and isinstance(eps, float)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of rows [n, heads, head_dim]."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def matrices(decoder: PackedDecoder) -> list[Tensor]:
    """The matrices of a forward."""
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    found = [each.weight for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return [*found, decoder.lm_head.weight]


if __name__ == "__main__":
    typer.run(main)
