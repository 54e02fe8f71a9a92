# SPDX-License-Identifier: Apache-2.0
"""A quantised policy decodes as any other: strict speculation and pipelining yield its own plain tokens.

In float64 they are equal, always. In float32 the products with quantised matrices are, row by row, the same to the last
bit in any batch, but attention and norms are not: a difference in their last bit can move an activation over the edge
between two of its 255 steps. So there a token may differ where the two best logits are near each other, and there
alone.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import load_openvla
from support.draft_heads import write_random_head
from support.nightly import nightly_but
from support.random_checkpoint import write_random_checkpoint

from specvla_kernels.int8_linear import packed_product
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models import quantization
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.decoder import DecoderLayer
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.models.quantization import fast_format, quantize_layer
from specvla_ros.speculation.settings import DraftSettings, adjusted

pytest.importorskip("torchao.quantization", reason="torchao is not installed")

DRAFT = adjusted(DraftSettings(nodes=12, top_k=4, depth=4), temporal=True)
MODES = [
    EngineSettings("spec", draft=DRAFT),
    EngineSettings("spec", draft=adjusted(DraftSettings(nodes=6), self_tokens=3)),
    EngineSettings("pipeline", prefill_chunks=2),
    EngineSettings("specpipe", prefill_chunks=2, in_order=True, draft=DRAFT),
]
FRAMES = 12


def _mode(chosen: EngineSettings) -> str:
    return f"{chosen.mode}-{chosen.draft.drafters['self'].tokens}"


# An activation that moves by one step changes a logit by at most about 1 / 127 of its size, and only a few move.
MARGIN = 0.05


SHAPES = (dict(seed=3, hidden_size=96, layers=4), dict(seed=8, hidden_size=64, layers=1))


@pytest.fixture(scope="module", params=nightly_but(lambda shape: shape is SHAPES[0], SHAPES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(path, **request.param)
    write_random_head(path / "draft", load_openvla(path, device="cpu").decoder)
    return path


def quantised(directory: Path, how: str = "w8a8") -> OpenVLATarget:
    return load_openvla(directory, device="cpu", quantization=how)


def frame(stamp_ns: int) -> Observation:
    image = np.random.default_rng(stamp_ns).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns)


def answers(policy: OpenVLATarget, chosen: EngineSettings) -> dict[int, tuple[int, ...]]:
    """Tokens by stamp; the pipelined modes get a new frame in every tick."""
    engine = Engine(policy, chosen)
    waiting = [frame(stamp) for stamp in range(1, FRAMES + 1)]
    found: dict[int, tuple[int, ...]] = {}
    while waiting or engine.busy:
        if waiting and engine.has_room:
            engine.submit(waiting.pop(0))
        for outcome in engine.tick():
            if isinstance(outcome, Action):
                found[outcome.observation.stamp_ns] = outcome.tokens
    return found


@pytest.mark.parametrize("how", nightly_but(lambda how: how == "w8a8", ["w8a8", "w8a8_hadamard", "int4"]))
@pytest.mark.parametrize("chosen", nightly_but(lambda each: each.mode == "specpipe", MODES), ids=_mode)
def test_every_mode_yields_the_plain_decoders_tokens_in_float64(
    directory: Path, chosen: EngineSettings, how: str
) -> None:
    policy = quantised(directory, how)
    policy.model.to(torch.float64)
    plain = answers(policy, EngineSettings("ar"))
    assert len(set(plain.values())) > 1
    found = answers(policy, chosen)
    assert found.items() <= plain.items()
    assert len(found) == FRAMES or chosen.mode == "pipeline"


@pytest.mark.parametrize("chosen", nightly_but(lambda each: each.mode == "specpipe", MODES), ids=_mode)
def test_in_float32_a_token_differs_only_where_two_are_nearly_as_good(directory: Path, chosen: EngineSettings) -> None:
    policy = quantised(directory)
    plain, found = answers(policy, EngineSettings("ar")), answers(policy, chosen)
    differing = {stamp for stamp, tokens in found.items() if tokens != plain[stamp]}
    for stamp in differing:
        place = next(i for i, pair in enumerate(zip(found[stamp], plain[stamp], strict=True)) if pair[0] != pair[1])
        assert top_two_margin(policy, frame(stamp), plain[stamp][:place]) < MARGIN
    assert len(differing) <= 1


@torch.inference_mode()
def top_two_margin(policy: OpenVLATarget, observation: Observation, tokens: tuple[int, ...]) -> float:
    """By how much the best logit behind a prefix is ahead of the second, beside the largest."""
    prompt = policy.prompt_embeddings(observation, policy.prompt.ids(observation.instruction))
    sequence = torch.cat((prompt, policy.decoder.embed_tokens(torch.tensor(tokens, dtype=torch.int64))))
    cache = new_cache(policy.decoder, slots=1, slot_rows=len(sequence))
    first, second = packed_forward(policy.decoder, [Segment(0, 0, sequence)], cache).logits[0].topk(2).values.tolist()
    return float((first - second) / abs(first))


def test_nan_in_a_quantised_policy_gives_no_action(directory: Path) -> None:
    policy = quantised(directory)
    for layer in policy.decoder.layers:
        layer.get_parameter("input_norm.weight").fill_(float("nan"))
    outcome = Engine(policy, EngineSettings("ar")).act(frame(1))
    assert isinstance(outcome, Drop)
    assert outcome.reason is DropReason.NOT_FINITE


@pytest.mark.skipif(packed_product() is None, reason="this processor has no exact packed product")
def test_the_draft_heads_layer_is_packed_beside_a_packed_target_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {how: quantised(directory, how) for how in ("none", "int4", "w8a8")}
    packed: list[str] = []
    for how, target in targets.items():
        with monkeypatch.context() as patch:
            patch.setattr(quantization, "quantize_layer", lambda layer, as_, how=how: packed.append(f"{how}: {as_}"))
            Engine(target, EngineSettings("spec", draft=DRAFT))
    assert packed == ["w8a8: w8a8"]
    layer = DecoderLayer(DecoderShape(32, 40, 1, 4, 2, 16, vocab_size=50)).requires_grad_(False)
    quantize_layer(layer, "w8a8")
    assert fast_format(layer) == "w8a8"


@pytest.mark.parametrize("how", ["none", "w8a8", "w8a8_hadamard", "fp8"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_draft_heads_layer_is_quantised_where_a_gpu_computes_in_8_bits(
    how: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "pack_int8", lambda *_: None)
    monkeypatch.setattr(quantization, "has_kernels", lambda _: kernels)
    layer = DecoderLayer(DecoderShape(32, 40, 1, 4, 2, 16, vocab_size=50)).requires_grad_(False)
    if how != "none":
        quantize_layer(layer, how)
    expected = {"none": "", "w8a8_hadamard": "w8a8"}.get(how, how)
    assert fast_format(layer) == (expected if kernels else "")
