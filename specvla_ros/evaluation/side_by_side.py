"""Several settings of the engine on the same frames, side by side in one run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.tally import DecodeTally
from specvla_ros.errors import UserError
from specvla_ros.evaluation.frame_sources import Frame
from specvla_ros.models.checkpoint import Target
from specvla_ros.simulation.device_pace import TickTime, tick_time


@dataclass
class FrameRun:
    """What one setting did with the frames.

    Attributes:
        seconds: per frame and round.
        values: float64 [frames, action_dim], the actions; NaN where there was none.
        tally: how they were decoded.
    """

    seconds: list[float] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    tally: DecodeTally = field(default_factory=DecodeTally)

    @property
    def action_s(self) -> float:
        """Mean seconds per action, without the slowest twentieth: those waited for something else on the machine."""
        return float(np.mean(np.sort(self.seconds)[: max(1, len(self.seconds) * 19 // 20)]))


def run_side_by_side(
    policy: Target,
    settings: Mapping[str, EngineSettings],
    frames: Sequence[Frame],
    *,
    rounds: int = 3,
    pace: TickTime | None = None,
    on_frame: Callable[[], None] | None = None,
) -> dict[str, FrameRun]:
    """Decodes the frames with each setting.

    The settings take turns, frame after frame, so that whatever else the machine does falls on all of them alike.
    Frames are decoded in order, so that a drafter that looks back sees what it would on the robot.

    Args:
        policy: shared by all engines.
        settings: by name.
        frames: of one episode after the other.
        rounds: passes over the frames that are timed, behind one frame that is not.
        pace: what a tick's time counts for; by default the time itself.
        on_frame: called when all settings have answered one more frame.

    Raises:
        UserError: there are no frames.
    """
    if not frames:
        raise UserError("there are no frames to try the settings on")
    pace = pace or tick_time(None)
    engines = {name: Engine(policy, each) for name, each in settings.items()}
    runs = {name: FrameRun() for name in settings}
    for engine in engines.values():
        engine.warm_up()
    for again in range(rounds):
        for engine in engines.values():
            engine.reset()
        epoch, asked = again * len(frames) + 1, ""
        for number, (image, instruction) in enumerate(frames):
            epoch += instruction != asked
            asked = instruction
            observation = Observation(image, instruction, stamp_ns=number + 1, epoch=epoch)
            for name, engine in engines.items():
                outcome, seconds = _decode(engine, observation, pace)
                runs[name].seconds.append(seconds)
                if not again:
                    _keep(runs[name], outcome, policy.action_dim)
            if on_frame is not None:
                on_frame()
    return runs


def _decode(engine: Engine, observation: Observation, pace: TickTime) -> tuple[Outcome, float]:
    engine.submit(observation)
    outcomes: list[Outcome] = []
    counted_s = 0.0
    while engine.busy:
        started = time.perf_counter()
        outcomes += engine.tick()
        counted_s += pace(engine.last_work, time.perf_counter() - started)
    return outcomes[-1], counted_s


def _keep(run: FrameRun, outcome: Outcome, action_dim: int) -> None:
    if isinstance(outcome, Action):
        run.values.append(outcome.values)
        run.tally.add(outcome.record)
    else:
        run.values.append(np.full(action_dim, np.nan))
