"""How long the engine's stages take: as measured here, or as another device would need."""

from collections.abc import Callable

from specvla_ros.engine.tally import TickWork
from specvla_ros.planning.cost import stage_times
from specvla_ros.planning.device import StageTimes, read_device

TickTime = Callable[[TickWork, float], float]


def read_stage_times(device: str) -> StageTimes:
    """Stage times of one of the package's devices, or of a device's JSON file.

    Raises:
        UserError: no such device or file, or a stage time that is missing or out of range.
    """
    return stage_times(read_device(device, "--emulate"))


def tick_time(stages: StageTimes | None) -> TickTime:
    """From what a tick did and the seconds it took here, to the seconds it counts for."""
    if stages is None:
        return lambda _, measured_s: measured_s
    return lambda work, _: stages.tick_s(work)
