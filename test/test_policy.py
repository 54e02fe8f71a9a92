# SPDX-License-Identifier: Apache-2.0
"""The public face: a policy without ROS."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.draft_heads import policy_with_random_head
from support.patience import PATIENCE_S
from support.pipelines import frame, plain_tokens

import specvla_ros
from specvla_ros import Policy, UserError
from specvla_ros.engine.outcome import DropReason
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.policy import NoActionError

ASKED = "put carrot on plate"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    policy_with_random_head(path, seed=9, hidden_size=64, layers=2)
    return path


def pictures(n: int) -> list[np.ndarray]:
    return [frame(1, picture).cameras[ONLY_CAMERA] for picture in range(n)]


@pytest.mark.parametrize("mode", ["ar", "spec", "pipeline", "specpipe"])
def test_every_mode_acts_as_the_plain_decoder(directory: Path, mode: str) -> None:
    policy = Policy.load(directory, mode=mode, device="cpu", draft_nodes=8, draft_top_k=3, draft_depth=3)
    expected = plain_tokens(policy.engine.target)
    for picture, image in enumerate(pictures(3)):
        action = policy.act(image, ASKED)
        assert action.tokens == expected(picture)
        assert action.actions.shape == (1, 7) and np.array_equal(action.actions[0], action.values)
    assert policy.action_names == ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
    assert policy.describe()["decode.mode"] == mode


def test_an_action_is_shown_without_its_picture_and_a_state_that_nobody_reads_is_refused(directory: Path) -> None:
    policy = Policy.load(directory, device="cpu")
    assert "array([[[" not in repr(policy.act(pictures(1)[0], ASKED))
    with pytest.raises(UserError, match="does not read the robot's state: omit state"):
        policy.act(pictures(1)[0], ASKED, state=[0.1, 0.2])


@pytest.mark.parametrize(
    ("image", "given", "text"),
    [
        (None, {"stamp_ns": "1"}, "stamp_ns must be a whole number of nanoseconds, got '1'"),
        (None, {"stamp_ns": float("inf")}, "stamp_ns must be a whole number of nanoseconds, got inf"),
        (None, {"stamp_ns": True}, "stamp_ns must be a whole number of nanoseconds, got True"),
        (None, {"stamp_ns": -5}, "greater than 0, got -5"),
        (torch.zeros(8, 8, 3, dtype=torch.bfloat16), {}, r"uint8 \[height, width, 3\], got a tensor of torch.bfloat16"),
        ({3: np.zeros((8, 8, 3), np.uint8)}, {}, "by camera name, a string, got 3"),
    ],
)
def test_a_refused_call_leaves_the_policy_as_it_was(
    directory: Path, image: Any, given: dict[str, Any], text: str
) -> None:
    policy, seen = Policy.load(directory, device="cpu"), pictures(1)[0]
    expected = policy.act(seen, ASKED).tokens
    with pytest.raises(UserError, match=text):
        policy.act(seen if image is None else image, ASKED, **given)
    assert policy.act(seen, ASKED).tokens == expected
    assert policy.act(seen, ASKED, stamp_ns=np.int64(2**62)).tokens == expected


def test_a_state_of_uneven_parts_and_a_file_that_is_no_path_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="params_file must be a path, got int"):
        Policy.load(directory, device="cpu", params_file=5)  # type: ignore[arg-type]
    policy = Policy.load(directory, device="cpu")
    monkeypatch.setattr(type(policy.engine.target), "state_dims", 3)
    with pytest.raises(UserError, match="parts have different lengths"):
        policy.act(pictures(1)[0], ASKED, state=[[1.0], [1.0, 2.0]])
    seen = Observation(pictures(1)[0], ASKED, 1, state=np.array([0.0, np.nan, 1.0]))
    with pytest.raises(UserError, match=r"got shape \[3\], float64, of which nan is not finite"):
        seen.state_of(3)


def test_a_state_that_the_policy_cannot_read_is_refused_in_a_stream_too() -> None:
    policy = Policy.load(nano_policy().with_name("wrist"), device="cpu")
    task = "lift the red cube"
    images = dict.fromkeys(policy.engine.target.cameras, pictures(1)[0])
    with policy.stream() as stream:
        for state in (None, [0.0] * 8, [float("nan")] * 9):
            with pytest.raises(UserError, match="the policy reads the robot's state, 9 finite numbers"):
                stream.put(images, task, state=state)
        stream.put(images, task, state=[0.0] * 9)
        stream.finish()
        assert len([*stream]) == 1 and not stream.drops


def test_a_callers_autocast_changes_no_answer(directory: Path) -> None:
    image = pictures(1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy = Policy.load(directory, device="cpu")
        tokens = policy.act(image, ASKED).tokens
    assert policy.act(image, ASKED).tokens == tokens


@pytest.mark.parametrize("mode", ["ar", "specpipe"])
def test_a_stream_gives_each_frames_own_action_in_order(directory: Path, mode: str) -> None:
    policy = Policy.load(directory, mode=mode, device="cpu", draft_nodes=8, draft_top_k=3, draft_depth=3, in_order=True)
    expected, shown = plain_tokens(policy.engine.target), pictures(5)
    with policy.stream() as stream:
        with pytest.raises(UserError, match="a stream of this policy is open"):
            policy.act(shown[0], ASKED)
        actions = []
        for stamp, image in enumerate(shown, 1):
            while policy.engine.mailbox.waiting:  # else the next frame would take its place
                if (action := stream.get(0.01)) is not None:
                    actions.append(action)
            stream.put(image, ASKED, stamp_ns=stamp)
        stream.finish()
        actions += list(stream)
    stamps = [action.observation.stamp_ns for action in actions]
    assert stamps == sorted(stamps) and len(stamps) + sum(stream.drops.values()) == len(shown)
    assert stamps == [1, 2, 3, 4, 5]
    assert [action.tokens for action in actions] == [expected(stamp - 1) for stamp in stamps]
    assert policy.act(shown[0], ASKED).tokens == expected(0)


@pytest.mark.parametrize("named", [False, True])
def test_a_frame_that_waits_keeps_its_pixels_though_the_camera_reuses_its_buffer(
    directory: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    policy = Policy.load(directory, mode="ar", device="cpu")
    expected = plain_tokens(policy.engine.target)
    for _ in range(8):  # then the engine knows how long an answer takes, and a waiting image is prepared late
        policy.act(pictures(1)[0], ASKED)
    begun, may_go_on, tick = threading.Event(), threading.Event(), policy.engine.tick

    def first_tick_and_then_wait() -> Any:
        ended = tick()
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return ended

    monkeypatch.setattr(policy.engine, "tick", first_tick_and_then_wait)
    buffer = np.empty_like(pictures(1)[0])
    with policy.stream() as stream:
        for picture, image in enumerate(pictures(2)):
            buffer[:] = image
            stream.put({ONLY_CAMERA: buffer} if named else buffer, ASKED)
            assert picture or begun.wait(PATIENCE_S)
        buffer[:] = 0
        may_go_on.set()
        stream.finish()
        assert [action.tokens for action in stream] == [expected(0), expected(1)]


def test_a_stream_says_what_it_dropped_and_ends_when_it_is_closed(directory: Path) -> None:
    policy = Policy.load(directory, device="cpu")
    with policy.stream() as stream:
        stream.put(pictures(1)[0], "")
        stream.finish()
        assert list(stream) == [] and stream.get() is None
        with pytest.raises(UserError, match="accepts no more frames"):
            stream.put(pictures(1)[0], ASKED)
    assert stream.closed and stream.drops == {DropReason.BAD_INSTRUCTION: 1}


def test_a_frame_without_an_action_raises_with_the_reason(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.load(directory, device="cpu")
    monkeypatch.setattr(type(policy.engine.target.codec), "problem", lambda *_: "token 5 is not an action token")
    with pytest.raises(NoActionError, match="not_an_action: token 5 is not an action token"):
        policy.act(pictures(1)[0], ASKED)


def test_bad_input_is_told_before_anything_is_decoded(directory: Path) -> None:
    policy = Policy.load(directory, device="cpu")
    with pytest.raises(UserError, match="the instruction is empty"):
        policy.act(pictures(1)[0], " ")
    with pytest.raises(UserError, match="uint8 RGB image"):
        policy.act(np.zeros((8, 8), np.uint8), ASKED)
    for wrong, remedy in (
        (np.zeros((8, 8, 3)), r"float64 \[8, 8, 3\]; multiply it by 255 if its values are from 0 to 1, and convert it"),
        (np.zeros((3, 8, 8), np.uint8), r"\[3, 8, 8\]; move its channels to the end, as image.transpose\(1, 2, 0\)"),
        (np.zeros((8, 8, 4), np.uint8), r"\[8, 8, 4\]; drop its fourth channel, as image\[:, :, :3\] does"),
    ):
        with pytest.raises(UserError, match=remedy):
            policy.act(wrong, ASKED)
    with pytest.raises(UserError, match="needs images of the cameras image, but got wrist"):
        policy.act({"wrist": pictures(1)[0]}, ASKED)
    assert policy.act({"image": pictures(1)[0]}, ASKED).tokens == policy.act(pictures(1)[0], ASKED).tokens
    with pytest.raises(UserError, match="needs images of the cameras image, but got left, right"):
        policy.engine.target.prompt_layout(
            frame(1, 0).__class__({"left": pictures(1)[0], "right": pictures(1)[0]}, ASKED, 1)
        )
    with pytest.raises(UserError, match=r"download it first: hf download openvla/openvla-7b --local-dir openvla-7b"):
        Policy.load("openvla/openvla-7b")
    with pytest.raises(UserError, match=r"decode.mode"):
        Policy.load(directory, mode="psychic")
    with pytest.raises(UserError, match="invalid tolerance"):
        Policy.load(directory, tolerance="2 miles")
    with pytest.raises(UserError, match="there is no parameter 'draft_leaves'"):
        Policy.load(directory, draft_leaves=3)


def test_threads_take_turns(directory: Path) -> None:
    policy = Policy.load(directory, mode="specpipe", device="cpu", draft_nodes=8, draft_top_k=3, draft_depth=3)
    expected = plain_tokens(policy.engine.target)
    shown = pictures(4)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            actions = threads.map(lambda image: policy.act(image, ASKED), shown)
            assert [action.tokens for action in actions] == [expected(picture) for picture in range(4)]


@pytest.mark.parametrize("image", [None, [1, 2], b"bytes", 3, np.zeros((4, 4, 3))])
def test_an_image_of_another_kind_is_refused_in_words(directory: Path, image: Any) -> None:
    policy = Policy.load(directory, device="cpu")
    with pytest.raises(UserError, match=r"an image must be|uint8 RGB image"):
        policy.act(image, ASKED)


@pytest.mark.parametrize("instruction", [None, b"bytes", ["words"], 3])
def test_an_instruction_of_another_kind_is_refused_in_words(directory: Path, instruction: Any) -> None:
    policy = Policy.load(directory, device="cpu")
    with pytest.raises(UserError, match="an instruction must be a string"):
        policy.act(pictures(1)[0], instruction)


def test_arguments_of_another_kind_are_refused_in_words(directory: Path) -> None:
    with pytest.raises(UserError, match="a tolerance must be a string, got 5"):
        Policy.load(directory, tolerance=5, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a checkpoint must be given as a directory path, got NoneType"):
        Policy.load(None, device="cpu")  # type: ignore[arg-type]


def test_the_tolerance_of_the_bundled_policy_is_bounded() -> None:
    policy = Policy.load(nano_policy(), mode="spec", tolerance="5mm,3deg", device="cpu")
    assert policy.engine.settings.acceptance.rule == "bin_distance"
    codec, rule = policy.engine.target.codec, policy.engine.verifier.rule
    bound = codec.bound(rule.bins)[0]  # type: ignore[attr-defined]
    assert (bound[:3] <= 5e-3 + 1e-9).all() and (bound[3:6] <= np.radians(3) + 1e-9).all() and bound[6] == 0


def test_importing_the_package_costs_no_torch() -> None:
    code = "import sys, specvla_ros; assert 'Policy' in dir(specvla_ros); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Pilot'"):
        specvla_ros.Pilot  # noqa: B018


def test_loading_leaves_a_core_to_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the commands and the node: threads of torch that share a core slow each other a hundredfold."""
    left: list[bool] = []
    monkeypatch.setattr("specvla_ros.policy.leave_a_core", lambda: left.append(True))
    Policy.load(directory, mode="ar", device="cpu")
    assert left == [True]
