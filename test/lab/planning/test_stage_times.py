# SPDX-License-Identifier: Apache-2.0
"""Ticks on a device that is not here: one table for planning and for simulation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.engine.batch import TickWork
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.simulate import SimulateSettings
from specvla_ros.lab.planning.cost import (
    OPENVLA_7B,
    Forward,
    WeightFormat,
    forward_parts,
    model_cost,
    roofline_seconds,
)
from specvla_ros.lab.planning.device import Software, known_devices, read_device
from specvla_ros.lab.planning.stage_times import read_stage_times, stage_times
from specvla_ros.lab.simulation.rollout import tick_time
from specvla_ros.models.settings import ModelSettings
from specvla_ros.speculation.drafters.registry import DraftWork

ROWS, LAYERS, WIDTH, VOCABULARY = 290, 32, 4096, 32064  # Llama 2 7B as OpenVLA has it
LAYER_VALUES = 4 * WIDTH**2 + 3 * WIDTH * 11008
IMAGE_BYTES, IMAGE_OPERATIONS, IMAGE_LAYERS = 1.51e9, 405e9, 23 + 26  # DINOv2 and SigLIP but the last blocks, projector


def plain_tick_s(name: str, image: bool, prompt: bool, trees: int, nodes: int) -> float:
    """A tick by what the documentation says: weights are read or multiplied with, and every layer takes its time."""
    raw = read_device(name).as_json()
    reached = raw["efficiency"]
    bytes_per_s = raw["bandwidth_gb_s"] * 1e9 * reached["bandwidth"]

    def multiplied_s(operations: float, rows: int) -> float:
        shares = sorted((int(key), share) for key, share in reached["compute_by_rows"].items())
        share = shares[0][1]
        if len(shares) > 1 and rows > shares[0][0]:
            (few, low), (many, high) = shares
            share = low + (min(rows, many) - few) / (many - few) * (high - low)
        return operations / (raw["dense_tflops"] * 1e12 * share)

    rows = ROWS * prompt + nodes
    read_s = LAYERS * LAYER_VALUES * 2 / bytes_per_s
    seconds = max(read_s, multiplied_s(2 * LAYERS * LAYER_VALUES * rows, rows))
    seconds += LAYERS * reached["layer_us"] * 1e-6
    # Keys and values: 512 KiB a row; those before are read, the new ones are written and read. At few rows all of
    # attention is reading.
    seconds += (trees * (ROWS + 3) + 2 * rows) * 2 * LAYERS * WIDTH * 2 / bytes_per_s
    chosen = nodes + prompt
    seconds += max(VOCABULARY * WIDTH * 2 / bytes_per_s, multiplied_s(2 * VOCABULARY * WIDTH * chosen, chosen))
    seconds += reached["layer_us"] * 1e-6
    if image:
        seconds += max(IMAGE_BYTES / bytes_per_s, multiplied_s(IMAGE_OPERATIONS, ROWS))
        seconds += IMAGE_LAYERS * reached["layer_us"] * 1e-6
    return seconds


@pytest.mark.parametrize("name", ["orin", "rtx5090", "h200", "a100", "thor"])
@pytest.mark.parametrize(
    ("image", "prompt", "trees", "nodes"),
    [(1, 1, 0, 0), (1, 1, 6, 6), (1, 1, 3, 48), (0, 0, 1, 1), (0, 0, 1, 50), (0, 0, 3, 48), (1, 1, 3, 150)],
)
def test_a_tick_is_what_a_plain_reading_gives(name: str, image: int, prompt: int, trees: int, nodes: int) -> None:
    found = stage_times(read_device(name)).tick_s(TickWork(images=image, prompts=prompt, trees=trees, nodes=nodes))
    assert found == pytest.approx(plain_tick_s(name, bool(image), bool(prompt), trees, nodes), rel=0.01)


@given(
    name=st.sampled_from(sorted(set(known_devices()) - {"orin_nano"})),
    prompts=st.integers(0, 1),
    trees=st.integers(1, 6),
    nodes_each=st.integers(1, 50),
    weights=st.sampled_from([WeightFormat.NONE, WeightFormat.W8A8]),
)
def test_the_simulation_counts_what_the_plan_counts(
    name: str, prompts: int, trees: int, nodes_each: int, weights: WeightFormat
) -> None:
    device, model = read_device(name), model_cost(OPENVLA_7B)
    nodes = trees * nodes_each
    forward = Forward(prompts * ROWS, image=prompts > 0, trees=trees, nodes=nodes, prefix_rows=trees * (ROWS + 3))
    planned = roofline_seconds(forward_parts(forward, model, weights, 2), device, device.efficiency)
    work = TickWork(images=prompts, prompts=prompts, trees=trees, nodes=nodes)
    assert stage_times(device, weights=weights).tick_s(work) == pytest.approx(planned)


@pytest.mark.parametrize("name", ["orin", "rtx5090"])
def test_the_figures_of_actionflow_come_from_ticks(name: str) -> None:
    """Table 1: an answer of seven tokens one after the other, and a tick with seven frames in flight, whose copy of
    keys and values is ActionFlow's alone: 3 % of the time."""
    times = stage_times(read_device(name))
    answer_s = times.tick_s(TickWork(images=1, prompts=1)) + 6 * times.tick_s(TickWork(trees=1, nodes=1))
    tick_s = times.tick_s(TickWork(images=1, prompts=1, trees=6, nodes=6))
    measured = {"orin": (0.803, 0.3131), "rtx5090": (0.1312, 0.0514)}[name]
    assert (answer_s, tick_s) == pytest.approx(measured, rel=0.05)


def test_no_work_takes_no_time_and_more_takes_more() -> None:
    times = stage_times(read_device("orin"))
    assert times.tick_s(TickWork()) == 0
    token = TickWork(trees=1, nodes=1)
    assert times.tick_s(TickWork(trees=1, nodes=50)) == pytest.approx(times.tick_s(token), rel=0.01), "nodes are free"
    half = times.tick_s(TickWork(images=1, prompts=0.5)) + times.tick_s(TickWork(prompts=0.5))
    whole = times.tick_s(TickWork(images=1, prompts=1))
    assert whole < half < 1.2 * whole, "a chunk pays for its own layers"


def test_drafting_reads_the_head_and_the_output_head_at_every_step() -> None:
    times, stages = stage_times(read_device("orin")), stage_times(read_device("orin")).as_json()
    token_s = times.tick_s(TickWork(trees=1, nodes=1))
    drafted_s = times.tick_s(TickWork(trees=1, nodes=1, drafting=DraftWork(head_forwards=5))) - token_s
    read = 5 * (2 * WIDTH**2 + LAYER_VALUES + VOCABULARY * WIDTH) * 2
    assert drafted_s == pytest.approx(read / (204.8e9 * 0.85) + 5 * 2 * 180e-6, rel=0.01)
    fed_s = times.tick_s(TickWork(images=1, prompts=1, drafting=DraftWork(head_forwards=1), head_prompts=1))
    alone_s = times.tick_s(TickWork(images=1, prompts=1))
    assert fed_s - alone_s == pytest.approx(stages["head_s"] + stages["head_prompt_s"], rel=0.01)
    own = TickWork(trees=1, nodes=5, drafting=DraftWork(self_forwards=4, self_rows=60))
    assert times.tick_s(own) == pytest.approx(5 * token_s, rel=0.02), "a forward of the target reads all its weights"


def test_stages_are_told_with_their_source() -> None:
    told = stage_times(read_device("rtx5090")).as_json()
    assert told["name"] == "NVIDIA RTX 5090" and told["source"].startswith("derived: ")
    assert 0 < told["node_s"] < told["vision_s"] < told["prefill_s"] and told["head_s"] < told["decode_s"]


@pytest.mark.parametrize("name", ["orin", "rtx5090", "h100"])
def test_ticks_of_captured_graphs_are_shorter_and_say_so(name: str) -> None:
    device = read_device(name)
    eager, captured = (stage_times(device, software) for software in Software)
    works = (
        TickWork(images=1, prompts=1),
        TickWork(images=1, prompts=1, trees=3, nodes=48),
        TickWork(trees=1, nodes=1),
    )
    assert all(captured.tick_s(work) < eager.tick_s(work) for work in works)
    assert (
        eager.tick_s(works[0])
        == stage_times(device).tick_s(works[0])
        == tick_time(read_stage_times(name))(works[0], 9.0)
    )
    assert captured == read_stage_times(name, Software.CAPTURED)
    told = captured.as_json()
    assert told["software"] == "captured" and "(captured software)" in told["source"]
    assert told["efficiency"] == device.captured.as_json()


def test_a_device_too_small_for_the_model_is_not_emulated() -> None:
    with pytest.raises(UserError, match=r"Orin Nano 8 GB has 8 GB of memory, but OpenVLA-7B takes 15\.\d GB in bf"):
        stage_times(read_device("orin_nano"))
    with pytest.raises(UserError, match=r"takes 8\.\d GB in w8a8"):
        stage_times(read_device("orin_nano"), weights=WeightFormat.W8A8)
    assert stage_times(read_device("orin_nano"), weights=WeightFormat.INT4).tick_s(TickWork(trees=1, nodes=1)) > 0


def test_an_emulated_device_takes_the_format_of_the_policys_weights() -> None:
    settings = SimulateSettings(nano_policy(), emulate="orin", model=ModelSettings(quantization="w8a8"))
    found = settings.stage_times()
    assert found == stage_times(read_device("orin"), weights=WeightFormat.W8A8)
    assert found is not None and "with its decoder in w8a8" in found.source
    assert replace(settings, emulate="").stage_times() is None
    fp8 = replace(settings, model=ModelSettings(quantization="fp8"))
    with pytest.raises(UserError, match="has no fp8 rate"):
        fp8.stage_times()
