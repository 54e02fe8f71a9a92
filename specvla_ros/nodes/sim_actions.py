"""Which actions the simulated robot takes. No ROS here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specvla_ros.models.prompt import normalise_instruction

# The training data's largest translation times this is an error of somebody's, not a motion.
_TOO_FAR = 4.0


class ActionIgnoredError(Exception):
    """An action that comes too late or belongs to something else; that happens."""


class ActionRefusedError(ActionIgnoredError):
    """An action that no policy should ever send."""


@dataclass(frozen=True)
class Expected:
    """What an action must answer.

    Args:
        began_ns: stamp of the episode's start.
        last_taken_ns: stamp of the last action taken in it; 0: none.
        newest_ns: stamp of the newest image.
        only_newest: nothing but the newest image may be answered.
        instruction: that is in force.
    """

    began_ns: int
    last_taken_ns: int
    newest_ns: int
    only_newest: bool
    instruction: str


def check_relevance(stamp_ns: int, instruction: str, expected: Expected) -> None:
    """Whether an action answers an image of this episode, under the instruction in force, and is news.

    Args:
        stamp_ns: of the action.
        instruction: that the action follows; empty: its sender does not say.
        expected: see there.

    Raises:
        ActionIgnoredError: it does not.
    """
    if stamp_ns < expected.began_ns:
        raise ActionIgnoredError("it answers an image from before the episode's start")
    if stamp_ns <= expected.last_taken_ns:
        raise ActionIgnoredError("it is no newer than the last action that was taken")
    if stamp_ns > expected.newest_ns:
        raise ActionIgnoredError("it is stamped later than the newest image: does another camera run?")
    if expected.only_newest and stamp_ns != expected.newest_ns:
        raise ActionIgnoredError(
            "it answers an image that the robot no longer waits for; set action_timeout_s above the policy's latency"
        )
    if instruction and normalise_instruction(instruction) != normalise_instruction(expected.instruction):
        raise ActionIgnoredError(
            f"it follows '{instruction}', but '{expected.instruction}' is in force; if that goes on, remap the "
            "policy's topic 'instruction' to /instruction"
        )


def robot_values(
    values: Sequence[float], action_dt: float, *, robot_dt: float, largest_translation: float
) -> np.ndarray:
    """An action's values in the robot's own period; the speed that the policy meant stays.

    Args:
        values: 3 translations, 3 rotations [rad], gripper.
        action_dt: seconds over which the policy means its displacements.
        robot_dt: seconds over which the robot spreads an action.
        largest_translation: of the training data in `robot_dt`, in the unit of the translations.

    Returns:
        float64 [7].

    Raises:
        ActionRefusedError: not 7 finite values, no usable action_dt, or farther than any policy of this robot moves it.
    """
    if len(values) != 7:
        raise ActionRefusedError(f"it has {len(values)} values, but this robot takes 7: x y z, roll pitch yaw, gripper")
    taken = np.array(values, dtype=np.float64)
    if not np.isfinite(taken).all():
        raise ActionRefusedError(f"its values are not all finite: {taken.tolist()}")
    if not (math.isfinite(action_dt) and action_dt > 0):
        raise ActionRefusedError(f"its action_dt is {action_dt} s; set the policy's parameter action_dt")
    taken[:6] *= robot_dt / action_dt
    distance, turn = (float(np.linalg.norm(part)) for part in (taken[:3], taken[3:6]))
    if not distance <= _TOO_FAR * largest_translation:
        raise ActionRefusedError(
            f"it would move the hand by {distance:.3f} m in {robot_dt:g} s, and the limit is "
            f"{_TOO_FAR * largest_translation:.3f} m; is it another robot's policy, or its action_dt wrong?"
        )
    if not turn <= math.pi:
        raise ActionRefusedError(f"it would turn the hand by {turn:.3f} rad in {robot_dt:g} s, and the limit is pi")
    return taken
