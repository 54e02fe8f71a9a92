"""`specvla train-draft`: teaches an EAGLE draft head to foresee its target's hidden states and tokens."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_ros.errors import UserError
from specvla_ros.evaluation.frame_sources import (
    SIMULATION,
    bag_source,
    find_bags,
    require_frames,
    simulation_source,
)
from specvla_ros.evaluation.provenance import file_hashes
from specvla_ros.models.checkpoint import Target
from specvla_ros.simulation.tasks import FRAME_FIRST_SEED
from specvla_ros.speculation.drafters.eagle_head import EagleHead, save_draft_head
from specvla_ros.training.draft_features import FeatureStore, Sample, shuffled_samples
from specvla_ros.training.draft_model import DraftValidation, draft_features, validate_draft

STATE_DIRECTORY = "training_state"
_FEATURE_WEIGHT, _TOKEN_WEIGHT = 1.0, 0.1  # Spec-VLA section 5.1
_LATER_STEP = 0.8  # weight of a step fed with the head's own features, against the one before it
_WARM_UP = 2000
_CLIP = 0.5
_BETAS = (0.9, 0.95)
_NOISE = 0.2 * 512  # EAGLE: uniform, this wide, over the length of the sequence
_HELD_OUT = 20  # one shard in so many, and at least one


@dataclass(frozen=True)
class DraftTraining:
    """How to train a draft head.

    Args:
        epochs: passes over the features.
        batch_size: samples of one step, over all processes.
        learning_rate: at its peak, behind a warm-up; then it falls to 0.
        own_steps: how many drafted tokens deep the head is trained on its own features (training-time test); 1: on the
            target's only, as in EAGLE and Spec-VLA.
        seed: of weights, order and noise.

    Raises:
        UserError: a value is out of range.
    """

    epochs: int = 20
    batch_size: int = 16
    learning_rate: float = 5e-5
    own_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "own_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise UserError(f"--learning-rate must lie between 0 and 1, got {self.learning_rate}")


@dataclass(frozen=True)
class DraftProgress:
    """Where the training stands, for a progress bar."""

    step: int
    steps: int
    loss: float
    validation: DraftValidation | None


def collect_features(
    policy: Target,
    data: Sequence[Path] | None,
    out: Path,
    *,
    seed: int,
    frames: int,
    max_bytes: float,
    on_frame: Callable[[int], None] | None = None,
) -> list[Path]:
    """Asks the target about frames and keeps its features below `out`; called again it goes on where it stopped.

    Args:
        policy: the target.
        data: bags, or directories of bags; None: what the target does in simulation.
        out: the draft head's directory.
        seed: of the frames' order.
        frames: at most.
        max_bytes: of the features on disk.
        on_frame: called with the number of frames done.

    Returns:
        The shards.

    Raises:
        UserError: no usable data, or `out` holds features of something else.
    """
    named = sorted(str(bag.resolve()) for bag in find_bags(data)) if data is not None else [SIMULATION]
    described = {"target": file_hashes(sorted(policy.directory.glob("*.safetensors"))), "data": named, "seed": seed}
    store = FeatureStore(out / STATE_DIRECTORY / "features", described)
    source = (
        bag_source(find_bags(data), seed) if data is not None else simulation_source(policy, FRAME_FIRST_SEED + seed)
    )
    store.fill(policy, islice(require_frames(source), frames), limit_bytes=max_bytes, on_frame=on_frame)
    return store.shards


def train_draft(
    policy: Target,
    shards: Sequence[Path],
    out: Path,
    training: DraftTraining,
    on_progress: Callable[[DraftProgress], None] | None = None,
) -> list[DraftValidation]:
    """Trains, and leaves a draft checkpoint in `out`; called again, it goes on behind the last whole epoch.

    Args:
        policy: the target.
        shards: of features, see FeatureStore.
        out: the checkpoint's directory.
        training: what to do.
        on_progress: called after each step and each validation.

    Returns:
        One validation per epoch.

    Raises:
        UserError: too few features, or `out` holds the state of another training.
    """
    from accelerate import Accelerator

    held_out = max(1, len(shards) // _HELD_OUT)
    if len(shards) <= held_out:
        raise UserError("the features fill one shard only: too few to train on and to validate with; give more frames")
    return _Trainer(Accelerator(), policy, shards[:-held_out], shards[-held_out:], out, training).run(on_progress)


class _Trainer:
    def __init__(
        self,
        accelerator: Any,
        policy: Target,
        shards: Sequence[Path],
        held_out: Sequence[Path],
        out: Path,
        training: DraftTraining,
    ) -> None:
        self._accelerator = accelerator
        self._policy = policy
        self._shards, self._held_out = shards, held_out
        self._out, self._state = out, out / STATE_DIRECTORY
        self._training = training
        torch.manual_seed(training.seed)
        self._head = EagleHead(policy.decoder.config).to(policy.decoder.device)
        _initialise(self._head)
        self._optimiser = accelerator.prepare(
            torch.optim.AdamW(self._head.parameters(), lr=training.learning_rate, betas=_BETAS, weight_decay=0.0)
        )
        self._trainee = _Trainee(policy, self._head, own_steps=min(training.own_steps, policy.action_dim - 1))
        self._wrapped = accelerator.prepare(self._trainee)
        self._history: list[DraftValidation] = []
        self._samples = sum(1 for _ in self._epoch(0))
        self._per_epoch = self._samples // training.batch_size
        if not self._per_epoch:
            raise UserError(f"{self._samples} samples are fewer than --batch-size {training.batch_size}")
        self._steps = self._per_epoch * training.epochs
        self._done = 0
        if accelerator.is_main_process:
            self._check_or_begin()
        accelerator.wait_for_everyone()

    def run(self, on_progress: Callable[[DraftProgress], None] | None) -> list[DraftValidation]:
        self._resume()

        def report(loss: float) -> None:
            if on_progress is not None and self._accelerator.is_main_process:
                newest = self._history[-1] if self._history else None
                on_progress(DraftProgress(self._done, self._steps, loss, newest))

        while len(self._history) < self._training.epochs:
            loss = 0.0
            for batch in self._batches(len(self._history)):
                loss = self._step(batch)
                self._done += 1
                report(loss)
            samples = (sample for path in self._held_out for sample in shuffled_samples([path], seed=0, epoch=0))
            self._history.append(validate_draft(self._policy, self._head, samples, epoch=len(self._history) + 1))
            self._save_state()
            report(loss)
        if self._accelerator.is_main_process:
            self._finish()
        return self._history

    def _epoch(self, epoch: int) -> Iterator[Sample]:
        return shuffled_samples(self._shards, seed=self._training.seed, epoch=epoch)

    def _batches(self, epoch: int) -> Iterator[list[Sample]]:
        samples = self._epoch(epoch)
        rank, share = self._accelerator.process_index, self._accelerator.num_processes
        for _ in range(self._per_epoch):
            yield list(islice(samples, self._training.batch_size))[rank::share]

    def _step(self, samples: list[Sample]) -> float:
        peak = self._training.learning_rate
        for group in self._optimiser.param_groups:
            group["lr"] = peak * _schedule(self._done, self._steps)
        noise = torch.Generator().manual_seed(hash((self._training.seed, self._done, self._accelerator.process_index)))
        loss = self._wrapped(samples, noise)
        if not torch.isfinite(loss):
            raise UserError(
                f"the loss is not finite at step {self._done}: lower --learning-rate; the last epoch's state is kept"
            )
        self._optimiser.zero_grad()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._wrapped.parameters(), _CLIP)
        self._optimiser.step()
        return float(loss.detach())

    def _check_or_begin(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        path = self._state / "training.json"
        described = asdict(self._training) | {"samples": self._samples, "target": str(self._policy.directory.resolve())}
        if path.exists() and json.loads(path.read_text()) != described:
            raise UserError(
                f"{self._out} holds the state of another training (other data or settings, see {path}); choose "
                "another --out, or remove that directory"
            )
        path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    def _save_state(self) -> None:
        if not self._accelerator.is_main_process:
            return
        state = {
            "head": self._head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
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
        self._head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._history = [DraftValidation.from_json(each) for each in state["history"]]
        self._done = state["done"]

    def _finish(self) -> None:
        """Writes the head and what was done; features and state go."""
        save_draft_head(self._out, self._head)
        described = json.loads((self._state / "training.json").read_text())
        described["target"] = self._policy.directory.name
        described["epochs_done"] = [asdict(each) for each in self._history]
        described["finished"] = time.strftime("%Y-%m-%d", time.gmtime())
        (self._out / "training.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(self._state)


class _Trainee(nn.Module):
    """The loss of a batch, as accelerate wraps it for several GPUs; only the head's weights are its own."""

    def __init__(self, policy: Target, head: EagleHead, own_steps: int) -> None:
        super().__init__()
        self.head = head
        self._decoder = (policy.decoder,)  # in a tuple, so that the target is no part of this module
        self._own_steps = own_steps

    def forward(self, samples: list[Sample], noise: torch.Generator) -> Tensor:
        (decoder,) = self._decoder
        batch = collate(samples, decoder.embed_tokens)
        answer = batch.following.shape[1] - batch.prompt_rows
        width = _NOISE / batch.hidden.shape[1]
        noisy = batch.hidden + (torch.rand(batch.hidden.shape, generator=noise) - 0.5).to(batch.hidden.device) * width
        positions = torch.arange(batch.hidden.shape[1], device=batch.hidden.device)
        cos, sin = decoder.rotation(positions)
        steps = draft_features(
            self.head, batch.following, noisy, batch.padding, cos, sin, answer=answer, steps=self._own_steps
        )
        with torch.no_grad():
            goal = decoder.logits(batch.goal.flatten(0, 1)).softmax(-1).view(*batch.goal.shape[:2], -1)
        weights = [_LATER_STEP**step for step in range(len(steps))]
        losses = [
            weight * _loss(decoder, predicted, batch.goal[:, step:], goal[:, step:])
            for step, (weight, predicted) in enumerate(zip(weights, steps, strict=True))
        ]
        return torch.stack(losses).sum() / sum(weights)


def _loss(decoder: Any, predicted: Tensor, features: Tensor, probabilities: Tensor) -> Tensor:
    """1.0 smooth-L1 of the features and 0.1 cross-entropy with the target's distribution, per supervised row."""
    logits = F.linear(predicted, decoder.lm_head.weight.to(predicted.dtype))
    tokens = -(probabilities * logits.log_softmax(-1)).sum(-1).mean()
    return _FEATURE_WEIGHT * F.smooth_l1_loss(predicted, features) + _TOKEN_WEIGHT * tokens


@dataclass(frozen=True)
class DraftBatch:
    """Samples of one batch, padded on the left so that their answers lie side by side.

    Args:
        following: float32 [batch, rows, hidden], the embedding of the token behind each row.
        hidden: float32 [batch, rows, hidden], the target's state at each row.
        goal: float32 [batch, answer rows, hidden], the target's state behind each of the answer's rows.
        padding: int64 [batch], rows at the left end that are none.
        prompt_rows: rows before the answer's.
    """

    following: Tensor
    hidden: Tensor
    goal: Tensor
    padding: Tensor
    prompt_rows: int


def collate(samples: Sequence[Sample], embed: nn.Embedding) -> DraftBatch:
    """Makes a batch on the target's device."""
    device = embed.weight.device
    answer = len(samples[0].tokens) - 1
    longest = max(len(sample.prompt) for sample in samples)
    padding = [longest - len(sample.prompt) for sample in samples]
    following, hidden, goal = [], [], []
    for sample, pad in zip(samples, padding, strict=True):
        behind = embed(sample.tokens[:-1].to(device)).detach().float()
        prompt, states = sample.prompt.to(device).float(), sample.hidden.to(device).float()
        following.append(F.pad(torch.cat((prompt[1:], behind)), (0, 0, pad, 0)))
        hidden.append(F.pad(states[:-1], (0, 0, pad, 0)))
        goal.append(states[-answer:])
    return DraftBatch(
        torch.stack(following),
        torch.stack(hidden),
        torch.stack(goal),
        torch.tensor(padding, device=device),
        prompt_rows=longest - 1,
    )


def _initialise(head: EagleHead) -> None:
    """Small random matrices; norms at 1 and biases at 0."""
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then linear decay to 0."""
    warm_up = min(_WARM_UP, max(1, steps // 10))
    return min(1.0, (step + 1) / warm_up) * (1 - step / steps)
