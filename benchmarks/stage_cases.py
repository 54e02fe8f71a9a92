"""Each stage of a packed forward, with its bytes and operations: activations are left out, as in `specvla plan`."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from packed_batches import Batch
from timed_case import Case, with_and_without_kernels
from torch import Tensor, nn

from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.models.llama import LlamaDecoder
from specvla_ros.planning.cost import Part
from specvla_ros.speculation.drafters.eagle_head import EagleHead


def stage_cases(decoder: LlamaDecoder, draft_head: EagleHead, batch: Batch, cache: KVCache) -> Iterator[Case]:
    """Both halves of a layer, the output head, the draft head, and the whole forward of the target."""
    layer, layout = decoder.layers[0], batch.layout
    x, keys, values = batch.packed.embeddings, cache.keys, cache.values
    rotation = decoder.rotation(layout.positions)
    wanted = x[batch.packed.wanted_rows]
    following = x.flip(0)

    def case(name: str, call: Callable[[], object], *parts: Part) -> Case:
        return Case(name, batch.name, batch.rows, parts, with_and_without_kernels(call, x))

    first = _matrices([layer.qkv, layer.out], batch.rows)
    second = _matrices([layer.gate_up, layer.down], batch.rows)
    attended = _attended(decoder, batch, cache)
    head = _matrices([decoder.lm_head], len(wanted))
    drafting = _matrices(
        [draft_head.fc, draft_head.layer.qkv, draft_head.layer.out, draft_head.layer.gate_up, draft_head.layer.down],
        batch.rows,
    )
    layers = [_times(part, len(decoder.layers)) for part in (first, attended, second)]
    yield case(
        "attention half, one layer",
        lambda: layer.attention(x, *rotation, layout, keys[0], values[0]),
        first,
        attended,
    )
    yield case("MLP half, one layer", lambda: layer.mlp(x), second)
    yield case("output head", lambda: decoder.logits(wanted), head)
    yield case(
        "draft head, one forward",
        lambda: draft_head(following, x, layout, rotation, keys[0], values[0]),
        drafting,
        attended,
    )
    yield case(
        "whole forward", lambda: decoder(x, layout, batch.packed.wanted_rows, keys, values).logits, *layers, head
    )


def _matrices(modules: list[nn.Linear], rows: int) -> Part:
    values = sum(each.weight.numel() for each in modules)
    return Part("matrices", float(sum(each.weight.nbytes for each in modules)), 2.0 * values * rows, rows)


def _attended(decoder: LlamaDecoder, batch: Batch, cache: KVCache) -> Part:
    """One layer's: each key and value row is read once, those of the batch are written once."""
    config = decoder.config
    row: Tensor = cache.keys[0, 0, 0]
    operations = 4.0 * batch.pairs * config.num_attention_heads * config.head_dim
    return Part("attention", 2.0 * row.nbytes * (batch.key_rows + batch.rows), operations, batch.rows)


def _times(part: Part, count: int) -> Part:
    return replace(part, bytes=part.bytes * count, operations=part.operations * count)
