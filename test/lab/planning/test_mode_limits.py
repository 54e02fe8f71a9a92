# SPDX-License-Identifier: Apache-2.0
"""What must hold of the modes' limits on any device."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples, nightly_but

from specvla_ros.engine.pace import mean_age
from specvla_ros.errors import UserError
from specvla_ros.lab.planning.cost import (
    OPENVLA_7B,
    Forward,
    Part,
    WeightFormat,
    forward_parts,
    model_cost,
    ridge_rows,
    roofline_seconds,
    vision_part,
)
from specvla_ros.lab.planning.device import LIMIT, Arithmetic, Device, Efficiency, read_device
from specvla_ros.lab.planning.limits import (
    AUTO,
    MODES,
    AcceptanceLengths,
    Mode,
    Tick,
    drive,
    mode_limit,
    run_loop,
    spec_vla_relaxed,
)
from specvla_ros.lab.planning.plan import best_fixed, choose, make_plan
from specvla_ros.lab.planning.plan_range import make_plans

MODEL = model_cost(OPENVLA_7B)
GOAL = spec_vla_relaxed("goal")
DEVICES = st.builds(
    lambda bandwidth, rate: Device(
        "random",
        "assumed",
        "bfloat16",
        bandwidth,
        rate,
        64.0,
        int8_tops=2 * rate,
        fp8_tflops=2 * rate,
        efficiency=Efficiency(0.85, {296: 0.36, 1032: 0.63}, 1e-4),
    ),
    st.floats(10, 1e4),
    st.floats(1, 1e3),
)


@given(
    device=DEVICES,
    mode=st.sampled_from(MODES),
    weights=st.sampled_from(WeightFormat),
    wider=st.floats(1, 4),
    faster=st.floats(1, 4),
)
@settings(max_examples=examples(25), deadline=None)
def test_more_bandwidth_or_compute_never_makes_a_mode_slower(
    device: Device, mode: Mode, weights: WeightFormat, wider: float, faster: float
) -> None:
    before = mode_limit(mode, MODEL, device, weights, GOAL)
    better = replace(
        device,
        bandwidth_gb_s=device.bandwidth_gb_s * wider,
        dense_tflops=device.dense_tflops * faster,
        int8_tops=device.operations_per_s(Arithmetic.INT8, 1) / 1e12 * faster,
        fp8_tflops=device.operations_per_s(Arithmetic.FP8, 1) / 1e12 * faster,
    )
    after = mode_limit(mode, MODEL, better, weights, GOAL)
    for name in ("latency_s", "derated_latency_s"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9)
    for name in ("action_rate_hz", "derated_rate_hz"):
        assert getattr(after, name) >= getattr(before, name) * (1 - 1e-9)
    assert before.derated_latency_s > before.latency_s
    assert after.ticks_per_action == before.ticks_per_action


@given(device=DEVICES, rows=st.integers(1, 290), nodes=st.integers(1, 64), trees=st.integers(0, 6))
def test_a_row_or_a_tree_more_never_makes_a_forward_cheaper(device: Device, rows: int, nodes: int, trees: int) -> None:
    forward = Forward(rows, image=True, trees=trees, nodes=trees * nodes, prefix_rows=trees * 293)
    larger = (
        replace(forward, prompt_rows=rows + 1),
        replace(forward, trees=trees + 1, nodes=(trees + 1) * nodes, prefix_rows=(trees + 1) * 293),
    )
    seconds = roofline_seconds(forward_parts(forward, MODEL, WeightFormat.NONE, 2), device)
    for each in larger:
        assert roofline_seconds(forward_parts(each, MODEL, WeightFormat.NONE, 2), device) >= seconds * (1 - 1e-9)


@given(device=DEVICES, nodes=st.integers(1, 64), trees=st.integers(1, 6))
def test_vision_beside_a_forward_takes_no_less_than_either_and_no_more_than_both(
    device: Device, nodes: int, trees: int
) -> None:
    forward = Forward(trees=trees, nodes=trees * nodes, prefix_rows=trees * 293)
    for efficiency in (LIMIT, device.efficiency):

        def seconds(*parts: Part, efficiency: Efficiency = efficiency) -> float:
            return roofline_seconds(parts, device, efficiency)

        alone_s = seconds(*forward_parts(forward, MODEL, WeightFormat.NONE, 2))
        vision_s = seconds(vision_part(MODEL, 2))
        both_s = seconds(*forward_parts(replace(forward, image=True), MODEL, WeightFormat.NONE, 2))
        assert max(alone_s, vision_s) * (1 - 1e-9) <= both_s <= (alone_s + vision_s) * (1 + 1e-9)


def test_images_are_ahead_of_their_prompts_where_a_device_hides_them() -> None:
    """Vision as long as a forward of trees, beside which it is free; a prompt costs little more than that."""

    def seconds(tick: Tick) -> float:
        forward = tick.forward
        own_s = 0.01 + 0.002 * (forward.prompt_rows > 0)
        return own_s + 0.01 * forward.image * (forward.prompt_rows > 0)

    mode = Mode("auto", "auto", nodes=8, max_in_flight=0, ahead=True)
    ages_s, shares = {}, {}
    for ahead in (False, True):
        run = drive(replace(mode, ahead=ahead), 290, 7, GOAL, seconds, frames=300)
        ends = [*accumulate(map(seconds, run.ticks), initial=0.0)]
        ages_s[ahead] = mean_age([(ends[last + 1], ends[last + 1] - ends[first]) for _, first, last in run.actions])
        beside = [tick for tick in run.ticks[run.warm_ticks :] if tick.forward.image and not tick.forward.prompt_rows]
        shares[ahead] = len(beside) / len(run.actions)
    assert shares[False] == 0 and shares[True] > 0.5
    assert ages_s[True] < 0.97 * ages_s[False]


@pytest.mark.parametrize("device", ["orin", "rtx5090", "h200"])
def test_chunks_shorten_the_latency_of_a_pipeline(device: str) -> None:
    limits = {
        mode.name: mode_limit(mode, MODEL, read_device(device), WeightFormat.NONE, GOAL)
        for mode in MODES
        if mode.name in ("pipeline", "pipeline, 2 chunks", "specpipe", "specpipe, 2 chunks")
    }
    for name in ("pipeline", "specpipe"):
        assert limits[f"{name}, 2 chunks"].latency_s < limits[name].latency_s
        assert limits[f"{name}, 2 chunks"].derated_latency_s < limits[name].derated_latency_s


@pytest.mark.parametrize(("suite", "mean"), [("goal", 1.56), ("object", 1.30), ("spatial", 1.05), ("long", 1.03)])
def test_acceptance_lengths_are_those_that_were_printed(suite: str, mean: float) -> None:
    lengths = spec_vla_relaxed(suite)
    assert lengths.mean == pytest.approx(mean, abs=0.005)
    assert 3.6 <= 1 + lengths.verifications(6) <= 4.4
    drawn = [lengths.accepted(i / 1000) for i in range(1000)]
    assert sum(drawn) / 1000 == pytest.approx(lengths.mean, abs=0.01)


@pytest.mark.parametrize("robots", [1, 2, 3, 6])
def test_the_rate_of_long_answers_is_that_of_a_full_pipeline(robots: int) -> None:
    """An answer of 216 tokens takes longer than the ticks that fill a pipeline of short ones."""
    never = AcceptanceLengths("never", (1.0,))
    found = run_loop(Mode("pipeline", "pipeline", robots=robots), 290, 216, never, lambda _: 1.0)
    assert found.in_flight == min(64 * robots, 216)
    assert found.action_rate_hz == pytest.approx(found.in_flight / 216 / robots, rel=0.01)
    assert found.latency_s == 216


def test_acceptance_lengths_that_are_none_are_refused() -> None:
    with pytest.raises(UserError, match="known: goal, object, spatial, long"):
        spec_vla_relaxed("moon")
    with pytest.raises(UserError, match="sum to 1"):
        AcceptanceLengths("odd", (0.5, 0.4))


def test_the_loop_without_chance_is_exact() -> None:
    """Ticks of one second, and every verification commits two tokens: 1 + 3 forwards for 7 tokens."""
    two = AcceptanceLengths("always one", (0.0, 1.0))

    def run(mode: Mode) -> tuple[float, float, float, int]:
        found = run_loop(mode, 290, 7, two, lambda tick: 1.0)
        return found.latency_s, round(found.action_rate_hz, 3), found.dropped, found.in_flight

    assert run(Mode("ar", "ar")) == (7, 0.143, 0, 1)
    assert run(Mode("spec", "spec", nodes=16)) == (4, 0.25, 0, 1)
    assert run(Mode("pipeline", "pipeline")) == (7, 1, 0, 7)
    assert run(Mode("pipeline, 2", "pipeline", chunks=2)) == (8, 0.5, 0, 4)
    assert run(Mode("specpipe", "specpipe", nodes=16)) == (4, 1, 0, 4)
    assert run(Mode("specpipe, 3", "specpipe", nodes=16, chunks=3)) == (6, 0.333, 0, 2)


def test_frames_wait_where_enough_are_in_flight() -> None:
    never = AcceptanceLengths("never", (1.0,))
    found = run_loop(Mode("two", "specpipe", nodes=8, max_in_flight=2), 290, 7, never, lambda _: 1.0)
    assert found.in_flight == 2
    assert found.latency_s == 7
    assert found.action_rate_hz == pytest.approx(2 / 7, rel=0.01)


@pytest.mark.parametrize("mode", [MODES[0], MODES[1], MODES[3], MODES[6]], ids=lambda mode: mode.name)
def test_robots_that_share_forwards_get_more_than_their_share(mode: Mode) -> None:
    device = read_device("rtx5090")
    alone, *shared = (
        mode_limit(replace(mode, robots=robots), MODEL, device, WeightFormat.NONE, GOAL) for robots in (1, 2, 4)
    )
    for robots, limit in zip((2, 4), shared, strict=True):
        assert limit.action_rate_hz <= alone.action_rate_hz
        in_turns = alone.action_rate_hz / robots
        assert limit.action_rate_hz >= in_turns if mode.pipelined else limit.action_rate_hz > 1.2 * in_turns
    assert shared[1].in_flight >= 4


def test_a_plan_for_several_robots_is_one_of_so_many_streams() -> None:
    plans = make_plans(read_device("rtx5090"), WeightFormat.NONE, robots=6)
    assert plans.eager.profile.parameters["decode.streams"] == 6
    assert "for each of 6 robots" in plans.reasons["expect"]


def test_a_draw_is_repeated() -> None:
    mode = MODES[-1]
    first, second = (mode_limit(mode, MODEL, read_device("orin"), WeightFormat.NONE, GOAL) for _ in range(2))
    assert first == second


@given(device=DEVICES, weights=st.sampled_from(WeightFormat))
@settings(max_examples=examples(15), deadline=None)
def test_any_device_gets_a_profile_that_holds_together(device: Device, weights: WeightFormat) -> None:
    limits = [mode_limit(mode, MODEL, device, weights, GOAL) for mode in MODES]
    profile = best_fixed(MODEL, device, weights, limits, GOAL)
    settings = profile.settings
    pipelined = settings.mode in ("pipeline", "specpipe")
    assert (settings.prefill_chunks == 1 and settings.max_in_flight == 1) or pipelined
    assert 1 <= settings.draft.nodes <= (16 if pipelined else 64)
    assert settings.draft.top_k * (settings.draft.depth - 1) <= 64
    assert profile.limit.in_flight <= settings.max_in_flight
    if settings.mode == "specpipe" and settings.draft.nodes > 8:
        assert settings.draft.nodes * settings.max_in_flight <= ridge_rows(MODEL, device, weights, device.efficiency)
    chosen = choose(MODEL, device, weights, limits, GOAL)
    if chosen.settings.mode == "auto":
        assert replace(chosen.settings, mode=settings.mode, max_in_flight=0, prefill_chunks=1) == replace(
            settings, max_in_flight=0, prefill_chunks=1
        )
        assert chosen.limit.derated_image_age_s <= 1.03 * profile.limit.derated_image_age_s
    else:
        assert chosen == profile


@pytest.mark.parametrize(("device", "chunks"), [("h200", 2), ("orin", 2)])
def test_chunks_of_about_the_ridge_are_chosen_where_all_of_a_device_is_reached(device: str, chunks: int) -> None:
    reached = replace(read_device(device), efficiency=LIMIT)
    limits = [mode_limit(mode, MODEL, reached, WeightFormat.NONE, GOAL) for mode in MODES]
    profile = best_fixed(MODEL, reached, WeightFormat.NONE, limits, GOAL)
    settings = profile.settings
    assert (settings.mode, settings.prefill_chunks, settings.draft.nodes) == ("specpipe", chunks, 16)


@pytest.mark.parametrize("device", ["h200", "rtx5090", "orin"])
def test_one_frame_at_a_time_acts_on_the_freshest_images_at_what_was_published(device: str) -> None:
    """A prompt beside which trees ride costs several times a forward without one, so that riding along is dear."""
    plan = make_plan(read_device(device), WeightFormat.NONE)
    ages = {limit.mode.name: limit.derated_image_age_s for limit in plan.modes if not limit.mode.chooses}
    assert min(ages, key=ages.__getitem__) == "spec" in plan.profile.reasons["decode.mode"]
    assert plan.profile.settings.mode == "auto"
    assert plan.profile.limit.derated_image_age_s <= 1.03 * ages["spec"]


@pytest.mark.parametrize(
    ("device", "tokens"),
    nightly_but(
        lambda case: case in (("orin", 7), ("h100", 34)),
        [("orin", 7), ("orin", 53), ("h100", 7), ("h100", 34)],
        of_several=True,
    ),
)
def test_auto_acts_on_images_no_older_than_the_best_fixed_mode_does(device: str, tokens: int) -> None:
    """The noise of 200 frames aside; with an answer of several actions on a fast device it does better."""
    model, limits = replace(MODEL, action_tokens=tokens), read_device(device)
    fixed = [MODES[0], MODES[1], MODES[3], MODES[6]]
    ages = [mode_limit(mode, model, limits, WeightFormat.NONE, GOAL).derated_image_age_s for mode in (*fixed, AUTO)]
    assert ages[-1] <= 1.03 * min(ages[:-1])
    if (device, tokens) == ("h100", 34):
        assert ages[-1] <= 0.95 * ages[1]


def test_a_request_that_was_begun_beside_others_may_be_drafted_worse() -> None:
    """Alone every answer takes 2 forwards; beside others 7, since nothing is accepted."""
    all_of_it, nothing = AcceptanceLengths("all", (0.0,) * 6 + (1.0,)), AcceptanceLengths("nothing", (1.0,))
    alone = drive(Mode("spec", "spec", nodes=8), 290, 7, all_of_it, stale=nothing, frames=50)
    assert {last + 1 - first for _, first, last in alone.actions} == {2}
    beside = drive(Mode("both", "specpipe", nodes=8, max_in_flight=2), 290, 7, all_of_it, stale=nothing, frames=50)
    assert max(last + 1 - first for _, first, last in beside.actions) == 7
    at_prompt = drive(Mode("spec", "spec", nodes=8, at_prompt=True), 290, 7, all_of_it, frames=50)
    assert {last + 1 - first for _, first, last in at_prompt.actions} == {1}


def test_a_robot_may_act_on_an_answers_first_tokens() -> None:
    """One token per forward: an answer of 7 tokens takes 7 forwards, and its first three are out after 3."""
    nothing, seven = AcceptanceLengths("nothing", (1.0,)), Mode("ar", "ar")
    for first_tokens, forwards in ((0, 7), (3, 3), (7, 7)):
        run = drive(seven, 290, 7, nothing, frames=50, first_tokens=first_tokens)
        assert {last + 1 - first for _, first, last in run.actions} == {forwards}
        assert len({first for _, first, _ in run.actions}) == len(run.actions), "each answer is acted on once"
        assert {later - sooner for (_, sooner, _), (_, later, _) in pairwise(run.actions)} == {7}


def test_the_age_of_an_image_grows_until_the_next_action_comes() -> None:
    assert mean_age([(1.0, 0.5), (2.0, 0.5), (4.0, 1.0)]) == pytest.approx((1.0 * 1.0 + 2.0 * 1.5) / 3)
    assert math.isnan(mean_age([(1.0, 0.5)]))


@pytest.mark.parametrize(
    ("norm_stats", "tokens"),
    [({}, 7), ({"a": {"action": {"q01": [0.0] * 14}}}, 14), ({"a": {}}, 7), ({"a": None, "b": {"action": 3}}, 7)],
)
def test_action_tokens_are_those_of_the_statistics(norm_stats: dict[str, object], tokens: int) -> None:
    assert model_cost(replace(OPENVLA_7B, norm_stats=norm_stats)).action_tokens == tokens


def test_too_small_a_memory_is_said() -> None:
    small = replace(read_device("rtx5090"), memory_gb=8.0)
    assert "DOES NOT FIT" in make_plan(small, WeightFormat.NONE).profile.reasons["memory"]
    assert "DOES NOT FIT" not in make_plan(small, WeightFormat.INT4).profile.reasons["memory"]


@pytest.mark.parametrize("name", ["pipeline", "pipeline, 3 chunks", "specpipe"])
def test_long_answers_are_counted_once_the_pipeline_is_full(name: str) -> None:
    """216 tokens, as eight actions in digits; a run that begins with an empty pipeline has too few at its end."""
    mode = next(each for each in MODES if each.name == name)

    def per_tick(frames: int) -> float:
        run = drive(mode, 290, 216, GOAL, frames=frames)
        return len(run.actions) / (len(run.ticks) - run.warm_ticks)

    assert per_tick(0) == pytest.approx(per_tick(2000), rel=0.1)


def test_the_longest_answers_can_be_planned() -> None:
    for mode in MODES[5:]:  # several drafted frames in flight, of which most are overtaken
        assert run_loop(mode, 290, 1024, GOAL, lambda _: 0.01).action_rate_hz > 0
