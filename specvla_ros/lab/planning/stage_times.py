# SPDX-License-Identifier: Apache-2.0
"""What a tick would take on a device that is not here: the costs that a plan counts, at what is reached of it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specvla_ros.errors import UserError
from specvla_ros.lab.planning.cost import (
    OPENVLA_7B,
    Forward,
    ModelCost,
    Part,
    draft_part,
    draft_prompt_part,
    forward_parts,
    model_cost,
    vision_part,
)
from specvla_ros.lab.planning.device import Device
from specvla_ros.models.settings import WeightFormat

if TYPE_CHECKING:  # the engine imports torch, which a plan does without
    from specvla_ros.engine.tally import TickWork

_COMMITTED = 3  # tokens of an answer that are committed, in the mean


@dataclass(frozen=True)
class StageTimes:
    """OpenVLA-7B, not quantised, on a device that is not here. Results with it are emulation, and are named so."""

    device: Device
    model: ModelCost

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        shares = self.device.efficiency
        rows = self.model.prompt_rows
        return (
            f"derived: OpenVLA-7B's bytes and operations in {self.device.dtype}, at {shares.bandwidth:.0%} of the "
            f"device's bandwidth, {shares.compute(rows):.0%} of its matrix rate with {rows} rows, and "
            f"{shares.layer_s * 1e6:.0f} µs more per layer; nothing was measured here"
        )

    def tick_s(self, work: "TickWork") -> float:
        """Seconds of one tick."""
        image_s = work.images * self._reached_s(vision_part(self.model, self.device.value_bytes))
        return image_s + self._forward_s(self._forward(work)) + self._drafting_s(work)

    def as_json(self) -> dict[str, Any]:
        """Name and source, what is reached of the device, and the times of the stages alone [s]."""
        rows = self.model.prompt_rows
        prompt_s = self._forward_s(Forward(rows))
        return {
            "name": self.name,
            "source": self.source,
            "efficiency": self.device.efficiency.as_json(),
            "vision_s": self._reached_s(vision_part(self.model, self.device.value_bytes)),
            "prefill_s": prompt_s,
            "decode_s": self._forward_s(self._trees(1, 1)),
            "node_s": (self._forward_s(Forward(rows, trees=1, nodes=16)) - prompt_s) / 16,  # beside a prompt
            "head_s": self._head_s(1, 1),
            "head_prompt_s": self._head_prompt_s(),
        }

    def _forward(self, work: "TickWork") -> Forward:
        """The packed forward of a tick; a chunk without its image is taken for the prompt's last."""
        rows = round(work.prompts * self.model.prompt_rows)
        return replace(
            self._trees(work.trees, work.nodes),
            prompt_rows=rows,
            prompt_before=max(0, self.model.prompt_rows - rows) if rows and not work.images else 0,
            prompt_ends=not work.images or work.prompts >= 1,
        )

    def _trees(self, trees: int, nodes: int) -> Forward:
        return Forward(trees=trees, nodes=nodes, prefix_rows=trees * (self.model.prompt_rows + _COMMITTED))

    def _forward_s(self, forward: Forward) -> float:
        parts = forward_parts(forward, self.model, WeightFormat.NONE, self.device.value_bytes)
        return sum(map(self._reached_s, parts))

    def _drafting_s(self, work: "TickWork") -> float:
        drafting = work.drafting
        if drafting.model_forwards:
            raise UserError(f"{self.name} has no stage times of a draft model: leave draft.model out of an emulation")
        seconds = drafting.head_forwards * self._head_s(work.trees, work.nodes)
        seconds += work.head_prompts * self._head_prompt_s()
        if drafting.self_forwards:
            # Each reads all weights; the first also reads prompts, which is bound by computing where they are long.
            seconds += self._forward_s(self._trees(work.trees, max(1, drafting.self_rows)))
            seconds += (drafting.self_forwards - 1) * self._forward_s(self._trees(work.trees, 1))
        return seconds

    def _head_s(self, trees: int, nodes: int) -> float:
        prefix = self._trees(trees, nodes).prefix_rows
        part = draft_part(self.model, self.device.value_bytes, steps=1, rows=max(1, nodes), prefix_rows=prefix)
        return self._reached_s(part)

    def _head_prompt_s(self) -> float:
        """What a prompt's rows add to a forward of the head, whose weights are read for them and the nodes at once."""
        part = draft_prompt_part(self.model, self.device.value_bytes)
        return max(0.0, self._reached_s(part) - self._reached_s(replace(part, operations=0.0)))

    def _reached_s(self, part: Part) -> float:
        return part.seconds(self.device, self.device.efficiency)


def stage_times(device: Device) -> StageTimes:
    """OpenVLA-7B on a device.

    Raises:
        UserError: the device's memory does not hold it.
    """
    model = model_cost(OPENVLA_7B)
    needed_gb = model.memory_bytes(WeightFormat.NONE, device.value_bytes, draft=False) / 1e9
    if needed_gb > device.memory_gb:
        raise UserError(
            f"{device.name} has {device.memory_gb:g} GB of memory, but OpenVLA-7B takes {needed_gb:.1f} GB in "
            f"{device.dtype}: it cannot be emulated"
        )
    return StageTimes(device, model)
