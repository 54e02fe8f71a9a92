# SPDX-License-Identifier: Apache-2.0
"""A policy's input: named camera images, the current instruction, and the robot's state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specvla_ros.errors import UserError

ONLY_CAMERA = "image"  # the camera of an image without a name


@dataclass(frozen=True)
class Observation:
    """Camera images of one moment with their instruction.

    Raises UserError if there is no image, an image is empty or not uint8 RGB, or the stamp is not a positive integer.
    """

    # uint8 [height, width, 3], RGB, by camera name; a single array is the image of the only camera.
    images: Mapping[str, np.ndarray] | np.ndarray = field(repr=False)
    instruction: str  # the task in words, as the user wrote it
    stamp_ns: int  # the images' own stamp, nanoseconds of ROS time, greater than 0
    frame_id: str = ""  # the camera's frame, passed on with the stamp
    epoch: int = 0  # the instruction epoch; results of an older one are discarded
    received_ns: int = 0  # `time.monotonic_ns()` when the image reached this process
    # Seconds from the stamp to receipt on the clock of the stamp; 0 when read from a bag in process.
    receive_s: float = 0.0
    # The prompt as token ids, instead of the instruction; for checkpoints without a tokenizer.
    prompt_ids: tuple[int, ...] | None = None
    # Token ids with which the answer begins; they are computed with the prompt, and only the rest is decoded.
    answer_ids: tuple[int, ...] = ()
    state: np.ndarray | None = None  # float [dims], the proprioceptive state in the units of the training data
    stream: str = ""  # name of the robot; stamps and epochs of different streams cannot be compared

    @property
    def task(self) -> tuple[object, ...]:
        """Equal for observations of which one may continue what was written for another of the same stream."""
        return self.epoch, self.instruction, self.prompt_ids

    def __post_init__(self) -> None:
        if not isinstance(self.images, Mapping):
            object.__setattr__(self, "images", {ONLY_CAMERA: self.images})
        if not self.cameras:
            raise UserError("an observation needs at least one camera image")
        for name in self.cameras:
            if not isinstance(name, str):
                raise UserError(f"images must be given by camera name, a string, got {name!r}")
        if not isinstance(self.instruction, str):
            raise UserError(f"an instruction must be a string, got {type(self.instruction).__name__}")
        for image in self.cameras.values():
            if not isinstance(image, np.ndarray):
                raise UserError(f"an observation needs images as uint8 RGB arrays, got {type(image).__name__}")
            shape = image.shape
            if image.dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or 0 in shape:
                raise UserError(
                    f"an observation needs a uint8 RGB image [height, width, 3], got {image.dtype} {list(shape)}"
                    f"{image_remedy(image)}"
                )
        if not isinstance(self.stamp_ns, int) or self.stamp_ns <= 0:
            raise UserError(
                f"an observation needs the image's stamp in nanoseconds, greater than 0, got {self.stamp_ns!r}; "
                "let the camera driver fill header.stamp"
            )

    @property
    def cameras(self) -> Mapping[str, np.ndarray]:
        """The images by camera name."""
        assert isinstance(self.images, Mapping)
        return self.images

    def of_cameras(self, names: Sequence[str], *, by_name: bool = False) -> dict[str, np.ndarray]:
        """The images of these cameras, in this order. If one camera is requested, a single image may have any name.

        Raises UserError if cameras are missing or extra. `by_name`: a single image must have the camera's name too.
        """
        given = self.cameras
        if len(given) == len(names) == 1 and not by_name:
            return {**given}
        if {*given} != {*names}:
            wanted = ", ".join(names)
            raise UserError(f"the policy needs images of the cameras {wanted}, but got {', '.join(given)}")
        return {name: given[name] for name in names}

    def state_of(self, dims: int) -> np.ndarray:
        """The robot's state, float [dims]; UserError if it is missing, of another length, or not finite."""
        state = self.state
        if dims == 0:
            return np.empty(0)
        if (
            not isinstance(state, np.ndarray)
            or state.dtype.kind not in "fiu"
            or state.shape != (dims,)
            or not np.isfinite(state).all()
        ):
            given = "got none" if state is None else f"got {type(state).__name__}"
            if isinstance(state, np.ndarray):
                given = f"got shape {list(state.shape)}, {state.dtype}"
                if state.dtype.kind == "f" and not np.isfinite(state).all():
                    given += f", of which {state[~np.isfinite(state)][0]} is not finite"
            raise UserError(
                f"the policy reads the robot's state, {dims} finite numbers in the units of its training data; {given}"
            )
        return state


def image_remedy(image: np.ndarray) -> str:
    """The conversions to uint8 [height, width, 3] that an array seems to need, after "; "; empty: unknown."""
    shape, steps = image.shape, []
    if image.dtype.kind == "f":
        steps.append("multiply it by 255 if its values are from 0 to 1, and convert it to uint8")
    if len(shape) == 3 and shape[0] == 3 != shape[2]:
        steps.append("move its channels to the end, as image.transpose(1, 2, 0) does")
    elif len(shape) == 3 and shape[2] == 4:
        steps.append("drop its fourth channel, as image[:, :, :3] does")
    return "".join(f"; {step}" for step in steps)


def normalise_instruction(instruction: str) -> str:
    """Lower case, single spaces, no final punctuation, for comparison with the trained instructions."""
    return " ".join(instruction.lower().split()).rstrip(" .!")
