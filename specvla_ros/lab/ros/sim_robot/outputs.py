# SPDX-License-Identifier: Apache-2.0
"""The simulated robot's publishers: images, clock, joints and episodes; also measures the world's speed."""

import io
from array import array
from collections.abc import Sequence

import numpy as np
from builtin_interfaces.msg import Time as TimeMessage
from geometry_msgs.msg import PoseStamped
from PIL import Image as PillowImage
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.time import Time
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Header

from specvla_ros.lab.ros.sim_robot.episodes import Episode, Tally
from specvla_ros.lab.simulation.controllers import BASE_FRAME
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.msg import SimEpisode
from specvla_ros.ros.motion_messages import pose_message
from specvla_ros.ros.qos import CLOCK

_WINDOW_S = 5.0


class Pace:
    """Measures simulated time against wall time."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._simulated_s = 0.0

    def step(self, now_s: float, step_s: float) -> float | None:
        """Counts a step of simulated time; every 5 wall seconds returns simulated / wall seconds, otherwise None."""
        if self._began_s is None:
            self._began_s = now_s
            return None
        self._simulated_s += step_s
        elapsed_s = now_s - self._began_s
        if elapsed_s < _WINDOW_S:
            return None
        factor = self._simulated_s / elapsed_s
        self._began_s, self._simulated_s = now_s, 0.0
        return factor


IMAGE_TOPIC = "/camera/image_raw"
WRIST_TOPIC = "/wrist/image_raw"
JOINTS_TOPIC = "/joint_states"
# Reliable, to match reliable and best-effort subscribers.
_STREAM = QoSProfile(depth=5, reliability=ReliabilityPolicy.RELIABLE)
# Latched for late subscribers, and deep enough that the next start does not overwrite an end.
EPISODE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
_FRAME_IDS = ("camera", "wrist")  # frame_id of each camera's images
_JPEG_QUALITY = 90


class SimOutputs:
    """Publishes the robot's images, joints, clock and episodes. Used only by the robot's thread."""

    def __init__(self, node: Node, robot: TableRobot) -> None:
        self._robot = robot
        self._raw, self._compressed = {}, {}
        for name, topic in zip(robot.cameras, (IMAGE_TOPIC, WRIST_TOPIC), strict=True):
            self._raw[name] = node.create_publisher(Image, topic, _STREAM)
            self._compressed[name] = node.create_publisher(CompressedImage, f"{topic}/compressed", _STREAM)
        self._tool = node.create_publisher(PoseStamped, "~/tool_pose", _STREAM)
        self._joints = node.create_publisher(JointState, JOINTS_TOPIC, _STREAM)
        self._clock = node.create_publisher(Clock, "/clock", CLOCK)
        self._episodes = node.create_publisher(SimEpisode, "~/episode", EPISODE)

    @property
    def image_topics(self) -> tuple[str, str]:
        """The first camera's raw and compressed topic, as remapped."""
        first = self._robot.cameras[0]
        return self._raw[first].topic_name, self._compressed[first].topic_name

    def image(self, now_ns: int) -> None:
        """Publishes the image of each camera that has a subscriber."""
        for camera, frame_id in zip(self._robot.cameras, _FRAME_IDS, strict=True):
            raw, compressed = self._raw[camera], self._compressed[camera]
            wanted = [topic for topic in (raw, compressed) if topic.get_subscription_count() > 0]
            if not wanted:
                continue
            header, image = Header(stamp=_stamp(now_ns), frame_id=frame_id), self._robot.look(camera)
            if raw in wanted:
                raw.publish(_raw(header, image))
            if compressed in wanted:
                compressed.publish(CompressedImage(header=header, format="jpeg", data=array("B", _jpeg(image))))

    def clock(self, now_ns: int) -> None:
        self._clock.publish(Clock(clock=_stamp(now_ns)))

    def tool_pose(self, now_ns: int) -> None:
        """Publishes the tool's pose in the base frame."""
        self._tool.publish(pose_message(self._robot.world.tool(), now_ns, BASE_FRAME))

    def joints(self, now_ns: int) -> None:
        positions, velocities = map(np.ndarray.tolist, self._robot.world.joint_state())
        header, names = Header(stamp=_stamp(now_ns)), list(self._robot.world.arm.joint_names)
        self._joints.publish(JointState(header=header, name=names, position=positions, velocity=velocities))

    def episode(self, now_ns: int, episode: Episode, instruction: str, tally: Tally, control_dt: float) -> None:
        """Publishes the episode's progress; `control_dt` is the duration of its steps in seconds."""
        self._episodes.publish(
            SimEpisode(
                header=Header(stamp=_stamp(now_ns)),
                task=episode.task.name,
                seed=episode.start.seed,
                instruction=instruction,
                episode=episode.start.index,
                state=int(episode.state),
                time_s=episode.steps * control_dt,
                actions=episode.actions,
                stale_actions=episode.ignored,
                succeeded_so_far=tally.succeeded,
                finished_so_far=tally.finished,
                acted_on=self._robot.acted_on() or "",
                detail=episode.detail,
            )
        )


def is_commanded(node: Node, image_topics: Sequence[str], command_topic: str) -> bool:
    """Checks that commands have a publisher and that at least one image topic has a subscriber."""
    watched = any(node.count_subscribers(topic) for topic in image_topics)
    return watched and node.count_publishers(command_topic) > 0


def policy_listens(node: Node, image_topics: Sequence[str], action_topic: str) -> bool:
    """Checks that one node subscribes to the images and publishes actions; a viewer only does the former."""
    actors = node.get_publishers_info_by_topic(action_topic)
    listeners = [info for topic in image_topics for info in node.get_subscriptions_info_by_topic(topic)]
    acting, listening = ({(info.node_namespace, info.node_name) for info in infos} for infos in (actors, listeners))
    return bool(acting & listening)


def _stamp(now_ns: int) -> TimeMessage:
    return Time(nanoseconds=now_ns).to_msg()


def _raw(header: Header, image: np.ndarray) -> Image:
    height, width = image.shape[:2]
    # A message takes an array as it is; `bytes` would be checked byte by byte.
    data = array("B", image.tobytes())
    return Image(header=header, height=height, width=width, encoding="rgb8", step=3 * width, data=data)


def _jpeg(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    PillowImage.fromarray(image).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()
