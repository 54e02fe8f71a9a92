# SPDX-License-Identifier: Apache-2.0
"""Topics of H.264 and H.265 packets are read like images, and a lost packet never gives a wrong one."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from rosbags.typesys import get_types_from_msg
from support import bags

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import TopicChoice, bag_frames, choose_topics, rgb_from_message
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.messages.image_message import stamp_ns

FOXGLOVE, FFMPEG = "foxglove_msgs/msg/CompressedVideo", "ffmpeg_image_transport_msgs/msg/FFMPEGPacket"
DEFINITIONS = {
    FOXGLOVE: "builtin_interfaces/Time timestamp\nstring frame_id\nuint8[] data\nstring format\n",
    FFMPEG: "std_msgs/Header header\nint32 width\nint32 height\nstring encoding\nuint64 pts\nuint8 flags\n"
    "bool is_bigendian\nuint8[] data\n",
}
for name, text in DEFINITIONS.items():
    bags.STORE.register(get_types_from_msg(text, name))
LENGTH, GROUP = 30, 10  # frames, and those from keyframe to keyframe
CODECS = ("h264", "hevc")
BOTH = ("foxglove", "ffmpeg")


def scene(i: int) -> np.ndarray:
    rows, columns = np.mgrid[:48, :64]
    pixels = np.stack([rows * 3 + i * 5, columns * 3, rows + columns + i * 7], axis=2).astype(np.uint8)
    pixels[10:20, i * 3 % 50 : i * 3 % 50 + 8] = 255
    return pixels


@cache
def stream(codec: str, b_frames: int = 0, **more: str) -> tuple[tuple[bytes, int], ...]:
    """Packets in decoding order, with the index of the image in each."""
    context: Any = av.CodecContext.create({"h264": "libx264", "hevc": "libx265"}[codec], "w")
    context.width, context.height, context.pix_fmt, context.time_base = 64, 48, "yuv420p", Fraction(1, 10)
    context.options = (
        {"g": str(GROUP), "bf": str(b_frames), "sc_threshold": "0"}
        | ({} if b_frames else {"tune": "zerolatency"})
        | more
    )
    if codec == "hevc":
        context.options |= {
            "x265-params": f"keyint={GROUP}:scenecut=0:bframes={b_frames}:repeat-headers=1:log-level=none"
        }
    packets = []
    for i in range(LENGTH):
        frame = av.VideoFrame.from_ndarray(scene(i), format="rgb24")
        frame.pts, frame.time_base = i, Fraction(1, 10)
        packets += context.encode(frame)
    return tuple((bytes(packet), packet.pts) for packet in [*packets, *context.encode(None)])


@cache
def wanted(codec: str, b_frames: int = 0) -> dict[int, np.ndarray]:
    """The decoded images of the whole stream."""
    context: Any = av.CodecContext.create(codec, "r")
    frames = []
    for data, pts in stream(codec, b_frames):
        packet = av.Packet(data)
        packet.pts = pts
        frames += context.decode(packet)
    return {frame.pts: frame.to_ndarray(format="rgb24") for frame in [*frames, *context.decode(None)]}


def entries(packets: Sequence[tuple[bytes, int]], codec: str, kind: str) -> list[bags.Entry]:
    """A message per packet, recorded 3 ms apart from its stamp."""
    found: list[bags.Entry] = [("/instruction", bags.TEXT, bags.START_NS, bags.text("stack"))]
    for order, (data, i) in enumerate(packets):
        stamp, coded = bags.START_NS + i * bags.PERIOD_NS, np.frombuffer(data, np.uint8)
        if kind == "foxglove":
            time = bags.header(stamp).stamp
            message = bags.TYPES[FOXGLOVE](timestamp=time, frame_id="optical", data=coded, format=codec)
            found.append(("/camera/video", FOXGLOVE, bags.START_NS + order * bags.PERIOD_NS + 3_000_000, message))
        else:
            fields: dict[str, Any] = dict(width=64, height=48, pts=i, flags=0, is_bigendian=False, data=coded)
            name = {"h264": "libx264", "hevc": "hevc;yuv420p;bgr8;bgr8"}[codec]
            message = bags.TYPES[FFMPEG](header=bags.header(stamp, "optical"), encoding=name, **fields)
            time_ns = bags.START_NS + order * bags.PERIOD_NS + 3_000_000
            found.append(("/camera/image_raw/ffmpeg", FFMPEG, time_ns, message))
    return found


def images_in(path: Path, packets: Sequence[tuple[bytes, int]], codec: str, kind: str) -> tuple[dict[int, Any], str]:
    """Pixels, stamp and bag time of the decoded images, by index, and the bag's damage."""
    recorded = bags.write_bag(path / "bag", entries(packets, codec, kind))
    found = {}
    with open_bag(recorded) as bag:
        topics = choose_topics(bag, TopicChoice())
        assert topics.image.msgtype == bags.IMAGE
        for frame in bag_frames(bag, topics):
            message = frame.image.message()
            stamp = stamp_ns(message.header)
            assert (frame.instruction, message.header.frame_id) == ("stack", "optical")
            found[(stamp - bags.START_NS) // bags.PERIOD_NS] = (rgb_from_message(message), stamp, frame.image.time_ns)
        return found, bag.damage


def are_right(found: dict[int, Any], codec: str, b_frames: int = 0) -> bool:
    return all((pixels == wanted(codec, b_frames)[i]).all() for i, (pixels, *_) in found.items())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("codec", CODECS)
def test_each_packet_is_an_image_with_its_stamp_at_once(tmp_path: Path, codec: str, kind: str) -> None:
    found, damage = images_in(tmp_path, stream(codec), codec, kind)
    assert ([*found], damage) == ([*range(LENGTH)], "")
    assert are_right(found, codec)
    assert np.abs(found[7][0].astype(int) - scene(7)).mean() < 12, "H.264 halves the colours' resolution"
    for i, (_, stamp, time_ns) in found.items():
        assert (stamp, time_ns) == (bags.START_NS + i * bags.PERIOD_NS, stamp + 3_000_000)


@pytest.mark.parametrize("codec", CODECS)
def test_packets_out_of_order_keep_their_stamps_and_come_when_they_could(tmp_path: Path, codec: str) -> None:
    packets = stream(codec, 2)
    found, damage = images_in(tmp_path, packets, codec, "foxglove")
    assert (sorted(found), damage) == ([*range(LENGTH)], "")
    assert are_right(found, codec, 2)
    recorded = {i: bags.START_NS + order * bags.PERIOD_NS + 3_000_000 for order, (_, i) in enumerate(packets)}
    assert all(time_ns >= recorded[i] for i, (*_, time_ns) in found.items())
    times = [time_ns for *_, time_ns in found.values()]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("codec", CODECS)
def test_a_recording_that_begins_between_keyframes_begins_with_the_next(tmp_path: Path, codec: str, kind: str) -> None:
    found, damage = images_in(tmp_path, stream(codec)[4:], codec, kind)
    assert [*found] == [*range(GROUP, LENGTH)]
    assert are_right(found, codec)
    assert damage.startswith("6 packets of /camera/")
    assert damage.endswith("cannot be decoded, the first: there is no keyframe before it")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("lost", [3, 13, 20])
def test_a_lost_packet_costs_images_until_the_next_keyframe_and_none_is_wrong(
    tmp_path: Path, codec: str, kind: str, lost: int
) -> None:
    found, damage = images_in(tmp_path, stream(codec)[:lost] + stream(codec)[lost + 1 :], codec, kind)
    after = range(lost + 1, -(-(lost + 1) // GROUP) * GROUP)  # up to the next keyframe
    assert [*found] == [i for i in range(LENGTH) if i != lost and i not in after]
    assert are_right(found, codec)
    assert damage.startswith(f"{len(after)} packets of /camera/")
    unnumbered = (codec, kind) == ("hevc", "foxglove")
    reason = "its image was never complete" if unnumbered else "a packet before it is missing"
    assert damage.endswith(f"cannot be decoded, the first: {reason}")


@pytest.mark.parametrize("b_frames", [0, 1, 2, 3])
def test_a_lost_packet_among_others_out_of_order_gives_no_wrong_image(tmp_path: Path, b_frames: int) -> None:
    packets = stream("h264", b_frames)
    for lost in range(1, GROUP + 3):
        path = tmp_path / str(lost)
        found, _ = images_in(path, packets[:lost] + packets[lost + 1 :], "h264", "foxglove")
        assert are_right(found, "h264", b_frames), lost
        assert len(found) >= LENGTH - 2 * GROUP


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_packets_never_raise_another_error(tmp_path: Path, codec: str) -> None:
    random = np.random.default_rng(1)
    for turn in range(10):
        packets = [*stream(codec)]
        for _ in range(3):
            at = int(random.integers(len(packets)))
            broken = bytearray(packets[at][0])
            for _ in range(4):
                broken[random.integers(len(broken))] = random.integers(256)
            packets[at] = (bytes(broken[: random.integers(1, len(broken) + 1)]), packets[at][1])
        found, damage = images_in(tmp_path / str(turn), packets, codec, "foxglove")
        assert len(found) == LENGTH or damage


def test_other_codecs_are_named(tmp_path: Path) -> None:
    recorded = entries(stream("h264")[:3], "h264", "foxglove")
    for entry in recorded[1:]:
        entry[3].format = "av1"
    match = "topic /camera/video: video format 'av1' is not read; h264 and h265 are"
    with open_bag(bags.write_bag(tmp_path / "bag", recorded)) as bag, pytest.raises(UserError, match=match):
        list(bag.messages())


def test_a_raw_topic_is_preferred_to_its_video(tmp_path: Path) -> None:
    recorded = entries(stream("h264"), "h264", "ffmpeg")
    with open_bag(bags.write_bag(tmp_path / "video", recorded)) as bag:
        assert choose_topics(bag, TopicChoice("/camera/image_raw")).image.name == "/camera/image_raw/ffmpeg"
    raw = [("/camera/image_raw", bags.IMAGE, time_ns, bags.image(time_ns)) for _, _, time_ns, _ in recorded[1:]]
    both = sorted([*recorded, *raw], key=lambda each: each[2])
    with open_bag(bags.write_bag(tmp_path / "both", both)) as bag:
        assert choose_topics(bag, TopicChoice()).image.name == "/camera/image_raw"
