"""A bag of rendered camera frames, for a machine without a recording."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

PERIOD_NS = 200_000_000  # OpenVLA's 5 Hz
_START_NS = 1_700_000_000 * 10**9
_SIZE = 256
_FOREVER = QosTime(sec=2**31 - 1, nsec=2**32 - 1)


def write_rendered_bag(directory: Path, *, frames: int, instruction: str) -> None:
    """Writes /camera/image_raw (rgb8) at 5 Hz and /instruction, latched, as an MCAP bag.

    Args:
        directory: must not exist.
        frames: number of images: a gripper that moves to a cube on a table.
        instruction: sent once, before the first image.
    """
    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types
    time, header = types["builtin_interfaces/msg/Time"], types["std_msgs/msg/Header"]
    with Writer(directory, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        images = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=store)
        latched = writer.add_connection(
            "/instruction", "std_msgs/msg/String", typestore=store, offered_qos_profiles=[_latched()]
        )
        text = types["std_msgs/msg/String"](data=instruction)
        writer.write(latched, _START_NS, store.serialize_cdr(text, latched.msgtype))
        for i in range(frames):
            stamp_ns = _START_NS + i * PERIOD_NS
            message = types["sensor_msgs/msg/Image"](
                header=header(stamp=time(sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9), frame_id="camera"),
                height=_SIZE,
                width=_SIZE,
                encoding="rgb8",
                is_bigendian=0,
                step=3 * _SIZE,
                data=_scene(i / max(1, frames - 1)).reshape(-1),
            )
            writer.write(images, stamp_ns, store.serialize_cdr(message, images.msgtype))


def _scene(progress: float) -> np.ndarray:
    """A table, a cube, and a gripper on its way to it; uint8 [256, 256, 3]."""
    image = Image.new("RGB", (_SIZE, _SIZE), (176, 190, 197))
    draw = ImageDraw.Draw(image)
    draw.polygon([(0, 110), (_SIZE, 90), (_SIZE, _SIZE), (0, _SIZE)], fill=(141, 110, 99))
    draw.rectangle([150, 160, 186, 196], fill=(198, 40, 40))
    x, y = 30 + 120 * progress, 20 + 110 * progress
    draw.rectangle([x + 10, 0, x + 26, y], fill=(69, 90, 100))
    for finger in (x, x + 30):
        draw.rectangle([finger, y, finger + 6, y + 28], fill=(38, 50, 56))
    return np.asarray(image)


def _latched() -> Qos:
    return Qos(
        history=QosHistory.KEEP_LAST,
        depth=1,
        reliability=QosReliability.RELIABLE,
        durability=QosDurability.TRANSIENT_LOCAL,
        deadline=_FOREVER,
        lifespan=_FOREVER,
        liveliness=QosLiveliness.AUTOMATIC,
        liveliness_lease_duration=_FOREVER,
        avoid_ros_namespace_conventions=False,
    )
