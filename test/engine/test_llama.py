"""Our Llama against transformers' on the same weights."""

import pytest
import torch
from random_decoder import random_decoder
from transformers_baseline import transformers_llama

from specvla_ros.engine.packed_forward import new_ring, packed_forward
from specvla_ros.engine.segment import Segment
from specvla_ros.models.config import LlamaConfig

SHAPES = [
    LlamaConfig(64, 160, 3, 4, 4, 16, vocab_size=300, max_position_embeddings=128),
    LlamaConfig(48, 96, 2, 6, 2, 8, vocab_size=211, max_position_embeddings=128, rope_theta=5e5),
    LlamaConfig(80, 216, 2, 4, 1, 20, vocab_size=130, max_position_embeddings=128, rms_norm_eps=1e-5),
    LlamaConfig(32, 64, 1, 2, 2, 24, vocab_size=130, max_position_embeddings=128, tie_word_embeddings=True),
]


@pytest.mark.parametrize("config", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_prefill_and_decode_equal_transformers(config: LlamaConfig, seed: int) -> None:
    decoder = random_decoder(config, seed=seed, dtype=torch.float64)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    reference = transformers_llama(decoder)
    prompt = torch.randint(config.vocab_size, (37,), generator=torch.Generator().manual_seed(seed))
    expected = reference.generate(prompt[None], max_new_tokens=12, do_sample=False, eos_token_id=None)[0]

    ring = new_ring(decoder, slots=1, slot_rows=64)
    result = packed_forward(decoder, [Segment(0, 0, prompt, wanted=len(prompt))], ring)
    torch.testing.assert_close(result.logits, reference(prompt[None]).logits[0], atol=1e-5, rtol=1e-5)

    tokens = [int(result.logits[-1].argmax())]
    for step in range(11):
        root = Segment(0, len(prompt) + step, torch.tensor(tokens[-1:]), parents=(-1,))
        tokens.append(int(packed_forward(decoder, [root], ring).logits[0].argmax()))
    assert tokens == expected[len(prompt) :].tolist()
