# SPDX-License-Identifier: Apache-2.0
"""What is trained is what is served."""

import numpy as np
import pytest
import torch
from support.checkpoints import bins_of, load_openvla, with_sensors

from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import KVCache, new_cache
from specvla_ros.lab.plans import NanoShape
from specvla_ros.lab.training.batched_forward import action_logits
from specvla_ros.lab.training.dataset import Batches, DemonstrationSet
from specvla_ros.lab.training.nano import write_nano
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation

INSTRUCTIONS = ("lift the red cube", "put the red cube on the block now")
STATISTICS = {"d": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nano")
    shape = NanoShape(
        image_size=28, patch_size=14, vision_dim=32, vision_depth=3, hidden_size=64, layers=3, head_dim=16
    )
    write_nano(directory, shape, INSTRUCTIONS, STATISTICS, seed=3)
    policy = load_openvla(directory, device="cpu")
    policy.model.double()
    return policy


def served_logits(policy: OpenVLATarget, image: np.ndarray, instruction: str, answer: list[int]) -> torch.Tensor:
    """Logits of each answer token by the packed forward: the prompt, then one node per token."""
    cache: KVCache = new_cache(policy.decoder, slots=1, slot_rows=64)
    prompt = policy.prompt_embeddings(Observation(image, "", 1), policy.prompt.ids(instruction))
    logits = [packed_forward(policy.decoder, [Segment(0, 0, prompt)], cache).logits]
    for i, token in enumerate(answer[:-1]):
        node = Segment(0, len(prompt) + i, torch.tensor([token]), ancestry=Ancestry.from_parents((-1,)))
        logits.append(packed_forward(policy.decoder, [node], cache).logits)
    return torch.cat(logits)


@torch.no_grad()
def test_every_branch_gives_the_logits_of_the_served_model(policy):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 28, 28, 3), dtype=np.uint8)
    prompts = [policy.prompt.ids(text) for text in INSTRUCTIONS]
    ids = torch.zeros(3, 2, max(map(len, prompts)), dtype=torch.int64)
    for place, prompt in enumerate(prompts):
        ids[:, place, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([[len(prompt) for prompt in prompts]] * 3)
    first = bins_of(policy).tokenizer.first_id
    answers = torch.from_numpy(rng.integers(first, first + 256, (3, 2, 7)))
    pixels = torch.stack([policy.image_processor(image) for image in images]).double()[:, None]

    trained = action_logits(policy.model, pixels, ids, lengths, answers)

    for i, image in enumerate(images):
        for place, text in enumerate(INSTRUCTIONS):
            served = served_logits(policy, image, text, answers[i, place].tolist())
            torch.testing.assert_close(trained[i, place], served.double(), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_pictures_and_state_stand_where_the_served_prompt_has_them(tmp_path):
    shape = NanoShape(
        image_size=28, patch_size=14, vision_dim=32, vision_depth=3, hidden_size=64, layers=3, head_dim=16
    )
    write_nano(tmp_path, shape, INSTRUCTIONS, STATISTICS, seed=3)
    policy = load_openvla(with_sensors(tmp_path), device="cpu")
    policy.model.double()
    rng = np.random.default_rng(1)
    steps, cameras = 3, len(policy.cameras)
    data = DemonstrationSet(
        images=rng.integers(0, 256, (steps, cameras, 28, 28, 3), dtype=np.uint8),
        states=rng.uniform(-1, 1, (steps, 2)),
        actions=rng.uniform(-1, 1, (steps, 2, 7)),
        instruction_of=np.array([[0, 1]] * steps),
        episode_of=np.zeros(steps, np.int64),
        time_ns=np.arange(steps),
        instructions=INSTRUCTIONS,
    )
    batch = Batches(policy, data).make(np.arange(steps))
    trained = action_logits(policy.model, batch.pixels.double(), batch.prompt_ids, batch.lengths, batch.answers)
    for step in range(steps):
        images = dict(zip(policy.cameras, data.images[step], strict=True))
        for place, text in enumerate(INSTRUCTIONS):
            seen = Observation(images, text, 1, state=data.states[step])
            prompt = policy.prompt_embeddings(seen, policy.prompt_layout(seen).ids)
            cache: KVCache = new_cache(policy.decoder, slots=1, slot_rows=64)
            served = packed_forward(policy.decoder, [Segment(0, 0, prompt)], cache).logits
            torch.testing.assert_close(trained[step, place, :1], served.double(), rtol=1e-5, atol=1e-5)
