# SPDX-License-Identifier: Apache-2.0
"""The draft head as it is trained equals the draft head as it drafts."""

import pytest
import torch
from support.draft_heads import random_head

from benchmarks.random_policy import random_decoder
from specvla_kernels.layout import Span, pack_layout
from specvla_ros.lab.training.batched_forward import draft_features
from specvla_ros.lab.training.draft_features import Sample
from specvla_ros.lab.training.train_draft import collate
from specvla_ros.models.config import DecoderShape
from specvla_ros.speculation.drafters.eagle.head import EagleHead

CONFIG = DecoderShape(32, 64, 2, 4, 2, 8, vocab_size=50, max_position_embeddings=128)
DECODER = random_decoder(CONFIG, seed=0, dtype=torch.float64)
HEAD = random_head(DECODER, seed=1)
PARALLEL = random_head(DECODER, seed=1, parallel_depth=5)
ANSWER = 6


def sample(seed: int, prompt: int, answer: int = ANSWER) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(prompt, 32, generator=generator)
    hidden = torch.randn(prompt + answer, 32, generator=generator)
    return Sample(embeddings, hidden, torch.randint(50, (answer + 1,), generator=generator))


class Served:
    """The head over its keys and values, a row at a time."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self._keys, self._values = (torch.full((1, 64, 2, 8), float("nan"), dtype=torch.float64) for _ in range(2))
        self._row = 0

    def feed(self, fused: torch.Tensor) -> torch.Tensor:
        span = Span(0, 0, len(fused), self._row, is_tree=False)
        layout = pack_layout([(span, None)], 64, fused.device)
        self._row += len(fused)
        return self._head(fused, layout, DECODER.rotation(layout.positions), self._keys, self._values)


@pytest.mark.parametrize("head", [HEAD, PARALLEL], ids=["levels", "parallel"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_each_step_is_what_a_tree_of_that_depth_is_fed_with(steps: int, head: EagleHead) -> None:
    samples = [sample(1, 9), sample(2, 4)]
    batch = collate(samples, DECODER.embed_tokens)
    following, hidden = batch.following.double(), batch.hidden.double()
    cos, sin = DECODER.rotation(torch.arange(following.shape[1]))
    features = draft_features(head, following, hidden, batch.padding, cos, sin, answer=ANSWER, steps=steps)
    assert len(features) == steps
    for i, pad in enumerate(batch.padding.tolist()):
        real_following, real_hidden = following[i, pad:], hidden[i, pad:]
        prompt = len(real_following) - ANSWER
        for step, predicted in enumerate(features):
            assert predicted.shape == (2, ANSWER - step, 32)
            for place in range(step, ANSWER):
                served = Served(head)
                known = prompt + place - step + 1
                out = served.feed(head.fuse(real_following[:known], real_hidden[:known]))[-1:]
                for i_own, own in enumerate(range(known, known + step)):
                    node = real_following[own : own + 1]
                    if head.parallel_depth > 1:
                        taken, given = (each.get_parameter("weight") for each in head.branch)
                        masked = served.feed(head.mask_rows[i_own : i_own + 1])
                        out = masked + torch.cat((node, out), dim=1) @ taken.T @ given.T
                    else:
                        out = served.feed(head.fuse(node, out))
                torch.testing.assert_close(
                    predicted[i, place - step], out[0], atol=1e-6, rtol=1e-6
                )  # rotations are float32


def test_a_batch_lines_the_answers_up() -> None:
    batch = collate([sample(1, 9), sample(2, 4)], DECODER.embed_tokens)
    assert batch.padding.tolist() == [0, 5]
    assert batch.prompt_rows == 8 and batch.following.shape == (2, 8 + ANSWER, 32)
    second = sample(2, 4)
    torch.testing.assert_close(batch.hidden[1, 5:], second.hidden[:-1])
    torch.testing.assert_close(batch.goal[1], second.hidden[-ANSWER:])
    embedded = DECODER.embed_tokens(second.tokens[:-1]).float()
    torch.testing.assert_close(batch.following[1, 5:], torch.cat((second.prompt[1:], embedded)))


def test_a_shorter_answer_is_padded_and_predicted_as_if_it_were_alone() -> None:
    longer, shorter = sample(1, 4), sample(2, 9, answer=3)
    both, alone = (collate(samples, DECODER.embed_tokens) for samples in ([longer, shorter], [shorter]))
    assert both.there.tolist() == [[True] * ANSWER, [True] * 3 + [False] * 3]
    torch.testing.assert_close(both.goal[1][both.there[1]], alone.goal[0])
    predicted = []
    for batch, answer in ((both, ANSWER), (alone, 3)):
        following, hidden = batch.following.double(), batch.hidden.double()
        rotation = DECODER.rotation(torch.arange(following.shape[1]))
        predicted.append(draft_features(HEAD, following, hidden, batch.padding, *rotation, answer=answer, steps=3))
    for step, (padded, own) in enumerate(zip(*predicted, strict=True)):
        torch.testing.assert_close(padded[1, : 3 - step], own[0], atol=1e-6, rtol=1e-6)
