# SPDX-License-Identifier: Apache-2.0
"""The public face: a policy in five lines of Python, without ROS."""

import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.engine.thread import EngineThread
from specvla_ros.errors import UserError
from specvla_ros.messages.picture import as_pixels
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.observation import Observation
from specvla_ros.models.settings import ModelSettings
from specvla_ros.models.target import Target
from specvla_ros.models.weights import Progress
from specvla_ros.policy_parameters import model_settings, read_policy_file

Image = Any  # what `as_pixels` takes
Images = Image | Mapping[str, Image]


class NoActionError(Exception):
    """A frame ended without an action; `drop` says why."""

    def __init__(self, drop: Drop) -> None:
        super().__init__(f"{drop.reason.value}: {drop.detail}" if drop.detail else drop.reason.value)
        self.drop = drop


class Policy:
    """A loaded and warmed-up policy. Several threads may use it: they take turns.

    Raises UserError where the settings do not fit the target or the device's memory.
    """

    def __init__(self, target: Target, settings: EngineSettings) -> None:
        self.engine = Engine(target, settings)
        with self._own_precision():
            self.engine.warm_up()
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
        """Loads a checkpoint in Hugging Face format; raises UserError, saying what to do, for a wrong argument.

        Args:
            mode: `ar`, `spec`, `pipeline` or `specpipe`; empty: that of `params_file`, or `ar`.
            tolerance: how far an accepted token may be from the target's own choice, such as `5mm,3deg` or `5bins`;
                empty: not at all.
            params_file: a ROS 2 parameter file, as the node takes it: how to load and how to decode.
            progress: called with what is being done and the fraction that is done.
            parameters: keywords of `load_target` (`device`, `dtype`, …), and parameters of docs/reference/parameters.md
                with underscores for dots (`draft_nodes=16`).
        """
        model = {field.name: parameters.pop(field.name) for field in fields(ModelSettings) if field.name in parameters}
        file = Path(params_file) if params_file else None
        settings = engine_settings_from(mode=mode, tolerance=tolerance, params_file=file, **parameters)
        loading = model_settings(read_policy_file(file) if file else {}, model)
        return Policy(load_target(directory, progress=progress, **vars(loading)), settings)

    @property
    def action_names(self) -> tuple[str, ...]:
        """One name per dimension of an action."""
        return self.engine.target.codec.names

    def describe(self) -> dict[str, Any]:
        """What is loaded and how it decodes."""
        return self.engine.describe()

    def reset(self) -> None:
        """Forgets earlier answers: for another robot, or another episode."""
        with self._turn:
            self._check_free()
            self.engine.reset()
            self._stamp_ns = 0

    def act(self, image: Images, instruction: str, *, state: Any = None, stamp_ns: int | None = None) -> Action:
        """Decodes the action for one moment.

        Raises UserError where the image or the instruction cannot be used, NoActionError where the policy gave no valid
        action.

        Args:
            image: uint8 [height, width, 3], RGB, of the only camera; or one such array per camera name. A tensor, a
                Pillow image or a file's path is read as one.
            state: float [dims], the robot's state, for policies that read it; a list of numbers too.
            stamp_ns: nanoseconds, greater than those before; None: the time of the call.
        """
        with self._turn:
            self._check_free()
            with self._own_precision():
                outcome = self.engine.act(self._observation(image, instruction, state, stamp_ns))
        if isinstance(outcome, Action):
            return outcome
        raise UserError(outcome.detail) if outcome.reason is DropReason.BAD_INSTRUCTION else NoActionError(outcome)

    def stream(self, *, partial: bool = False) -> "Stream":
        """Frames in as they come, actions out as they finish; the pipelined modes overlap them. Use it with `with`.

        `partial`: also the first actions of an answer while the rest is decoded, of policies that write digits. Each
        begins with those before it of the same observation; the last one's `Action.partial` is false.
        """
        with self._turn:
            self._check_free()
            self.engine.takes_partial = partial
            self._stream = Stream(self)
            return self._stream

    def _own_precision(self) -> torch.autocast:
        """The checkpoint's dtype, also where the caller computes under torch.autocast."""
        return torch.autocast(self.engine.target.decoder.device.type, enabled=False)

    def _check_free(self) -> None:
        if self._stream is not None and not self._stream.closed:
            raise UserError("a stream of this policy is open: close it first")

    def _observation(self, image: Images, instruction: str, state: Any, stamp_ns: int | None) -> Observation:
        self._stamp_ns = max(time.time_ns(), self._stamp_ns + 1) if stamp_ns is None else stamp_ns
        received_ns = time.monotonic_ns()
        several = isinstance(image, Mapping)
        images = {name: as_pixels(each) for name, each in image.items()} if several else as_pixels(image)
        if state is not None and not self.engine.target.state_dims:
            raise UserError("the policy reads no state of the robot: leave state out")
        numbers = np.asarray(state) if isinstance(state, list | tuple) else state
        return Observation(images, instruction, self._stamp_ns, received_ns=received_ns, state=numbers)


class Stream:
    """Frames to actions, by a thread of its own; see `Policy.stream`.

    Iterating gives actions as they finish, oldest frame first, until `finish` was called and nothing is left. In the
    pipelined modes a frame that a newer one overtakes ends without an action, unless decode.in_order is set; `drops`
    counts such frames by reason.
    """

    def __init__(self, policy: Policy) -> None:
        self.drops: Counter[DropReason] = Counter()
        self._policy = policy
        self._actions: queue.SimpleQueue[Action | BaseException | None] = queue.SimpleQueue()
        self._fault: BaseException | None = None  # raised again where the actions are asked for
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
        """Whether the policy may be used otherwise again."""
        return self._thread.ended

    def put(self, image: Images, instruction: str, *, state: Any = None, stamp_ns: int | None = None) -> None:
        """Hands a frame over and returns at once; one that still waits is dropped for it. Arguments as in `Policy.act`.

        Raises UserError where the image cannot be used, or the stream is closed.
        """
        if not self._taking or self.closed:
            raise UserError("the stream takes no more frames: open another one")
        self._thread.submit(self._policy._observation(image, instruction, state, stamp_ns))

    def finish(self) -> None:
        """Says that no more frames come; what is in flight is decoded to its end."""
        self._taking = False
        self._thread.finish()

    def get(self, timeout_s: float | None = None) -> Action | None:
        """The next action; None when there is none in time, or the stream has ended."""
        try:
            found = self._actions.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if found is None or isinstance(found, BaseException):
            self._actions.put(found)  # whoever asks next is told too
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Ends the stream; what is in flight is dropped."""
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
