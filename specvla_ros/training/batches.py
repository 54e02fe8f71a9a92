"""From demonstrations to training batches."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specvla_ros.models.policy import Policy
from specvla_ros.training.dataset import DemonstrationSet

_BRIGHTNESS = 0.1
_TINT = 0.05


@dataclass(frozen=True)
class Batch:
    """Some steps of demonstrations, each with every instruction that is known for it.

    Args:
        pixels: float32 [batch, 3 * towers, size, size], normalised.
        prompt_ids: int64 [batch, asked, n], padded on the right.
        lengths: int64 [batch, asked], ids that are not padding.
        answers: int64 [batch, asked, 7], the action tokens.
    """

    pixels: Tensor
    prompt_ids: Tensor
    lengths: Tensor
    answers: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        return Batch(*(each.to(device, non_blocking=True) for each in vars(self).values()))


class Batches:
    """Makes batches of a policy's demonstrations.

    Args:
        policy: whose prompt, pixels and action tokens they are made for.
        data: the demonstrations.
    """

    def __init__(self, policy: Policy, data: DemonstrationSet) -> None:
        self._images = data.images
        self._instruction_of = data.instruction_of
        prompts = [policy.prompt_ids(text) for text in data.instructions]
        self._lengths = torch.tensor([len(ids) for ids in prompts])
        self._prompts = torch.zeros(len(prompts), int(self._lengths.max()), dtype=torch.int64)
        for row, ids in zip(self._prompts, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        normalised = policy.statistics.normalise(data.actions)
        self._answers = torch.from_numpy(policy.action_tokenizer.encode(normalised))
        towers = policy.image_processor.towers
        self._mean = torch.from_numpy(np.concatenate([tower.mean for tower in towers]))[:, None, None]
        self._std = torch.from_numpy(np.concatenate([tower.std for tower in towers]))[:, None, None]
        self._towers = len(towers)

    def make(self, steps: np.ndarray, augment: np.random.Generator | None = None) -> Batch:
        """A batch of these steps.

        Args:
            steps: int64 [batch].
            augment: changes brightness and tint of each image; None: the images as they are.
        """
        order = np.argsort(steps)  # the file is read from front to back
        steps = steps[order]
        pixels = torch.from_numpy(self._images[steps]).permute(0, 3, 1, 2).float().div_(255.0)
        if augment is not None:
            gain = augment.uniform(1 - _BRIGHTNESS, 1 + _BRIGHTNESS, (len(steps), 1, 1, 1))
            tint = augment.uniform(-_TINT, _TINT, (len(steps), 3, 1, 1))
            pixels.mul_(torch.from_numpy(gain)).add_(torch.from_numpy(tint)).clamp_(0.0, 1.0)
        pixels = (pixels.repeat(1, self._towers, 1, 1) - self._mean) / self._std
        asked = torch.from_numpy(self._instruction_of[steps])
        return Batch(pixels, self._prompts[asked], self._lengths[asked], self._answers[torch.from_numpy(steps)])


def shuffled(steps: np.ndarray, batch_size: int, *, seed: int, start: int = 0) -> Iterator[np.ndarray]:
    """Endless batches of steps, each epoch in a new order that only the seed and the epoch decide.

    Args:
        steps: int64 [n], at least one.
        batch_size: rows; larger than n: batches of n.
        seed: of the order.
        start: batches to leave out, for training that goes on where it stopped.
    """
    size = min(batch_size, len(steps))
    per_epoch = len(steps) // size
    epoch, skip = divmod(start, per_epoch)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(steps)
        for i in range(skip, per_epoch):
            yield order[i * size : (i + 1) * size]
        epoch, skip = epoch + 1, 0
