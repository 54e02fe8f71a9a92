# SPDX-License-Identifier: Apache-2.0
"""A drafter of another package: the last committed token, again and again."""

from collections.abc import Sequence
from dataclasses import dataclass

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, DraftInput, drafter
from specvla_ros.speculation.tree import Branches


@dataclass(frozen=True)
class RepeatSettings:
    times: int = parameter(0, "Tokens drafted by repeating the last one; 0: none.", minimum=0, maximum=8)


class RepeatLast(Drafter):
    def __init__(self, times: int) -> None:
        self.times = times
        self.tolerances: list[tuple[int, ...]] = []

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Branches]:
        return [
            Branches.from_chains([request.answer[-1:] * self.times], max_depth=request.max_depth, max_nodes=most - 1)
            for request, most in zip(inputs, nodes, strict=True)
        ]

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        self.tolerances.append(bins)


@drafter("repeat_last", settings=RepeatSettings)
def make(context: DraftContext) -> Drafter | None:
    times: int = context.own("repeat_last").times
    return RepeatLast(times) if times else None
