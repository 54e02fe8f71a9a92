"""How long the engine's stages take: as measured here, or as another device would need."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specvla_ros.engine.tally import TickWork
from specvla_ros.errors import UserError

_DEVICES = Path(__file__).parent / "devices"
_STAGES = ("vision_s", "prefill_s", "decode_s", "node_s", "head_s", "head_prompt_s", "overhead_s")


@dataclass(frozen=True)
class EmulatedDevice:
    """Stage times of a device that is not here. Results with it are emulation, and are named so.

    Args:
        name: for the results.
        source: where the numbers come from.
        vision_s: vision tower, projector and prompt embeddings of one image.
        prefill_s: the forward that carries a prompt.
        decode_s: a forward with few rows: it reads the weights, and no forward is faster.
        node_s: each tree node where compute is the bound, as beside a prompt.
        head_s: a forward of the draft head over tree nodes.
        head_prompt_s: what the draft head's forward over a prompt takes beyond that.
        overhead_s: between an image and its admission, and between the last token and the action.
    """

    name: str
    source: str
    vision_s: float
    prefill_s: float
    decode_s: float
    node_s: float
    head_s: float
    head_prompt_s: float
    overhead_s: float

    def tick_s(self, work: TickWork) -> float:
        """Seconds that a tick takes on the device; 0 for a tick without work."""
        computed_s = work.prompts * self.prefill_s + work.nodes * self.node_s
        forward_s = max(self.decode_s, computed_s) if work.prompts or work.nodes else 0.0
        return work.images * self.vision_s + forward_s + self._drafting_s(work) + work.finished * self.overhead_s

    def _drafting_s(self, work: TickWork) -> float:
        drafting = work.drafting
        seconds = drafting.head_forwards * self.head_s + work.head_prompts * self.head_prompt_s
        if drafting.self_forwards:
            # Each reads all weights; the first also reads prompts, which is bound by compute where they are long.
            first_s = max(self.decode_s, drafting.self_rows * self.node_s)
            seconds += first_s + (drafting.self_forwards - 1) * self.decode_s
        return seconds


def read_device(name: str) -> EmulatedDevice:
    """One of the package's devices, or a JSON file with the fields of EmulatedDevice.

    Raises:
        UserError: no such device or file, or a stage time that is missing or negative.
    """
    known = sorted(path.stem for path in _DEVICES.glob("*.json"))
    path = _DEVICES / f"{name}.json" if name in known else Path(name)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--emulate {name} is none of {', '.join(known)}, and no file that can be read ({error.strerror})"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error})") from None
    try:
        stages = {stage: float(raw[stage]) for stage in _STAGES}
        device = EmulatedDevice(name=str(raw["name"]), source=str(raw["source"]), **stages)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {error!r}; it needs name, source and the seconds {', '.join(_STAGES)}") from None
    if not all(0 <= value < 60 for value in stages.values()):
        raise UserError(f"{path}: stage times must lie between 0 and 60 seconds, got {stages}")
    return device


TickTime = Callable[[TickWork, float], float]


def tick_time(device: EmulatedDevice | None) -> TickTime:
    """From what a tick did and the seconds it took here, to the seconds it counts for."""
    if device is None:
        return lambda _, measured_s: measured_s
    return lambda work, _: device.tick_s(work)
