# SPDX-License-Identifier: Apache-2.0
"""Images and instructions in over DDS, actions out."""

import io
import json
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from PIL import Image as PilImage
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from support.checkpoints import write_checkpoint
from support.paths import ORACLES, needs
from support.patience import wait_until
from support.ros import LATCHED, Robot, rgb_image, robot, stamps

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.messages.image_message import rgb_from_image
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.observation import Observation
from specvla_ros.policy_parameters import PolicyParameters
from specvla_ros.ros.parameters import read_parameters
from specvla_ros.ros.policy import inputs
from specvla_ros.ros.policy import node as node_module
from specvla_ros.ros.policy.diagnostics import DropLedger
from specvla_ros.ros.policy.inputs import InstructionInput
from specvla_ros.ros.policy.node import PolicyNode
from specvla_ros.ros.policy.robot import ActionPublisher
from specvla_ros.ros.qos import DIAGNOSTICS
from specvla_ros.settings.parameter import values_of

INSTRUCTION = "put carrot on plate"
OWN_DATASET: dict[str, Any] = {
    "action.dt": 0.1,
    "action.reference": "delta",
    "action.frame": "tool",
    "action.rotation": "rotation_vector",
    "action.gripper": "none",
    "action.translation_unit": 1.0,
    "action.rotation_unit": 1.0,
}


def renamed(checkpoint: Path, directory: Path, dataset: str) -> Path:
    """The same checkpoint with its action statistics under another dataset's name."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    ((_, statistics),) = config["norm_stats"].items()
    (directory / "config.json").write_text(json.dumps(config | {"norm_stats": {dataset: statistics}}))
    return directory


def in_process(checkpoint: Path, image: np.ndarray, instruction: str) -> Action:
    action = Engine(load_target(checkpoint, device="cpu"), EngineSettings("ar")).act(Observation(image, instruction, 1))
    assert isinstance(action, Action)
    return action


def test_each_frame_is_answered_once_with_its_own_stamp(checkpoint: Path) -> None:
    chosen: dict[str, Any] = {"action.dt": 0.25, "base_frame": "panda_link0"}
    with robot(checkpoint, instruction=INSTRUCTION, **chosen) as r:
        r.start()
        images = []
        for seed in range(4):
            images.append(rgb_image(r.now_ns(), seed=seed))
            r.act(images[-1])
        r.until(lambda: len(r.stats) == 4)
        r.spin(0.2)

        assert stamps(r.actions) == stamps(images) == stamps(r.stats)
        assert [action.seq for action in r.actions] == [stats.seq for stats in r.stats] == [0, 1, 2, 3]
        for image, action, stats in zip(images, r.actions, r.stats, strict=True):
            expected = in_process(checkpoint, rgb_from_image(image), INSTRUCTION)
            assert tuple(action.tokens) == expected.tokens
            np.testing.assert_array_equal(action.values, expected.values)
            assert list(action.names) == list(expected.names)
            assert (action.instruction, action.horizon, action.action_dt) == (INSTRUCTION, 1, 0.25)
            assert (action.header.frame_id, stats.header.frame_id) == ("panda_link0", "camera")
            parts = action.receive_s + action.wait_s + action.vision_s + action.prefill_s + action.decode_s
            assert 0 < parts + action.publish_s <= action.latency_s + 1e-3
            assert (stats.mode, stats.forwards, stats.tau) == ("auto", 7, 1.0)
            assert len(stats.drop_reasons) == len(stats.drop_counts)
        assert r.drops() == {}


def test_no_stage_counts_what_another_has_counted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, topic, to_rgb = inputs._TRANSPORTS["raw"]

    def slowly(message: Image) -> np.ndarray:
        time.sleep(0.05)  # as a large JPEG on a slow core
        return to_rgb(message)

    monkeypatch.setitem(inputs._TRANSPORTS, "raw", (kind, topic, slowly))
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        action = r.act(rgb_image(r.now_ns()))
    assert action.wait_s > 0.05
    parts = action.receive_s + action.wait_s + action.vision_s + action.prefill_s + action.decode_s + action.publish_s
    assert parts <= action.latency_s + 1e-3


@pytest.mark.parametrize("latched", [False, True])
def test_an_instruction_reaches_the_policy_from_any_publisher(checkpoint: Path, latched: bool) -> None:
    with robot(checkpoint) as r:
        r.start()
        r.instruct("flip pot", latched=latched)
        assert r.act(rgb_image(r.now_ns())).instruction == "flip pot"


def test_a_latched_instruction_from_before_the_policy_is_heard(checkpoint: Path) -> None:
    with robot(checkpoint) as r:
        r.user.create_publisher(String, "instruction", LATCHED).publish(String(data="turn lever"))
        r.spin(0.2)
        r.start()
        r.until(lambda: r.policy.parts[""].instruction.text)
        assert r.act(rgb_image(r.now_ns())).instruction == "turn lever"


def test_a_new_instruction_begins_an_epoch_and_the_same_again_does_not(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        first = r.act(rgb_image(r.now_ns()))
        r.instruct(INSTRUCTION)
        same = r.act(rgb_image(r.now_ns()))
        r.instruct("flip pot")
        other = r.act(rgb_image(r.now_ns()))
        assert first.epoch == same.epoch < other.epoch
        assert other.instruction == "flip pot"


def test_a_frame_that_comes_raw_and_compressed_is_answered_once(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        compressed = r.user.create_publisher(CompressedImage, "image/compressed", 1)
        r.start()
        r.until(compressed.get_subscription_count)
        image = rgb_image(r.now_ns())
        buffer = io.BytesIO()
        PilImage.fromarray(rgb_from_image(image)).save(buffer, "PNG")
        twin = CompressedImage(header=image.header, format="png", data=buffer.getvalue())
        compressed.publish(twin)
        r.act(image)
        r.images.publish(image)
        r.spin(0.3)
        assert len(r.actions) == 1

        alone = CompressedImage(header=rgb_image(r.now_ns()).header, format="png", data=buffer.getvalue())
        compressed.publish(alone)
        r.until(lambda: len(r.actions) == 2)
        assert list(r.actions[0].tokens) == list(r.actions[1].tokens)


def test_nothing_is_published_unless_active(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        r.act(rgb_image(r.now_ns()))
        assert r.policy.trigger_deactivate().name == "SUCCESS"
        r.images.publish(rgb_image(r.now_ns()))
        r.spin(0.3)
        assert len(r.actions) == 1
        r.activate()
        again = r.act(rgb_image(r.now_ns()))
        assert again.seq == 0
        assert r.policy.trigger_deactivate().name == "SUCCESS"
        assert r.policy.trigger_cleanup().name == "SUCCESS"


def test_each_of_two_policies_has_diagnostics_of_its_own() -> None:
    rclpy.init()
    executor = SingleThreadedExecutor()
    policies = [
        PolicyNode(namespace=name, parameter_overrides=[Parameter("diagnostics_period_s", value=0.1)])
        for name in ("left/arm", "right/arm")
    ]
    listener = rclpy.create_node("listener", enable_rosout=False)
    seen: dict[str, str] = {}

    def listen(message: DiagnosticArray) -> None:
        seen.update({status.name: status.hardware_id for status in message.status})

    listener.create_subscription(DiagnosticArray, "/diagnostics", listen, DIAGNOSTICS)
    for node in (*policies, listener):
        executor.add_node(node)
    try:
        wait_until(lambda: len(seen) >= 6, meanwhile=lambda: executor.spin_once(timeout_sec=0.05), failed=seen)
    finally:
        assert all(policy.close() for policy in policies)
        executor.shutdown()
        for node in (*policies, listener):
            node.destroy_node()
        rclpy.try_shutdown()
    assert seen == {
        f"{side}/arm/policy: {task}": f"/{side}/arm/policy"
        for side in ("left", "right")
        for task in ("model", "inputs", "inference")
    }


@needs(ORACLES)
def test_all_that_a_checkpoint_lacks_is_said_before_it_is_loaded() -> None:
    lacking = PolicyParameters(checkpoint=str(ORACLES / "openvla_tiny_a" / "checkpoint"))
    with pytest.raises(UserError) as refused:
        node_module.load_engine(lacking, time.time_ns, lambda *_: None)
    for words in ("tiny_nomask", "tokenizer.json is missing", "action.dt"):
        assert words in str(refused.value)
    with pytest.raises(UserError) as refused:  # with several robots, each says what its actions mean
        node_module.load_engine(replace(lacking, robots=("left", "right")), time.time_ns, lambda *_: None)
    assert "tokenizer.json is missing" in str(refused.value) and "action.dt" not in str(refused.value)


def test_other_callbacks_are_served_while_the_policy_loads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = node_module.load_engine

    def slowly(parameters, now_ns, progress):
        for step in range(10):
            progress("reading shard", step / 10)
            time.sleep(0.1)
        return load(parameters, now_ns, progress)

    monkeypatch.setattr(node_module, "load_engine", slowly)
    with robot(checkpoint, diagnostics_period_s=0.1) as r:
        r.until(lambda: r.user.count_publishers("/diagnostics"))
        r.start()

        def of_model() -> list[DiagnosticStatus]:
            return [each for array in r.diagnostics for each in array.status if each.name == "policy: model"]

        r.until(lambda: "warm_up_s" in {each.key for each in of_model()[-1].values})
        assert any("loading: reading shard (" in each.message for each in of_model())
        assert float({each.key: each.value for each in of_model()[-1].values}["warm_up_s"]) >= 0.0


def test_dynamic_parameters_change_within_bounds_and_others_not_at_all(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()

        def set_parameter(name: str, value: object) -> bool:
            return r.policy.set_parameters([Parameter(name, value=value)])[0].successful

        assert set_parameter("max_image_age_s", 0.5)
        r.images.publish(rgb_image(r.now_ns() - 700_000_000))
        r.until(lambda: r.drops() == {"stale": 1})
        assert set_parameter("max_image_age_s", 60.0)
        assert not set_parameter("action.dt", 0.1)
        assert not set_parameter("action.frame", "tool")
        assert r.act(rgb_image(r.now_ns() - 700_000_000)).action_dt == 0.2
        assert not set_parameter("max_image_age_s", -1.0)


@pytest.mark.parametrize(
    ("dataset", "chosen", "expected"),
    [
        ("bridge_orig", {}, (0.2, "delta", "base", "rpy", "open_high")),
        ("libero_goal_no_noops", {}, (0.05, "delta", "base", "rotation_vector", "open_high")),
        (
            "libero_goal_no_noops",
            {"action.gripper": "close_high"},
            (0.05, "delta", "base", "rotation_vector", "close_high"),
        ),
        ("my_robot", OWN_DATASET, (0.1, "delta", "tool", "rotation_vector", "none")),
    ],
)
def test_actions_say_what_the_training_data_meant(
    checkpoint: Path, tmp_path: Path, dataset: str, chosen: dict[str, Any], expected: tuple[object, ...]
) -> None:
    with robot(renamed(checkpoint, tmp_path / "policy", dataset), instruction=INSTRUCTION, **chosen) as r:
        r.start()
        action = r.act(rgb_image(r.now_ns()))
        said = (action.action_dt, action.reference, action.action_frame, action.rotation, action.gripper)
        assert (*said, action.unnorm_key, action.header.frame_id) == (*expected, dataset, "base_link")
        assert (action.mode, action.horizon, len(action.values)) == ("auto", 1, len(action.names))


def test_what_a_dataset_means_is_asked_for_where_nobody_knows_it(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = renamed(checkpoint, tmp_path / "policy", "my_robot")
    given = {name: value for name, value in OWN_DATASET.items() if name not in ("action.frame", "action.rotation")}
    with robot(policy, instruction=INSTRUCTION, **given) as r:
        assert r.policy.trigger_configure().name == "FAILURE"
    said = capfd.readouterr().err
    assert (
        "dataset 'my_robot'" in said
        and "set action.frame (base or tool; joints for joint positions), action.rotation (" in said
    )
    assert ", action.dt" not in said


def described(r: Robot, name: str) -> str:
    return str(r.policy.describe_parameter(name).description)


def test_every_parameter_is_described(checkpoint: Path) -> None:
    with robot(checkpoint) as r:
        names = [name for name in r.policy.get_parameters_by_prefix("") if name != "use_sim_time"]
        ours = [name for name in names if "qos_overrides" not in name and "type_description" not in name]
        assert len(ours) >= 13
        assert all(described(r, name) for name in ours), ours


def test_what_is_read_in_configure_changes_in_between_and_is_refused_otherwise(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", seed=12)
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        first = r.act(rgb_image(r.now_ns(), seed=3))
        for name, value in (("checkpoint", str(other)), ("draft.nodes", 8), ("model.action_head", True)):
            successful, reason = r.set(name, value)
            assert not successful
            assert "`ros2 lifecycle set /policy deactivate` and `ros2 lifecycle set /policy cleanup` first" in reason
        assert r.set("checkpoint", str(checkpoint))[0], "the same again is no change"
        assert r.policy.trigger_deactivate().name == "SUCCESS"
        successful, reason = r.set("checkpoint", str(other))
        assert not successful and ": `ros2 lifecycle set /policy cleanup` first" in reason
        assert r.policy.trigger_cleanup().name == "SUCCESS"
        assert r.set("checkpoint", str(tmp_path / "nowhere"))[0]
        assert r.policy.trigger_configure().name == "FAILURE"
        assert r.set("checkpoint", str(other))[0] and r.set("instruction", "flip pot")[0]
        r.start()
        second = r.act(rgb_image(r.now_ns(), seed=3))
        assert second.instruction == "flip pot" and list(second.tokens) != list(first.tokens)


# Another value of each parameter that may change while the node runs.
OTHERS: dict[str, object] = {
    "acceptance.rule": "bin_distance",
    "acceptance.bins": [2],
    "decode.mode": "pipeline",
    "decode.max_in_flight": 3,
    "decode.prefill_chunks": 2,
    "decode.in_order": True,
    "max_image_age_s": 33.0,
    "max_future_s": 0.25,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_set_while_the_policy_loads_is_applied_or_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load, answers = node_module.load_engine, []

    with robot(checkpoint, instruction=INSTRUCTION) as r:

        def load_meanwhile(parameters, now_ns, progress):
            wait_until(lambda: r.policy._thread is not None)
            answers.append(r.set(name, OTHERS[name]))
            engine = load(parameters, now_ns, progress)
            answers.append(r.set(name, OTHERS[name]))
            return engine

        monkeypatch.setattr(node_module, "load_engine", load_meanwhile)
        r.start()
        r.act(rgb_image(r.now_ns()))
        chosen = read_parameters(r.policy, PolicyParameters)
        thread = r.policy._thread
        assert thread is not None and thread._engine is not None
        assert thread._engine.settings == chosen.engine
        for successful, reason in answers:
            assert successful == (values_of(chosen)[name] != values_of(PolicyParameters())[name])
            assert successful or "is still being loaded; set this parameter again" in reason
        assert r.set(name, OTHERS[name])[0]


def test_a_mode_that_was_asked_for_is_no_fault() -> None:
    ledger = DropLedger()
    assert ledger.add(DropReason.MODE_CHANGED) is None
    assert ledger.add(DropReason.BAD_IMAGE, "") == "frame dropped as bad_image"
    assert ledger.take_recent().worst((DropReason.BAD_IMAGE,)) == "1 dropped as bad_image"


def test_an_empty_instruction_is_one_instruction(checkpoint: Path) -> None:
    """A latched one comes by both subscriptions."""
    with robot(checkpoint) as r:
        heard: list[str] = []
        inputs = InstructionInput(r.policy, heard.append)
        for text in ("", "", "lift", "lift", ""):
            inputs.set(text)
        inputs.destroy()
        assert heard == ["", "lift", ""]


def test_a_huge_instruction_is_not_given_back(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with robot(checkpoint, diagnostics_period_s=0.1) as r:
        r.start()
        r.instruct("lift the cube " * 20_000)
        r.until(lambda: r.diagnostics and "the limit is 1000" in r.diagnosis("inputs").message)
        said = r.diagnosis("inputs")
        assert len(said.message) + sum(len(pair.value) for pair in said.values) < 1000
    assert len(capfd.readouterr().err) < 10_000


def test_a_context_that_ends_in_the_middle_of_a_publication_is_no_fault(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        tried = threading.Event()

        def publish(*_: object) -> None:
            rclpy.shutdown()
            tried.set()
            raise RuntimeError("publisher's context is invalid")

        faults: list[str] = []
        monkeypatch.setattr(ActionPublisher, "publish", publish)
        assert r.policy._thread is not None
        monkeypatch.setattr(r.policy._thread, "_on_fault", faults.append)
        r.images.publish(rgb_image(r.now_ns()))
        with suppress(ExternalShutdownException):
            r.until(tried.is_set)
        assert r.policy.close()
        assert tried.is_set() and faults == []
