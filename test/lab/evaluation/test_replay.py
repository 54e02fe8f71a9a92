# SPDX-License-Identifier: Apache-2.0
"""Bags in, actions out: every frame is accounted for, and the same each time."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import bags
from support.paths import BAGS, needs
from support.replays import Run, drops_of

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.bags.recorder import ACTION_TOPIC, DECODE_STATS_TOPIC
from specvla_ros.lab.evaluation.replay_page import Pictures
from specvla_ros.lab.evaluation.replay_summary import FrameRecord
from specvla_ros.lab.evaluation.rerun_recording import RerunSettings
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation

# Whole replays


@needs(BAGS)
@pytest.mark.parametrize("name", ["bridge_carrot_on_plate_00", "bridge_carrot_on_plate_01", "bridge_turn_lever_03"])
def test_a_real_bag_gives_one_action_per_frame(policy: OpenVLATarget, run: Run, name: str) -> None:
    summary, frames, out = run(BAGS / name)
    assert (summary.frames, summary.actions, summary.compared, summary.failures) == (10, 10, 10, ())
    with open_bag(BAGS / name) as bag:
        recorded = [message.message().data for message in bag.messages(["/ground_truth/action"])]
        instruction = next(bag.messages(["/instruction"])).message().data
    for frame, wanted in zip(frames, recorded, strict=True):
        assert (frame["instruction"], frame["epoch"]) == (instruction, 1)
        assert frame["recorded"] == wanted.tolist()
        assert np.allclose(np.array(frame["values"]) - frame["recorded"], frame["error"], atol=0, rtol=1e-12)
    stamps = [frame["stamp_ns"] for frame in frames]
    assert np.diff(stamps).tolist() == [200_000_000] * 9
    assert policy.codec.decode(frames[0]["tokens"])[0].tolist() == frames[0]["values"]
    assert summary.mean_abs_error["x"] == pytest.approx(np.mean([abs(frame["error"][0]) for frame in frames]))
    with open_bag(out / "actions_bag") as bag:
        messages = [message.message() for message in bag.messages([ACTION_TOPIC])]
        assert bag.topic(DECODE_STATS_TOPIC).count == 10
    assert [message.values.tolist() for message in messages] == [frame["values"] for frame in frames]
    assert [message.header.stamp.sec * 10**9 + message.header.stamp.nanosec for message in messages] == stamps


@needs(BAGS)
def test_two_replays_give_the_same_tokens_and_values(run: Run) -> None:
    first, second = (run(BAGS / "bridge_flip_pot_00")[1] for _ in range(2))
    assert [(frame["tokens"], frame["values"]) for frame in first] == [
        (frame["tokens"], frame["values"]) for frame in second
    ]
    assert len({tuple(frame["tokens"]) for frame in first}) > 1, "a policy that ignores its images proves nothing"


def test_a_replay_is_recorded_for_rerun_beside_its_report(run: Run, tmp_path: Path) -> None:
    chunks = pytest.importorskip("rerun.chunk", reason="pip install -r requirements/rerun.txt")
    out = tmp_path / "run.rrd"
    _, frames, directory = run(bags.episode(3), shown=RerunSettings(out=str(out)))
    rows: dict[str, int] = {}
    for chunk in chunks.RrdReader(str(out)).stream():
        rows[str(chunk.entity_path)] = rows.get(str(chunk.entity_path), 0) + chunk.num_rows
    assert rows["/camera"] == rows["/action/x"] == rows["/decoding/tau"] == rows["/latency/latency_s"] == len(frames)
    assert "<code>rerun run.rrd</code>" in (directory / "report.html").read_text()


def test_a_viewer_that_is_not_there_costs_no_results(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rerun", reason="pip install -r requirements/rerun.txt")
    summary, *_ = run(bags.episode(1), shown=RerunSettings(viewer="rerun+http://127.0.0.1:9/proxy"))
    assert summary.actions == 1 and not summary.failures
    assert "the Rerun output is incomplete" in capsys.readouterr().err


def test_a_replay_gives_what_the_engine_gives(policy: OpenVLATarget, run: Run) -> None:
    _, frames, _ = run(bags.episode(3))
    engine = Engine(policy, EngineSettings("ar"))
    for index, frame in enumerate(frames):
        stamp = bags.START_NS + index * bags.PERIOD_NS
        outcome = engine.act(Observation(bags.pixels(index), "put carrot on plate", stamp))
        assert isinstance(outcome, Action)
        assert (frame["tokens"], frame["values"]) == (list(outcome.tokens), outcome.values.tolist())


def test_raw_and_compressed_images_in_either_storage_give_the_same_actions(run: Run, tmp_path: Path) -> None:
    raw = bags.episode(2)
    compressed = [
        ("/camera/image_raw/compressed", bags.COMPRESSED, time, bags.compressed_image(time, seed=index))
        for index, (_, _, time, _) in enumerate(entry for entry in raw if entry[1] == bags.IMAGE)
    ]
    _, want, _ = run(raw)
    _, found, _ = run(bags.write_bag(tmp_path / "sqlite", [raw[0], *compressed], sqlite=True))
    assert [frame["tokens"] for frame in found] == [frame["tokens"] for frame in want]


def test_what_is_written_says_what_was_run(run: Run, policy: OpenVLATarget) -> None:
    summary, frames, out = run(bags.episode(4), action=ConventionSettings(dt=0.1))
    written = json.loads((out / "summary.json").read_text())
    assert written == json.loads(json.dumps(summary.as_json()))
    assert set(written["latency_s"]) == {"total", "wait", "vision", "prefill", "decode"}
    assert written["latency_s"]["total"]["max"] == max(frame["total_s"] for frame in frames)
    assert "without transport" in written["latency_interval"]
    assert written["action_rate_hz"] == pytest.approx(4 / sum(frame["total_s"] for frame in frames))
    assert re.fullmatch("[0-9a-f]{64}", *written["bag"]["sha256"].values())
    assert written["policy"]["checkpoint"] == str(policy.directory)
    assert written["settings"]["mode"] == "ar"
    assert written["hardware"]["cpu"]
    assert frames[0]["decode"]["tokens_per_forward"] == [1] * 7
    assert 0 < sum(frames[0]["timings"].values()) <= frames[0]["total_s"]
    with open_bag(out / "actions_bag") as bag:
        assert {message.message().action_dt for message in bag.messages([ACTION_TOPIC])} == {0.1}


def test_the_report_is_one_file_that_needs_no_network(run: Run) -> None:
    entries = bags.episode(4)
    entries[1] = ("/camera/image_raw", bags.IMAGE, bags.START_NS, bags.image(bags.START_NS, encoding="<i>odd</i>"))
    _, _, out = run(entries)
    html = (out / "report.html").read_text()
    body = html[html.index("<body>") :]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", html)
    assert "Plotly.newPlot" in body
    assert "dropped: bad_image" in body
    assert "&lt;i&gt;odd&lt;/i&gt;" in body
    assert "<i>odd" not in body
    for name in ("x [m]", "yaw [rad]", "gripper", "decoded", "recorded", "prefill"):
        assert name in body


def test_the_report_shows_the_pictures_beside_the_actions(run: Run, tmp_path: Path) -> None:
    entries = bags.episode(4)
    entries[3] = (*entries[3][:3], bags.image(entries[3][2], height=0))
    entries[0] = ("/instruction", bags.TEXT, bags.START_NS, bags.text("</script><script>alert(1)"))
    _, frames, out = run(entries)
    html = (out / "report.html").read_text()
    assert "Images of 4 of 4 frames" in html
    assert "</script><script>alert" not in html
    shown = json.loads(re.findall("<script id=frames type='application/json'>(.*?)</script>", html)[0])
    assert [each["frame"] for each in shown] == [0, 1, 2, 3]
    assert [each["drop"] for each in shown] == drops_of(frames) == [None, "bad_image", None, None]
    assert shown[2]["values"] == frames[2]["values"] and shown[2]["recorded"] == frames[2]["recorded"]
    assert shown[2]["instruction"] == "</script><script>alert(1)" and shown[2]["time"] == pytest.approx(0.4)
    assert shown[1]["image"] is None
    picture = Image.open(io.BytesIO(base64.b64decode(shown[3]["image"])))
    assert picture.size == (64, 48) and picture.format == "JPEG"
    assert abs(np.asarray(picture).astype(float).mean() - bags.pixels(3).mean()) < 5


def test_a_long_bag_is_shown_by_some_of_its_pictures() -> None:
    pictures = Pictures(1234, start_ns=0)
    for index in range(1234):
        pictures.add(FrameRecord(index, index, None, None, 0, "", 0.0, None, None), np.zeros((480, 640, 3), np.uint8))
    assert 200 < len(pictures.shown) <= 300
    steps = np.diff([each["frame"] for each in pictures.shown])
    assert set(steps) == {5}
    assert Image.open(io.BytesIO(base64.b64decode(pictures.shown[-1]["image"]))).size == (240, 180)


# Frames


def test_the_recorded_action_is_the_first_from_the_image_on_and_before_the_next_one(run: Run) -> None:
    start, period = bags.START_NS, bags.PERIOD_NS
    first, late, simultaneous = ([value] * 7 for value in (0.01, 0.02, 0.03))

    def action(time_ns: int, values: list[float]) -> bags.Entry:
        return ("/ground_truth/action", bags.NUMBERS, time_ns, bags.numbers(values))

    images = [entry for entry in bags.episode(4, actions=False) if entry[1] == bags.IMAGE]
    entries = [
        ("/instruction", bags.TEXT, start, bags.text("go")),
        action(start - 1, [9.0] * 7),  # before any image
        action(start + 5, first),
        action(start + 6, [9.0] * 7),
        action(start + 2 * period - 1, late),
        action(start + 2 * period, simultaneous),
        *images,
    ]
    _, frames, _ = run(entries)
    wanted = [first, late, simultaneous, None]
    found = [frame["recorded"] for frame in frames]
    assert [each and each[0] for each in found] == pytest.approx([each and each[0] for each in wanted])


@pytest.mark.parametrize("values", [[0.0] * 6, [float("nan")] * 7])
def test_a_recorded_action_that_cannot_be_compared_is_kept_but_not_counted(run: Run, values: list[float]) -> None:
    entries = bags.episode(2, actions=False)
    entries.append(("/ground_truth/action", bags.NUMBERS, bags.START_NS + 1, bags.numbers(values)))
    summary, frames, _ = run(entries)
    assert (summary.actions, summary.compared, summary.mean_abs_error) == (2, 0, {})
    assert frames[0]["recorded"] == [None if np.isnan(value) else value for value in values]
    assert "error" not in frames[0]


def test_bin_distance_is_zero_for_the_action_itself(run: Run) -> None:
    _, frames, _ = run(bags.episode(1))
    entries = [entry for entry in bags.episode(1) if entry[1] != bags.NUMBERS]
    entries.append(("/ground_truth/action", bags.NUMBERS, bags.START_NS, bags.numbers(frames[0]["values"])))
    _, (again,), _ = run(entries)
    assert again["bin_distance"] == [0] * 7
    assert np.abs(again["error"]).max() < 1e-6


def test_a_new_instruction_begins_an_epoch_and_the_same_one_does_not(run: Run) -> None:
    entries = bags.episode(5, actions=False)
    at = [bags.START_NS + index * bags.PERIOD_NS for index in range(5)]
    entries += [
        ("/instruction", bags.TEXT, at[1] + 1, bags.text("put carrot on plate")),
        ("/instruction", bags.TEXT, at[2] + 1, bags.text("turn lever")),
        ("/instruction", bags.TEXT, at[4], bags.text("flip pot")),
    ]
    _, frames, _ = run(entries)
    assert [frame["epoch"] for frame in frames] == [1, 1, 1, 2, 3]
    assert [frame["instruction"] for frame in frames][2:] == ["put carrot on plate", "turn lever", "flip pot"]


def test_an_instruction_given_by_the_user_overrides_the_bag(run: Run) -> None:
    _, frames, _ = run(bags.episode(2, instruction="put carrot on plate"), topics=TopicChoice(instruction="flip pot"))
    assert {(frame["instruction"], frame["epoch"]) for frame in frames} == {("flip pot", 1)}


def test_a_camera_named_by_its_raw_topic_is_read_compressed_and_the_user_told(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [entry for entry in bags.episode(2) if entry[1] != bags.IMAGE]
    image = bags.compressed_image(bags.START_NS)
    entries.append(("/camera/image_raw/compressed", bags.COMPRESSED, bags.START_NS, image))
    summary, (frame,), _ = run(entries, topics=TopicChoice(image_topic="/camera/image_raw"))
    assert frame["tokens"]
    assert summary.context["bag"]["image_topic"] == "/camera/image_raw/compressed"
    assert "holds /camera/image_raw only compressed: reading /camera/image_raw/compressed" in capsys.readouterr().err


def test_grey_images_are_answered_with_a_note(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(bags.episode(1))
    assert "grey" not in capsys.readouterr().err
    grey = bags.image(bags.START_NS, encoding="mono8", step=64, data=bags.pixels(0)[..., 0].reshape(-1))
    summary, _, _ = run([*bags.episode(1)[:1], ("/camera/image_raw", bags.IMAGE, bags.START_NS, grey)])
    assert summary.actions == 1
    assert "the images of /camera/image_raw are grey" in capsys.readouterr().err


def test_bad_frames_are_dropped_with_their_reason_and_the_others_answered(run: Run) -> None:
    start, period = bags.START_NS, bags.PERIOD_NS
    good = bags.image(start)
    images = [
        good,
        bags.image(start + period, encoding="32FC1"),
        bags.image(start + period, height=0),
        bags.image(start + period, step=10),
        bags.image(0),
        bags.image(start),  # the first one's stamp again
        bags.image(start + 6 * period),
        bags.image(start + 7 * period),
    ]
    entries: list[bags.Entry] = [
        ("/camera/image_raw", bags.IMAGE, start + index * period, image) for index, image in enumerate(images)
    ]
    entries.insert(0, ("/instruction", bags.TEXT, start + 1, bags.text("go")))  # behind the first image
    entries.append(("/instruction", bags.TEXT, start + 7 * period, bags.text("word " * 2000)))
    summary, frames, out = run(entries)
    assert drops_of(frames) == [
        "no_instruction",
        "bad_image",
        "bad_image",
        "bad_image",
        "bad_stamp",
        None,
        None,
        "bad_instruction",
    ]
    assert "encoding '32FC1' is a depth image's" in frames[1]["drop"]["detail"]
    assert (summary.actions, summary.drops["bad_image"], summary.failures) == (2, 3, ())
    assert [frame["seq"] for frame in frames if frame["seq"] is not None] == [0, 1]
    with open_bag(out / "actions_bag") as bag:
        *_, stats = [message.message() for message in bag.messages([DECODE_STATS_TOPIC])]
    assert dict(zip(stats.drop_reasons, stats.drop_counts.tolist(), strict=True))["bad_image"] == 3


def test_a_stamp_that_goes_back_is_dropped(run: Run) -> None:
    start, period = bags.START_NS, bags.PERIOD_NS
    entries: list[bags.Entry] = [("/instruction", bags.TEXT, start, bags.text("go"))]
    for place, stamp in enumerate((start, start + 2 * period, start + period, start + 2 * period, start + 3 * period)):
        entries.append(("/camera/image_raw", bags.IMAGE, start + place * period, bags.image(stamp)))
    _, frames, _ = run(entries)
    assert drops_of(frames) == [None, None, "out_of_order", "out_of_order", None]


# Failures, with nothing lost


def test_a_bag_of_unsupported_images_fails(run: Run) -> None:
    entries = [
        (topic, kind, time, bags.image(time, encoding="32FC1") if kind == bags.IMAGE else message)
        for topic, kind, time, message in bags.episode(3)
    ]
    summary, frames, out = run(entries)
    assert drops_of(frames) == ["bad_image"] * 3
    assert summary.failures == (summary.failures[0],)
    assert "none of 3 frames produced an action: 3 bad_image" in summary.failures[0]
    assert "32FC1" in summary.failures[0]
    assert (out / "report.html").exists()
