"""What the engine answers: one camera image and the instruction in force when it was taken."""

from dataclasses import dataclass

import numpy as np

from specvla_ros.errors import UserError


@dataclass(frozen=True)
class Observation:
    """One camera image with its instruction.

    Args:
        image: uint8 [height, width, 3], RGB.
        instruction: what the robot shall do, as the user wrote it.
        stamp_ns: the image's own stamp, nanoseconds of ROS time, greater than 0.
        frame_id: the camera's frame, travels with the stamp.
        epoch: the instruction epoch; results of an older one are void.
        received_ns: `time.monotonic_ns()` when the image reached this process.
        prompt_ids: the prompt as token ids, in place of the instruction; for checkpoints without a tokenizer.
        receive_s: seconds from the stamp to receipt on the clock of the stamp; 0 when read from a bag in process.

    Raises:
        UserError: the image is empty or not uint8 RGB, or the stamp is no positive whole number.
    """

    image: np.ndarray
    instruction: str
    stamp_ns: int
    frame_id: str = ""
    epoch: int = 0
    received_ns: int = 0
    receive_s: float = 0.0
    prompt_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape = self.image.shape
        if self.image.dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or 0 in shape:
            raise UserError(
                f"an observation needs a uint8 RGB image [height, width, 3], got {self.image.dtype} {list(shape)}"
            )
        if not isinstance(self.stamp_ns, int) or self.stamp_ns <= 0:
            raise UserError(
                f"an observation needs the image's stamp in nanoseconds, greater than 0, got {self.stamp_ns!r}; "
                "let the camera driver fill header.stamp"
            )
