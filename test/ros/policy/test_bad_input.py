# SPDX-License-Identifier: Apache-2.0
"""Whatever comes in, nothing wrong goes out, the reason is told, and the node lives on."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builtin_interfaces.msg import Time
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image
from std_msgs.msg import Header
from support.ros import Robot, rgb_image, robot

from specvla_ros.engine import engine
from specvla_ros.engine.engine import Engine
from specvla_ros.ros.policy.inference_thread import InferenceThread
from specvla_ros.ros.qos import CLOCK

INSTRUCTION = "put carrot on plate"


def refused(r: Robot, image: Image, reason: str) -> None:
    """The image gets no action, is counted under its reason, and the next good one is answered."""
    before = len(r.actions)
    r.images.publish(image)
    r.until(lambda: r.drops().get(reason) == 1)
    r.spin(0.1)
    assert len(r.actions) == before
    r.act(rgb_image(r.now_ns()))


BAD_IMAGES: dict[str, tuple[Callable[[Robot], Image], str]] = {
    "size 0": (lambda r: rgb_image(r.now_ns(), width=0, step=0, data=b""), "bad_image"),
    "step too small": (lambda r: rgb_image(r.now_ns(), step=100), "bad_image"),
    "data too short": (lambda r: rgb_image(r.now_ns(), data=bytes(100)), "bad_image"),
    "unknown encoding": (lambda r: rgb_image(r.now_ns(), encoding="hsv12"), "bad_image"),
    "stamp 0": (lambda r: rgb_image(0), "bad_stamp"),
    "nanoseconds out of range": (
        lambda r: rgb_image(0, header=Header(stamp=Time(sec=r.now_ns() // 10**9, nanosec=4_000_000_000))),
        "bad_stamp",
    ),
    "stamp in the future": (lambda r: rgb_image(r.now_ns() + 5 * 10**9), "bad_stamp"),
    "years old": (lambda r: rgb_image(1_600_000_000 * 10**9), "stale"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_gets_no_action(checkpoint: Path, name: str) -> None:
    make, reason = BAD_IMAGES[name]
    with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:
        r.start()
        refused(r, make(r), reason)


def test_a_recording_without_simulated_time_is_explained(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:
        r.start()
        r.until(lambda: r.user.count_publishers("/diagnostics"))

        def told() -> bool:
            r.images.publish(rgb_image(1_600_000_000 * 10**9))
            return bool(r.diagnostics) and "use_sim_time:=true" in r.diagnosis("inputs").message

        r.until(told)
        assert r.diagnosis("inputs").level != b"\x00"


def test_an_older_image_than_the_last_is_not_answered(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        newest = rgb_image(r.now_ns())
        r.act(newest)
        older = rgb_image(newest.header.stamp.sec * 10**9 + newest.header.stamp.nanosec - 1)
        refused(r, older, "out_of_order")


def test_without_an_instruction_there_is_no_action(checkpoint: Path) -> None:
    with robot(checkpoint) as r:
        r.start()
        r.images.publish(rgb_image(r.now_ns()))
        r.until(lambda: r.drops() == {"no_instruction": 1})
        r.instruct(INSTRUCTION)
        r.act(rgb_image(r.now_ns()))
        assert len(r.actions) == 1


@pytest.mark.parametrize("bad", ["   ", "x" * 10_240])
def test_a_bad_instruction_stops_the_policy_until_a_good_one_comes(
    checkpoint: Path, bad: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        r.act(rgb_image(r.now_ns()))
        r.instruct(bad)
        r.until(lambda: r.policy.parts[""].instruction.problem)
        r.images.publish(rgb_image(r.now_ns()))
        r.until(lambda: r.drops().get("bad_instruction") == 1)
        assert len(r.actions) == 1
        r.instruct("flip pot")
        assert r.act(rgb_image(r.now_ns())).instruction == "flip pot"
        said = capfd.readouterr().err
        assert said.count("instruction of epoch") == 2 and said.count("refused, nothing is published") == 1


def test_a_bad_instruction_of_the_parameters_is_refused_however_soon_it_is_checked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceThread, "check_instruction", lambda _, text, on_checked: on_checked("too long"))
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        assert r.policy.trigger_configure().name == "SUCCESS"
        assert r.policy.parts[""].instruction.problem == "too long"


def test_a_fault_in_a_tick_drops_its_frame_and_the_node_lives_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise RuntimeError("out of memory")

            patch.setattr(Engine, "_forward", fail)
            r.images.publish(rgb_image(r.now_ns()))
            r.until(lambda: r.drops() == {"engine_fault": 1})
        assert r.actions == []
        r.act(rgb_image(r.now_ns()))


def test_a_device_that_has_failed_is_told_as_the_models_state(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:
        r.start()

        def fail(*_: object) -> None:
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(Engine, "_forward", fail)
        monkeypatch.setattr(engine, "device_fault", lambda _: "cuda:0 has failed: restart this process")
        r.images.publish(rgb_image(r.now_ns()))
        r.until(lambda: r.drops() == {"engine_fault": 1})
        r.until(lambda: r.diagnostics and r.diagnosis("model").level == b"\x02")
        assert r.diagnosis("model").message == "cuda:0 has failed: restart this process"


def test_a_clock_that_jumps_back_begins_a_new_epoch(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION, use_sim_time=True) as r:
        clock = r.user.create_publisher(Clock, "/clock", CLOCK)
        r.start()
        r.until(clock.get_subscription_count)

        def set_clock(seconds: int) -> None:
            def arrived() -> bool:
                clock.publish(Clock(clock=Time(sec=seconds)))
                return r.now_ns() == seconds * 10**9

            r.until(arrived)

        r.images.publish(rgb_image(100 * 10**9))
        r.until(lambda: r.drops() == {"bad_stamp": 1})  # nothing on /clock yet
        set_clock(100)
        late = r.act(rgb_image(100 * 10**9))
        set_clock(50)
        early = r.act(rgb_image(50 * 10**9))
        assert early.epoch > late.epoch
        assert early.seq == late.seq + 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(checkpoint=""), "parameter 'checkpoint' is empty"),
        (dict(checkpoint="/nowhere/at/all"), "/nowhere/at/all does not exist"),
        (dict(unnorm_key="moon_dust"), "'moon_dust' is not in this checkpoint; it has: bridge_orig"),
        (dict(device="cuda:77"), "device 'cuda:77'"),
        ({"decode.max_text_tokens": 4096}, "lower decode.max_text_tokens"),
        ({"model.quantization": "fp8", "device": "cpu"}, "on a CPU choose w8a8"),
        ({"model.action_head": True, "decode.max_reasoning_tokens": 8}, "model.action_head gives no logits for text"),
    ],
)
def test_what_cannot_work_is_refused_in_configure(
    checkpoint: Path, parameters: dict, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with robot(**{"checkpoint": checkpoint, **parameters}, diagnostics_period_s=0.1) as r:
        r.until(lambda: r.user.count_publishers("/diagnostics"))
        assert r.policy.trigger_configure().name == "FAILURE"
        r.until(lambda: r.diagnostics and message in r.diagnosis("model").message)
        assert r.diagnosis("model").level == b"\x02"
        assert "Traceback" not in capfd.readouterr().err


def test_a_missing_library_is_named_with_what_to_install(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with robot(checkpoint, diagnostics_period_s=0.1) as r:
        monkeypatch.delitem(sys.modules, "specvla_ros.models.checkpoint", raising=False)
        monkeypatch.setitem(sys.modules, "torch", None)
        assert r.policy.trigger_configure().name == "FAILURE"
        monkeypatch.undo()
        r.until(lambda: r.diagnostics and "pip install -r requirements" in r.diagnosis("model").message)
        r.start()
