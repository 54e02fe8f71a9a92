# SPDX-License-Identifier: Apache-2.0
"""Captured vision towers give what they give without capture, for every image; where they fail all runs uncaptured.

There is no GPU here: the capture is one that runs the work again on the same memory.
"""

import numpy as np
import pytest
import torch
from support.captures import Run, capture_with, refuses
from support.checkpoints import load_openvla
from support.draft_heads import policy_with_random_head
from support.no_read_back import no_read_back
from support.random_checkpoint import write_random_checkpoint
from support.static_forwards import recorded

from benchmarks.random_policy import random_decoder
from specvla_kernels.graph_capture import Capture, capture_on
from specvla_ros.engine import runner as graphs
from specvla_ros.engine.cuda_graphs import ForwardSizes
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.runner import Forwards, Graphs
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.vision import StaticVision, Vision
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation

PLAIN = EngineSettings("ar")
CHUNKED = EngineSettings("pipeline", prefill_chunks=3)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=6, hidden_size=64, layers=2)


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def answers(engine: Engine, first_ns: int = 1) -> dict[int, tuple[int, ...]]:
    """Tokens by stamp, of a frame every tick that has room for one; each shows something else."""
    ended: list[Outcome] = []
    for stamp_ns in range(first_ns, first_ns + 6):
        ended += engine.submit(Observation(image(stamp_ns), "put carrot on plate", stamp_ns))
        ended += engine.tick()
        while not engine.has_room:
            ended += engine.tick()
    while engine.busy:
        ended += engine.tick()
    return {each.observation.stamp_ns: each.tokens for each in ended if isinstance(each, Action)}


def counting(replays: list[int]) -> Capture:
    """Appends 1 whenever it runs again."""

    def capture(run: Run) -> Run:
        again = recorded(run)

        def counted() -> torch.Tensor:
            replays.append(1)
            return again()

        return counted

    return capture


@pytest.mark.parametrize("chosen", [PLAIN, CHUNKED], ids=["ar", "chunked"])
def test_every_frame_is_seen_by_captured_towers(
    policy: OpenVLATarget, chosen: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(Engine(policy, chosen))
    assert len(set(expected.values())) > 1, "what is shown decides what is answered"
    replays: list[int] = []
    capture_with(monkeypatch, counting(replays), of=StaticVision)
    engine = Engine(policy, chosen)
    assert answers(engine) == expected and not replays, "nothing is captured that was not warmed up"
    engine.reset()
    engine.warm_up()
    assert (
        engine.describe()["cuda_graphs"] == f"{len(ForwardSizes.from_settings(policy, chosen).buckets()) + 1} captured"
    )
    replays.clear()
    assert answers(engine) == expected
    assert len(replays) == 6


def test_a_switch_captures_again_and_the_next_frame_is_seen_by_that(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(Engine(policy, CHUNKED))
    replays: list[int] = []
    capture_with(monkeypatch, counting(replays), of=StaticVision)
    engine = Engine(policy, PLAIN)
    engine.warm_up()
    before = engine.runner.vision
    engine.switch(CHUNKED)
    assert engine.runner.vision is not before
    replays.clear()
    assert answers(engine) == expected
    assert len(replays) == 6


@torch.inference_mode()
def test_a_prompt_of_several_images_has_each_of_them(policy: OpenVLATarget) -> None:
    """The next image overwrites what the last one gave."""
    static = StaticVision(policy.model, recorded)
    pixels = tuple(policy.image_processor(image(seed)) for seed in range(3))
    observation, ids = policy.blank_observation(), (1, 5, 7)
    for shown in (pixels, pixels[:1], pixels[1:]):
        with no_read_back():
            prompt = policy.prompt_embeddings(observation, ids, static, shown)
        assert prompt.equal(policy.prompt_embeddings(observation, ids, pixels=shown))


@torch.inference_mode()
def test_what_was_captured_is_forgotten_when_a_later_warm_up_fails(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_with(monkeypatch)
    decoder = random_decoder(DecoderShape(32, 40, 2, 4, 2, 16, vocab_size=50), dtype=torch.float64)
    vision = Vision(policy.model)
    cache = new_cache(decoder, slots=1, slot_rows=64)
    run = Graphs(cache.keys, (Forwards(decoder, cache, ForwardSizes(slots=1, nodes=4, prompts=(8,))), vision))
    run.warm_up()
    assert vision._captured is not None
    monkeypatch.setattr(graphs, "capture_on", lambda _: refuses)
    run.warm_up()
    assert vision._captured is None and run.status.startswith("0 captured; eager: forwards of ")


def test_on_a_cpu_the_towers_run_as_they_come(policy: OpenVLATarget) -> None:
    engine = Engine(policy, PLAIN)
    engine.warm_up()
    assert engine.runner.vision._captured is None
    assert len(answers(engine)) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@torch.inference_mode()
def test_on_a_gpu_images_in_quick_succession_keep_their_embeddings(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, seed=6, hidden_size=64, layers=2)
    policy = load_openvla(directory, device="cuda", dtype="float32")
    capture = capture_on(policy.decoder.norm.weight)
    assert capture is not None
    static = StaticVision(policy.model, capture)
    shown = [policy.image_processor(image(seed)) for seed in range(20)]
    results = [static(pixels).clone() for pixels in shown]  # the next image overwrites what the last one gave
    for pixels, result in zip(shown, results, strict=True):
        torch.testing.assert_close(result, policy.model.image_embeddings(pixels), atol=1e-4, rtol=1e-4)
