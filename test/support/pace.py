# SPDX-License-Identifier: Apache-2.0
"""The seconds that ticks count for, invented."""

from specvla_ros.engine.batch import TickWork
from specvla_ros.lab.simulation.rollout import TickTime


def invented_pace(image_s: float, prompt_s: float, token_s: float) -> TickTime:
    """A device that takes so long for an image, for a forward with a prompt, and for one without."""

    def tick_s(work: TickWork, _: float) -> float:
        forward_s = max(token_s, work.prompts * prompt_s) if work.prompts or work.nodes else 0.0
        return work.images * image_s + forward_s

    return tick_s
