# SPDX-License-Identifier: Apache-2.0
"""Decodes topics of video packets, so that they are read like images.

An image has the stamp of its own packet. Its bag time is that of the packet that completed it: the earliest time at
which a subscriber could have had it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from rosbags.interfaces import Connection

from specvla_ros.errors import UserError, shortened
from specvla_ros.lab.bags.h26x import FrameNumbers, is_keyframe
from specvla_ros.lab.bags.mcap_storage import StoredMessage
from specvla_ros.lab.bags.message_types import MessageTypes

if TYPE_CHECKING:
    import av

VIDEO_TYPES = ("foxglove_msgs/msg/CompressedVideo", "ffmpeg_image_transport_msgs/msg/FFMPEGPacket")
DECODED_TYPE = "sensor_msgs/msg/Image"


@dataclass(frozen=True)
class _Packet:
    codec: str  # h264 or hevc
    data: bytes
    stamp_ns: int
    frame_id: str
    number: int | None  # count of the encoder's frames, if the message has one


@dataclass(frozen=True)
class _Decoded:
    pixels: np.ndarray  # RGB uint8 [height, width, 3]
    packet: _Packet


class VideoPackets:
    """Decodes the video topics of a bag."""

    def __init__(self, types: MessageTypes) -> None:
        self._types = types
        self._lost: Counter[str] = Counter()  # packets without an image, by topic
        self._why: dict[str, str] = {}  # the first one's reason

    @property
    def damage(self) -> str:
        """The packets that gave no image; known once they are read."""
        return "; ".join(
            f"{count} packets of {topic} cannot be decoded, the first: {self._why[topic]}"
            for topic, count in self._lost.items()
        )

    def decoded(self, messages: Iterator[StoredMessage]) -> Iterator[StoredMessage]:
        """The messages with an image in place of each video packet; UserError for codecs that are not read."""
        self._lost.clear()
        self._why.clear()
        streams: dict[str, tuple[Connection, _Stream]] = {}
        time_ns = 0
        for connection, time_ns, raw in messages:
            if connection.msgtype not in VIDEO_TYPES:
                yield connection, time_ns, raw
                continue
            _, stream = streams.setdefault(connection.topic, (connection, _Stream()))
            packet = _packet(connection.topic, self._types.deserialise(raw, connection.msgtype))
            for image in stream.decode(packet):
                yield self._image(connection, time_ns, image)
            self._count(connection.topic, stream)
        for connection, stream in streams.values():
            for image in stream.finish():
                yield self._image(connection, time_ns, image)
            self._count(connection.topic, stream)

    def _count(self, topic: str, stream: "_Stream") -> None:
        if stream.lost:
            self._lost[topic] = stream.lost
            self._why[topic] = stream.why

    def _image(self, connection: Connection, time_ns: int, image: _Decoded) -> StoredMessage:
        height, width, _ = image.pixels.shape
        fields = {"height": height, "width": width, "encoding": "rgb8", "is_bigendian": 0, "step": 3 * width}
        fields["data"] = image.pixels.reshape(-1)
        packet = image.packet
        raw = self._types.serialise(DECODED_TYPE, fields, stamp_ns=packet.stamp_ns, frame_id=packet.frame_id)
        return connection._replace(msgtype=DECODED_TYPE), time_ns, raw


class _Stream:
    """The decoder of one topic; after a gap it waits for the next keyframe, since images would be wrong until then."""

    def __init__(self) -> None:
        self.lost = 0  # packets that gave no image
        self.why = ""  # why the first did not
        self._context: av.VideoCodecContext | None = None
        self._numbers = FrameNumbers()
        self._newest: int | None = None  # the encoder's count
        self._waiting = "there is no keyframe before it"  # why packets are skipped; empty: they are not
        self._pending: dict[int, _Packet] = {}  # packets whose image is not complete, by their order
        self._count = 0

    def decode(self, packet: _Packet) -> list[_Decoded]:
        """The images that a packet completes, usually its own."""
        keyframe, gap = is_keyframe(packet.codec, packet.data), self._gap(packet)
        images: list[_Decoded] = []
        if keyframe:
            if self._waiting or gap:
                images = self.finish()
            self._waiting = ""
        elif gap and not self._waiting:
            images = self.finish()
            self._waiting = "a packet before it is missing"
        if self._waiting:
            self._lose(1, self._waiting)
            return images
        return images + self._fed(packet)

    def finish(self) -> list[_Decoded]:
        """The remaining images; the decoder starts again with the next packet."""
        images = self._images(None) if self._context is not None else []
        self._lose(len(self._pending), "its image was never complete")
        self._pending.clear()
        self._context = None
        return images

    def _fed(self, packet: _Packet) -> list[_Decoded]:
        av = _library()
        if self._context is None:
            self._context = av.CodecContext.create(packet.codec, "r")
            self._context.thread_count = 1  # several threads delay images
        coded = av.Packet(packet.data)
        coded.pts, self._pending[self._count] = self._count, packet
        self._count += 1
        return self._images(coded)

    def _images(self, coded: "av.Packet | None") -> list[_Decoded]:
        av = _library()
        assert self._context is not None
        try:
            frames = self._context.decode(coded)
        except av.FFmpegError as error:
            lost, self._waiting = len(self._pending), f"a packet before it is damaged ({error.strerror})"
            self._lose(lost, f"it is damaged ({error.strerror})")
            self._pending.clear()
            self._context = None
            return []
        found = [(self._pending.pop(frame.pts, None), frame) for frame in frames if frame.pts is not None]
        return [_Decoded(frame.to_ndarray(format="rgb24"), packet) for packet, frame in found if packet is not None]

    def _gap(self, packet: _Packet) -> bool:
        before, self._newest = self._newest, packet.number
        lacking = packet.codec == "h264" and self._numbers.lacks_one(packet.data)
        return lacking or (before is not None and packet.number != before + 1)

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        self.why = self.why or (why if count else "")


def _packet(topic: str, message: Any) -> _Packet:
    """The content of either message type."""
    if hasattr(message, "encoding"):
        name, stamp, frame, number = message.encoding, message.header.stamp, message.header.frame_id, int(message.pts)
    else:
        name, stamp, frame, number = message.format, message.timestamp, message.frame_id, None
    codec = _codec(name)
    if not codec:
        raise UserError(f"topic {topic}: video format '{shortened(name)}' is not read; h264 and h265 are")
    return _Packet(codec, bytes(message.data), stamp.sec * 10**9 + stamp.nanosec, frame, number)


def _codec(name: str) -> str:
    """FFmpeg's name of a codec, from its own, an encoder's (h264_nvenc, libx265) or Foxglove's; empty if unknown."""
    first = name.split(";")[0].strip().lower()
    if "264" in first or first == "avc":
        return "h264"
    return "hevc" if "265" in first or "hevc" in first else ""


@cache
def _library() -> Any:
    import av

    av.logging.set_level(av.logging.FATAL)  # damage is counted here
    return av
