# SPDX-License-Identifier: Apache-2.0
"""Times of the engine's ticks on a device that is not here."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specvla_ros.errors import UserError
from specvla_ros.lab.planning.cost import (
    OPENVLA_7B,
    Forward,
    ModelCost,
    Part,
    arithmetic_of,
    draft_parts,
    draft_prompt_parts,
    forward_parts,
    model_cost,
    ridge_rows,
    vision_part,
)
from specvla_ros.lab.planning.device import Device, Software, read_device
from specvla_ros.models.settings import WeightFormat

if TYPE_CHECKING:  # importing the engine imports torch
    from specvla_ros.engine.batch import TickWork

_COMMITTED = 3  # mean number of committed tokens of an answer in progress


@dataclass(frozen=True)
class StageTimes:
    """Times of OpenVLA-7B on an absent device. Results with them are emulation and labelled as such."""

    device: Device  # its `efficiency` is that of the software
    model: ModelCost
    software: Software = Software.EAGER
    weights: WeightFormat = WeightFormat.NONE  # of decoder and draft head; vision has the device's dtype

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def source(self) -> str:
        shares = self.device.efficiency
        rows, rounded = self.model.prompt_rows, self.weights is not WeightFormat.NONE
        decoder = f" with its decoder in {self.weights.value}" if rounded else ""
        return (
            f"derived: OpenVLA-7B's bytes and operations in {self.device.dtype}{decoder}, at {shares.bandwidth:.0%} of "
            f"the device's bandwidth, {shares.compute(rows):.0%} of its matrix rate with {rows} rows, and "
            f"{shares.layer_s * 1e6:.0f} µs more per layer ({self.software.value} software); nothing was measured here"
        )

    def tick_s(self, work: "TickWork") -> float:
        image_s = work.images * self._reached_s(vision_part(self.model, self.device.value_bytes))
        return image_s + self._forward_s(self._forward(work)) + self._drafting_s(work)

    @property
    def free_rows(self) -> int:
        """Rows of a forward up to which one more is free."""
        return int(ridge_rows(self.model, self.device, self.weights, self.device.efficiency))

    def as_json(self) -> dict[str, Any]:
        """Name, source and efficiency, and the times of the single stages in seconds."""
        rows = self.model.prompt_rows
        prompt_s = self._forward_s(Forward(rows))
        return {
            "name": self.name,
            "source": self.source,
            "software": self.software.value,
            "efficiency": self.device.efficiency.as_json(),
            "vision_s": self._reached_s(vision_part(self.model, self.device.value_bytes)),
            "prefill_s": prompt_s,
            "decode_s": self._forward_s(self._trees(1, 1)),
            "node_s": (self._forward_s(Forward(rows, trees=1, nodes=16)) - prompt_s) / 16,  # packed with a prompt
            "head_s": self._head_s(1, 1),
            "head_prompt_s": self._head_prompt_s(),
        }

    def _forward(self, work: "TickWork") -> Forward:
        """The packed forward of a tick; a chunk without its image counts as the prompt's last."""
        rows = round(work.prompts * self.model.prompt_rows)
        return replace(
            self._trees(work.trees, work.nodes),
            prompt_rows=rows + work.given,
            prompt_before=max(0, self.model.prompt_rows - rows) if rows and not work.images else 0,
            prompt_ends=not work.images or work.prompts >= 1,
        )

    def _trees(self, trees: int, nodes: int) -> Forward:
        return Forward(trees=trees, nodes=nodes, prefix_rows=trees * (self.model.prompt_rows + _COMMITTED))

    def _forward_s(self, forward: Forward) -> float:
        parts = forward_parts(forward, self.model, self.weights, self.device.value_bytes)
        return sum(map(self._reached_s, parts))

    def _drafting_s(self, work: "TickWork") -> float:
        drafting = work.drafting
        if drafting.model_forwards:
            raise UserError(f"{self.name} has no stage times for a draft model: emulate without draft.model")
        seconds = drafting.head_forwards * self._head_s(work.trees, work.nodes)
        seconds += work.head_prompts * self._head_prompt_s()
        if drafting.self_forwards:
            # Each reads all weights; the first also reads prompts, which is compute-bound if they are long.
            seconds += self._forward_s(self._trees(work.trees, max(1, drafting.self_rows)))
            seconds += (drafting.self_forwards - 1) * self._forward_s(self._trees(work.trees, 1))
        return seconds

    def _head_s(self, trees: int, nodes: int) -> float:
        prefix = self._trees(trees, nodes).prefix_rows
        head = self.model, self.weights, self.device.value_bytes
        return sum(map(self._reached_s, draft_parts(*head, steps=1, rows=max(1, nodes), prefix_rows=prefix)))

    def _head_prompt_s(self) -> float:
        """Time that a prompt's rows add to a forward of the head, which reads its weights anyway."""
        parts = draft_prompt_parts(self.model, self.weights, self.device.value_bytes)
        return sum(max(0.0, self._reached_s(part) - self._reached_s(replace(part, operations=0.0))) for part in parts)

    def _reached_s(self, part: Part) -> float:
        return part.seconds(self.device, self.device.efficiency)


def stage_times(
    device: Device, software: Software = Software.EAGER, weights: WeightFormat = WeightFormat.NONE
) -> StageTimes:
    """Times of OpenVLA-7B on a device with a kind of software.

    Raises UserError if it does not fit in memory, or if the device has no rate for products in the weights' format.
    """
    model = model_cost(OPENVLA_7B)
    needed_gb = model.memory_bytes(weights, device.value_bytes, draft=False) / 1e9
    if needed_gb > device.memory_gb:
        form = device.dtype if weights is WeightFormat.NONE else weights.value
        raise UserError(
            f"{device.name} has {device.memory_gb:g} GB of memory, but OpenVLA-7B takes {needed_gb:.1f} GB in "
            f"{form}: choose a device with more memory"
        )
    device.operations_per_s(arithmetic_of(weights), model.prompt_rows)  # raises without such a rate
    # The committed results were emulated with drafts of any id: 7 ms more per draft of 5 steps on an Orin.
    model = replace(model, draft_head_values=model.head_values)
    return StageTimes(device.running(software), model, software, weights)


def read_stage_times(
    device: str, software: Software = Software.EAGER, weights: WeightFormat = WeightFormat.NONE
) -> StageTimes:
    """Reads the stage times of a device, given by the name of a bundled device or by a JSON file."""
    return stage_times(read_device(device, "--emulate"), software, weights)
