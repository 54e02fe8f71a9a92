"""How long several settings of the engine take for the same frames, side by side in one run."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.policy import Policy


def time_settings(
    policy: Policy, settings: Mapping[str, EngineSettings], frames: Sequence[tuple[np.ndarray, str]], rounds: int = 3
) -> dict[str, float]:
    """Median seconds per action of each setting.

    The settings take turns, frame after frame, so that whatever else the machine does falls on all of them alike.
    Frames are decoded in order, so that a drafter that looks back sees what it would on the robot.

    Args:
        policy: shared by all engines.
        settings: by name.
        frames: RGB images with their instructions, of one episode after the other.
        rounds: passes over the frames; the first one is not counted.

    Raises:
        UserError: there are no frames, or no setting gives an action for them.
    """
    engines = {name: Engine(policy, each) for name, each in settings.items()}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    stamp_ns = 1
    for again in range(rounds + 1):
        for engine in engines.values():
            engine.reset()
        for image, instruction in frames:
            stamp_ns += 1
            for name, engine in engines.items():
                started = time.perf_counter()
                engine.act(Observation(image, instruction, stamp_ns))
                if again:
                    seconds[name].append(time.perf_counter() - started)
    if not frames:
        raise UserError("there are no frames to time the settings with")
    return {name: float(np.median(each)) for name, each in seconds.items()}
