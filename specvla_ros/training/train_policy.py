"""Behaviour cloning of a small policy."""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_ros.errors import UserError
from specvla_ros.evaluation.frame_sources import find_bags
from specvla_ros.models.checkpoint import Target, load_target
from specvla_ros.models.codecs.bins import ActionTokenizer
from specvla_ros.models.weights import save_weights
from specvla_ros.training.batched_forward import action_logits
from specvla_ros.training.dataset import (
    Batch,
    Batches,
    DemonstrationSet,
    action_statistics,
    load_demonstrations,
    shuffled,
)
from specvla_ros.training.nano import NanoShape, write_nano

# Neighbouring bins are neighbouring actions, which plain cross-entropy has to learn from the data, bin by bin.
_BLUR_BINS = 2.0


def action_loss(logits: Tensor, answers: Tensor, tokenizer: ActionTokenizer) -> Tensor:
    """Mean cross-entropy over the vocabulary against the true bin blurred over its neighbours; the gripper sharp.

    Args:
        logits: [..., action_dim, vocab].
        answers: int64 [..., action_dim], action tokens.
        tokenizer: says which ids are bins.

    Returns:
        A scalar, float32.
    """
    log_probabilities = logits.float().log_softmax(-1)
    bins = log_probabilities[..., tokenizer.first_id : tokenizer.vocab_size]
    places = torch.arange(bins.shape[-1], device=bins.device)
    true = (answers - tokenizer.first_id)[..., None]
    weights = torch.exp(-0.5 * ((places - true) / _BLUR_BINS) ** 2)
    weights[..., -1, :] = (places == true[..., -1, :]).float()
    weights = weights / weights.sum(-1, keepdim=True)
    return -(weights * bins).sum(-1).mean()


def cross_entropy(logits: Tensor, answers: Tensor) -> Tensor:
    """Cross-entropy of the true tokens, float32 [action_dim]: what a model without a blur is compared by."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), answers.flatten(), reduction="none")
    return losses.view(-1, answers.shape[-1]).mean(0)


STATE_DIRECTORY = "training_state"
_VALIDATION_STEPS = 2048
_WARM_UP = 300
_WEIGHT_DECAY = 0.05
_CLIP = 1.0
_MUON_FACTOR = 2.0
_MUON_SCALE = "match_rms_adamw"  # so that both optimisers take one learning rate


@dataclass(frozen=True)
class PolicyTraining:
    """How to train.

    Args:
        steps: optimiser steps.
        batch_size: of one step, over all processes.
        learning_rate: at its peak, behind a warm-up; it falls to 0 along a cosine.
        seed: of weights, order and augmentation.
        validate_every: steps between validations, each of which also saves the state to go on from.
        unnorm_key: name of the action statistics.
        shape: of the nano policy.

    Raises:
        UserError: a value is out of range.
    """

    steps: int = 10000
    batch_size: int = 32
    learning_rate: float = 1.5e-3
    seed: int = 0
    validate_every: int = 500
    unnorm_key: str = "specvla_table"
    shape: NanoShape = field(default_factory=NanoShape)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise UserError(f"--learning-rate must lie between 0 and 1, got {self.learning_rate}")


@dataclass(frozen=True)
class Validation:
    """How well the policy predicts demonstrations that it has not seen.

    Args:
        step: optimiser steps before it.
        loss: cross-entropy of the true tokens, nats, mean over the dimensions.
        accuracy: per dimension, share of tokens predicted exactly.
        bin_distance: per dimension, mean distance to the true token in bins.
        seconds: of training so far.
    """

    step: int
    loss: float
    accuracy: tuple[float, ...]
    bin_distance: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Where the training stands, for a progress bar."""

    step: int
    steps: int
    loss: float
    samples_per_s: float
    validation: Validation | None


def train_policy(
    data: Sequence[Path],
    out: Path,
    training: PolicyTraining,
    *,
    on_reading: Callable[[int, int], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Validation]:
    """Trains, and leaves an OpenVLA checkpoint in `out`; called again, it goes on where it stopped.

    Args:
        data: bags, or directories of bags.
        out: the checkpoint's directory, with the training state in a folder of it until the end.
        training: what to do.
        on_reading: called with bags read and their number.
        on_progress: called after each step.

    Returns:
        The validations, oldest first.

    Raises:
        UserError: no or unusable bags, or `out` holds the state of another training.
    """
    from accelerate import Accelerator

    bags = find_bags(data)
    accelerator = Accelerator(mixed_precision=_precision())
    with accelerator.main_process_first():  # the others then find the cache filled
        demonstrations = load_demonstrations(
            bags,
            out / STATE_DIRECTORY / "demonstrations",
            training.shape.image_size,
            on_reading if accelerator.is_main_process else None,
        )
    return _Trainer(accelerator, demonstrations, out, training).run(on_progress)


class _Trainer:
    def __init__(self, accelerator: Any, data: DemonstrationSet, out: Path, training: PolicyTraining) -> None:
        self._accelerator = accelerator
        self._out = out
        self._state = out / STATE_DIRECTORY
        self._training = training
        self._train = np.flatnonzero(~data.validation)
        self._validate = np.flatnonzero(data.validation)
        if not len(self._train) or not len(self._validate):
            raise UserError(
                f"{len(data.images)} steps in {data.episode_of.max() + 1} episodes are too few to train on and to "
                "validate with: 20 episodes are the least"
            )
        if accelerator.is_main_process:
            self._check_or_begin(data)
        accelerator.wait_for_everyone()
        self._policy = load_target(out, device=str(accelerator.device), dtype="float32")
        self._batches = Batches(self._policy, data)
        self._model = _Trainee(self._policy)
        self._optimisers = [accelerator.prepare(each) for each in _optimisers(self._model, training.learning_rate)]
        self._wrapped = accelerator.prepare(self._model)
        self._history: list[Validation] = []
        self._done = 0

    def run(self, on_progress: Callable[[Progress], None] | None) -> list[Validation]:
        self._resume()
        training, share = self._training, self._accelerator.num_processes
        order = shuffled(
            self._train, max(1, training.batch_size // share) * share, seed=training.seed, start=self._done
        )
        earlier_s = self._history[-1].seconds if self._history else 0.0
        started, before = time.monotonic(), self._done
        while self._done < training.steps:
            loss = self._step(next(order))
            self._done += 1
            elapsed_s = time.monotonic() - started
            if self._done % training.validate_every == 0 or self._done == training.steps:
                self._history.append(self._validation(earlier_s + elapsed_s))
                self._save_state()
            if on_progress is not None and self._accelerator.is_main_process:
                speed = (self._done - before) * training.batch_size / elapsed_s
                validation = self._history[-1] if self._history else None
                on_progress(Progress(self._done, training.steps, loss, speed, validation))
        if self._accelerator.is_main_process:
            self._finish()
        return self._history

    def _step(self, steps: np.ndarray) -> float:
        training = self._training
        rank, share = self._accelerator.process_index, self._accelerator.num_processes
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * _schedule(self._done, training.steps)
        augment = np.random.default_rng([training.seed, self._done, rank])
        batch = self._batches.make(steps[rank::share], augment).to(self._accelerator.device)
        with self._accelerator.autocast():
            logits = self._wrapped(batch)
        loss = action_loss(logits, batch.answers, self._policy.action_tokenizer)
        if not torch.isfinite(loss):
            raise UserError(
                f"the loss is not finite at step {self._done}: lower --learning-rate; the last state is kept"
            )
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._wrapped.parameters(), _CLIP)
        for optimiser in self._optimisers:
            optimiser.step()
        return float(loss.detach())

    @torch.no_grad()
    def _validation(self, seconds: float) -> Validation:
        some = self._validate[:: max(1, len(self._validate) // _VALIDATION_STEPS)]
        losses, right, distance = [], [], []
        for start in range(0, len(some), 256):
            batch = self._batches.make(some[start : start + 256]).to(self._accelerator.device)
            with self._accelerator.autocast():
                logits = self._model(batch)
            predicted = logits.argmax(-1)
            losses.append(cross_entropy(logits, batch.answers) * len(predicted))
            right.append((predicted == batch.answers).float().flatten(0, 1))
            distance.append((predicted - batch.answers).abs().float().flatten(0, 1))
        return Validation(
            step=self._done,
            loss=float(torch.stack(losses).sum(0).mean() / len(some)),
            accuracy=tuple(torch.cat(right).mean(0).tolist()),
            bin_distance=tuple(torch.cat(distance).mean(0).tolist()),
            seconds=seconds,
        )

    def _check_or_begin(self, data: DemonstrationSet) -> None:
        described = self._describe(data)
        path = self._state / "training.json"
        if path.exists():
            if json.loads(path.read_text()) != described:
                raise UserError(
                    f"{self._out} holds the state of another training (other data or settings, see {path}); choose "
                    "another --out, or remove that directory"
                )
            return
        if (self._out / "config.json").exists():
            raise UserError(f"{self._out} holds a checkpoint already; choose another --out")
        norm_stats = {self._training.unnorm_key: action_statistics(data.actions)}
        write_nano(self._out, self._training.shape, data.instructions, norm_stats, seed=self._training.seed)
        path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    def _describe(self, data: DemonstrationSet) -> dict[str, Any]:
        settings = asdict(self._training)
        return settings | {"demonstration_steps": len(data.images), "episodes": int(data.episode_of.max()) + 1}

    def _save_state(self) -> None:
        if not self._accelerator.is_main_process:
            return
        state = {
            "model": self._model.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "history": [asdict(each) for each in self._history],
            "done": self._done,
        }
        partial = self._state / "state.pt.partial"
        torch.save(state, partial)
        partial.replace(self._state / "state.pt")

    def _resume(self) -> None:
        path = self._state / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self._accelerator.device, weights_only=True)
        self._model.model.load_state_dict(state["model"])
        for optimiser, kept in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self._history = [
            Validation(**each | {k: tuple(each[k]) for k in ("accuracy", "bin_distance")}) for each in state["history"]
        ]
        self._done = state["done"]

    def _finish(self) -> None:
        """Writes the weights in bfloat16, as OpenVLA's are, and what was done; the state goes."""
        tensors = self._policy.model.checkpoint_tensors()
        save_weights(
            self._out / "model.safetensors", {name: tensor.bfloat16().cpu() for name, tensor in tensors.items()}
        )
        described = json.loads((self._state / "training.json").read_text())
        described["validation"] = [asdict(each) for each in self._history]
        (self._out / "training.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(self._state)


class _Trainee(nn.Module):
    """The policy's model as a function of a batch, as accelerate wraps it for several GPUs."""

    def __init__(self, policy: Target) -> None:
        super().__init__()
        self.model = policy.model.train().requires_grad_(True)

    def forward(self, batch: Batch) -> torch.Tensor:
        return action_logits(self.model, batch.pixels, batch.prompt_ids, batch.lengths, batch.answers)


def _optimisers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices inside, AdamW for embeddings, head, norms and biases.

    On this task Muon needs about half the images of AdamW until the policy finds the things on the table.
    """
    inside: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (inside if is_matrix else rest).append(parameter)
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inside, lr=_MUON_FACTOR * learning_rate, weight_decay=_WEIGHT_DECAY, adjust_lr_fn=_MUON_SCALE),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return optimisers


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine to 0."""
    warm_up = min(_WARM_UP, max(1, steps // 10))
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _precision() -> str:
    """bfloat16 where the processor multiplies it; elsewhere it is slower than float32."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    return (
        "bf16"
        if torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()
        else "no"
    )
