# SPDX-License-Identifier: Apache-2.0
"""Our decoder against transformers' classes on the same weights: Llama, Qwen2, Qwen3 and Gemma."""

from dataclasses import replace

import pytest
import torch

from benchmarks.random_policy import random_decoder
from benchmarks.transformers_baseline import transformers_decoder
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.config import DECODERS, DecoderShape
from specvla_ros.models.decoder import head_dtype

SHAPES = [
    DecoderShape(64, 160, 3, 4, 4, 16, vocab_size=300, max_position_embeddings=128),
    DecoderShape(48, 96, 2, 6, 2, 8, vocab_size=211, max_position_embeddings=128, rope_theta=5e5),
    DecoderShape(80, 216, 2, 4, 1, 20, vocab_size=130, max_position_embeddings=128, rms_norm_eps=1e-5),
    DecoderShape(32, 64, 1, 2, 2, 24, vocab_size=130, max_position_embeddings=128, tie_word_embeddings=True),
]
OTHER_FAMILIES = [
    pytest.param(replace(shape, variant=DECODERS[family].variant), id=f"{family}-{i}")
    for family in ("qwen2", "qwen3", "gemma")
    for i, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize("config", [*SHAPES, *OTHER_FAMILIES])
@pytest.mark.parametrize("seed", range(3))
def test_prefill_and_decode_equal_transformers(config: DecoderShape, seed: int) -> None:
    decoder = random_decoder(config, seed=seed, dtype=torch.float64)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    reference = transformers_decoder(decoder)
    prompt = torch.randint(config.vocab_size, (37,), generator=torch.Generator().manual_seed(seed))
    seen = torch.ones_like(prompt)[None]  # token 0 is padding to Gemma's config, and here one as any other
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = reference.generate(prompt[None], attention_mask=seen, **options)[0]

    cache = new_cache(decoder, slots=1, slot_rows=64)
    result = packed_forward(decoder, [Segment(0, 0, prompt, wanted=len(prompt))], cache)
    # transformers computes Gemma's norms in float32, whatever the model's own dtype.
    tolerance = 1e-4 if config.variant.unit_offset_norms else 1e-5
    torch.testing.assert_close(result.logits, reference(prompt[None]).logits[0], atol=tolerance, rtol=tolerance)

    tokens = [int(result.logits[-1].argmax())]
    for step in range(11):
        root = Segment(0, len(prompt) + step, torch.tensor(tokens[-1:]), ancestry=Ancestry.from_parents((-1,)))
        tokens.append(int(packed_forward(decoder, [root], cache).logits[0].argmax()))
    assert tokens == expected[len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("dtype", "device", "overloads", "expected"),
    [
        (torch.float32, "cuda", ["dtype"], torch.float32),
        (torch.float64, "cpu", [], torch.float64),
        (torch.bfloat16, "cpu", ["dtype"], torch.float32),
        (torch.bfloat16, "cuda", ["dtype"], torch.bfloat16),
        (torch.float16, "cuda", ["default"], torch.float32),
    ],
)
def test_the_head_is_kept_so_that_logits_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str, overloads: list[str], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.ops.aten.mm, "overloads", lambda: overloads)
    assert head_dtype(dtype, torch.device(device)) == expected


def test_a_tied_head_in_half_precision_gives_float32_logits() -> None:
    decoder = random_decoder(SHAPES[3], dtype=torch.bfloat16)
    decoder.lm_head.weight = decoder.embed_tokens.weight
    cache = new_cache(decoder, slots=1, slot_rows=16)
    logits = packed_forward(decoder, [Segment(0, 0, torch.arange(5))], cache).logits
    assert logits.dtype == torch.float32
    assert not logits.equal(logits.bfloat16().float()), "the logits were rounded"
