# SPDX-License-Identifier: Apache-2.0
"""The training loop that policies and draft heads share: steps, validations, and a state to resume from."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from specvla_ros.errors import UserError
from specvla_ros.lab.files import unfinished, write_json

STATE_DIRECTORY = "training_state"

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


@dataclass(frozen=True)
class Progress(Generic[V]):
    """Progress of a training run."""

    step: int  # optimiser steps done
    steps: int  # optimiser steps in all
    loss: float  # loss of the last step on this process
    samples_per_s: float  # since the start or the resumption
    validation: V | None  # the newest validation; None before the first


class TrainingTask(Protocol[V_co]):
    """A model with its data, optimisers and validation."""

    optimisers: list[torch.optim.Optimizer]  # each parameter group's lr is its peak
    steps: int
    batch_size: int  # samples per step over all processes
    validate_every: int  # steps between validations, each of which also saves the state
    clip: float  # maximum norm of the gradients

    @property
    def model(self) -> nn.Module:
        """The module that returns a batch's loss, a scalar; accelerate wraps it for several GPUs."""

    @property
    def trained(self) -> nn.Module:
        """The part of `model` whose weights are kept."""

    def schedule(self, step: int) -> float:
        """The learning rate at a step, as a share of the peak."""

    def batches(self, start: int) -> Iterator[tuple[Any, ...]]:
        """Arguments of `model` for this process, one batch per step; `start` is the step of a validation."""

    def validate(self, step: int, seconds: float) -> V_co:
        """Validates after `step` steps and `seconds` of training."""

    def validation_from_json(self, raw: dict[str, Any]) -> V_co:
        """The inverse of `dataclasses.asdict`."""

    def write(self, described: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
        """Writes the trained weights; returns the content of training.json."""


def begin_or_resume(
    accelerator: Any, out: Path, described: Mapping[str, Any], begin: Callable[[], None] = lambda: None
) -> None:
    """Prepares the state's directory on the main process; calls `begin` if no training was started there.

    `described` holds the settings and data, as read back from JSON.
    """
    if accelerator.is_main_process:
        path = out / STATE_DIRECTORY / "training.json"
        if not path.exists():
            begin()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, described)
        elif json.loads(path.read_text(encoding="utf-8")) != described:
            raise UserError(
                f"{out} holds the state of another training (other data or settings, see {path}); choose another "
                "--out or remove that directory"
            )
    accelerator.wait_for_everyone()


class Trainer(Generic[V]):
    """Trains a task to its end, resuming from the last validation; call `begin_or_resume` first to prepare `out`."""

    def __init__(self, accelerator: Any, task: TrainingTask[V], out: Path) -> None:
        self._accelerator, self._task = accelerator, task
        self._out, self._state = out, out / STATE_DIRECTORY
        for optimiser in task.optimisers:
            for group in optimiser.param_groups:
                group["peak"] = group["lr"]
        self._optimisers = [accelerator.prepare(optimiser) for optimiser in task.optimisers]
        self._model = accelerator.prepare(task.model)
        self._history: list[V] = []
        self._done, self._seconds = 0, 0.0

    def run(self, on_progress: Callable[[Progress[V]], None] = lambda progress: None) -> list[V]:
        """Returns the validations, oldest first; `on_progress` is called after each step on the main process."""
        self._resume()
        task, begin, earlier_s = self._task, self._done, self._seconds
        batches = task.batches(begin)
        started = time.monotonic()
        while self._done < task.steps:
            loss = self._step(next(batches))
            self._done += 1
            elapsed_s = time.monotonic() - started
            if self._done % task.validate_every == 0 or self._done == task.steps:
                self._seconds = earlier_s + elapsed_s
                self._history.append(task.validate(self._done, self._seconds))
                self._save()
            if self._accelerator.is_main_process:
                speed = (self._done - begin) * task.batch_size / elapsed_s
                newest = self._history[-1] if self._history else None
                on_progress(Progress(self._done, task.steps, loss, speed, newest))
        if self._accelerator.is_main_process:
            described = json.loads((self._state / "training.json").read_text(encoding="utf-8"))
            write_json(self._out / "training.json", self._task.write(described, self._plain_history()))
            shutil.rmtree(self._state)
        return self._history

    def _step(self, batch: tuple[Any, ...]) -> float:
        share = self._task.schedule(self._done)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * share
        with self._accelerator.autocast():
            loss: Tensor = self._model(*batch)
        if not torch.isfinite(loss):
            raise UserError(
                f"the loss is not finite at step {self._done}: lower --learning-rate; the last state is kept"
            )
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._model.parameters(), self._task.clip)
        for optimiser in self._optimisers:
            optimiser.step()
        return float(loss.detach())

    def _save(self) -> None:
        if not self._accelerator.is_main_process:
            return
        state = {
            "model": self._task.trained.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "history": self._plain_history(),
            "done": self._done,
            "seconds": self._seconds,
        }
        path = self._state / "state.pt"
        try:
            with unfinished(path) as beside:
                torch.save(state, beside)
        except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
            raise UserError(
                f"{path} cannot be written ({error}); the previous state is kept: free some space, and the same "
                "command resumes from there"
            ) from None

    def _resume(self) -> None:
        path = self._state / "state.pt"
        if not path.exists():
            return
        # The loading below copies to the weights' device. torch reads to no `cpu:0`, the device of several processes.
        state = torch.load(path, map_location="cpu", weights_only=True)
        self._task.trained.load_state_dict(state["model"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self._history = [self._task.validation_from_json(raw) for raw in state["history"]]
        self._done, self._seconds = state["done"], state["seconds"]

    def _plain_history(self) -> list[dict[str, Any]]:
        return [asdict(validation) for validation in self._history]  # type: ignore[call-overload]


def warm_up(step: int, steps: int, longest: int) -> float:
    """A linear rise from 0 to 1 over `longest` steps, or over a tenth of the training if that is shorter."""
    return min(1.0, (step + 1) / min(longest, max(1, steps // 10)))
