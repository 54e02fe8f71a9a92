# SPDX-License-Identifier: Apache-2.0
"""The public Python API: load and run a policy without ROS."""

import operator
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.engine.thread import EngineThread
from specvla_ros.errors import UserError
from specvla_ros.messages.image_file import as_pixels
from specvla_ros.models.checkpoint import leave_a_core, load_target
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.settings import ModelSettings
from specvla_ros.models.target import Target
from specvla_ros.models.weights import Progress, no_progress
from specvla_ros.policy_parameters import model_settings, read_policy_file

Image = Any  # any input of `as_pixels`
Images = Image | Mapping[str, Image]


class NoActionError(Exception):
    """A frame ended without an action; `drop` holds the reason."""

    def __init__(self, drop: Drop) -> None:
        super().__init__(f"{drop.reason.value}: {drop.detail}" if drop.detail else drop.reason.value)
        self.drop = drop


class Policy:
    """A loaded and warmed-up policy. It is thread-safe; concurrent calls are serialised.

    Raises UserError if the settings do not fit the target or the device's memory.
    """

    def __init__(self, target: Target, settings: EngineSettings, progress: Progress = no_progress) -> None:
        self.engine = Engine(target, settings)
        with self._own_precision():
            self.engine.warm_up(progress)
        self._stream: Stream | None = None
        self._stamp_ns = 0
        self._turn = threading.Lock()

    @staticmethod
    def load(
        directory: str | Path,
        *,
        mode: str = "",
        tolerance: str = "",
        params_file: str | Path | None = None,
        progress: Progress | None = None,
        **parameters: Any,
    ) -> "Policy":
        """Loads a checkpoint in Hugging Face format; raises UserError with a remedy for a wrong argument.

        torch gets all CPU cores but one, since a busy core slows all of its threads; see `leave_a_core`.

        Args:
            mode: `ar`, `spec`, `pipeline`, `specpipe` or `auto`; empty: the mode in `params_file`, or `auto`.
            tolerance: maximum deviation of an accepted token from the target's own choice, such as `5mm,3deg` or
                `5bins`; empty: none.
            params_file: a ROS 2 parameter file of the policy node, with loading and decoding parameters.
            progress: called with the current step and the fraction done; None: not called.
            parameters: keywords of `load_target` (`device`, `dtype`, …), and parameters of docs/reference/parameters.md
                with underscores for dots (`draft_nodes=16`).
        """
        model = {field.name: parameters.pop(field.name) for field in fields(ModelSettings) if field.name in parameters}
        if not isinstance(params_file, str | Path | None):
            raise UserError(f"params_file must be a path, got {type(params_file).__name__}")
        file = Path(params_file) if params_file else None
        settings = engine_settings_from(mode=mode, tolerance=tolerance, params_file=file, **parameters)
        loading = model_settings(read_policy_file(file) if file else {}, model)
        leave_a_core()
        report = progress or no_progress
        return Policy(load_target(directory, progress=report, **vars(loading)), settings, report)

    @property
    def action_names(self) -> tuple[str, ...]:
        """One name per dimension of an action."""
        return self.engine.target.codec.names

    def describe(self) -> dict[str, Any]:
        """Describes the loaded checkpoint and the decoding settings."""
        return self.engine.describe()

    def reset(self) -> None:
        """Discards earlier answers; call it before another robot or another episode."""
        with self._turn:
            self._check_free()
            self.engine.reset()
            self._stamp_ns = 0

    def act(self, image: Images, instruction: str, *, state: Any = None, stamp_ns: int | None = None) -> Action:
        """Decodes the action for one observation.

        Raises UserError if image, state or instruction is invalid, NoActionError if the policy gave no valid action.

        Args:
            image: uint8 [height, width, 3], RGB, of the only camera; or a dict of these by camera name, of which the
                only one may be `image`. A tensor, a Pillow image or a file's path is converted.
            state: float [dims] or a list of numbers, the robot's state, for policies that read it.
            stamp_ns: nanoseconds, greater than all earlier stamps; None: the time of the call.
        """
        with self._turn:
            self._check_free()
            with self._own_precision():
                outcome = self.engine.act(self._observation(image, instruction, state, stamp_ns))
        if isinstance(outcome, Action):
            return outcome
        raise UserError(outcome.detail) if outcome.reason is DropReason.BAD_INSTRUCTION else NoActionError(outcome)

    def stream(self, *, partial: bool = False) -> "Stream":
        """Opens a stream, in which the pipelined modes overlap frames; actions come out as they finish. Use `with`.

        `partial`: policies that write digits also return the first actions of an answer while the rest is decoded. Each
        partial action extends the one before for the same observation; the last has `Action.partial` false.
        """
        with self._turn:
            self._check_free()
            self.engine.takes_partial = partial
            self._stream = Stream(self)
            return self._stream

    def _own_precision(self) -> torch.autocast:
        """Disables the caller's torch.autocast, so that the policy computes in the checkpoint's dtype."""
        return torch.autocast(self.engine.target.decoder.device.type, enabled=False)

    def _check_free(self) -> None:
        if self._stream is not None and not self._stream.closed:
            raise UserError("a stream of this policy is open: close it first")

    def _observation(self, image: Images, instruction: str, state: Any, stamp_ns: int | None) -> Observation:
        stamp_ns = max(time.time_ns(), self._stamp_ns + 1) if stamp_ns is None else _whole(stamp_ns)
        received_ns = time.monotonic_ns()
        several = isinstance(image, Mapping)
        images = {name: as_pixels(each) for name, each in image.items()} if several else as_pixels(image)
        if state is not None and not self.engine.target.state_dims:
            raise UserError("the policy does not read the robot's state: omit state")
        numbers = _numbers(state) if isinstance(state, list | tuple) else state
        observation = Observation(images, instruction, stamp_ns, received_ns=received_ns, state=numbers)
        if several and {*images} != {ONLY_CAMERA}:
            observation.of_cameras(self.engine.target.cameras, by_name=True)
        observation.state_of(self.engine.target.state_dims)  # in a stream the engine could only drop the frame
        self._stamp_ns = stamp_ns
        return observation


def _whole(stamp_ns: Any) -> int:
    try:
        if not isinstance(stamp_ns, bool):
            return operator.index(stamp_ns)
    except TypeError:
        pass
    raise UserError(f"stamp_ns must be a whole number of nanoseconds, got {stamp_ns!r}")


def _numbers(state: Sequence[Any]) -> np.ndarray:
    try:
        return np.asarray(state)
    except ValueError:
        raise UserError("state must be a flat list of numbers, but its parts have different lengths") from None


class Stream:
    """Decodes frames to actions in its own thread; see `Policy.stream`.

    Iteration yields actions as they finish, oldest frame first, until `finish` was called and nothing is left. In the
    pipelined modes a frame overtaken by a newer one ends without an action, unless decode.in_order is set; `drops`
    counts dropped frames by reason.
    """

    def __init__(self, policy: Policy) -> None:
        self.drops: Counter[DropReason] = Counter()
        self._policy = policy
        self._actions: queue.SimpleQueue[Action | BaseException | None] = queue.SimpleQueue()
        self._fault: BaseException | None = None  # raised again in the reader's thread
        self._counting = threading.Lock()
        self._taking = True
        self._thread = EngineThread(
            lambda: policy.engine,
            on_outcome=self._take,
            on_fault=self._end_for_fault,
            on_end=lambda: self._actions.put(self._fault),
            name="specvla stream",
        )

    @property
    def closed(self) -> bool:
        """True once the stream has ended and the policy is free again."""
        return self._thread.ended

    def put(self, image: Images, instruction: str, *, state: Any = None, stamp_ns: int | None = None) -> None:
        """Submits a frame and returns immediately; it replaces a waiting frame. Arguments as in `Policy.act`.

        Arrays are copied: a waiting frame is read later, when a camera may have reused its buffer.

        Raises UserError if the image or the state is invalid, or the stream is closed.
        """
        if not self._taking or self.closed:
            raise UserError("the stream accepts no more frames: open another one")
        seen = self._policy._observation(image, instruction, state, stamp_ns)
        images = {name: pixels.copy() for name, pixels in seen.cameras.items()}
        numbers = seen.state.copy() if isinstance(seen.state, np.ndarray) else seen.state
        self._thread.submit(replace(seen, images=images, state=numbers))

    def finish(self) -> None:
        """Ends the input; frames in flight are still decoded."""
        self._taking = False
        self._thread.finish()

    def get(self, timeout_s: float | None = None) -> Action | None:
        """Returns the next action; None after the timeout or at the end of the stream."""
        try:
            found = self._actions.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if found is None or isinstance(found, BaseException):
            self._actions.put(found)  # the next call also sees the end
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Ends the stream; frames in flight are dropped."""
        self._taking = False
        self._thread.end(lambda engine: engine.flush())

    def __iter__(self) -> Iterator[Action]:
        while (action := self.get()) is not None:
            yield action

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, Action):
            self._actions.put(outcome)
            return
        with self._counting:  # two threads drop frames
            self.drops[outcome.reason] += 1

    def _end_for_fault(self, _: str) -> None:
        self._fault, self._taking = sys.exc_info()[1], False
        self._thread.end()
