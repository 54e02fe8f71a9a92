# SPDX-License-Identifier: Apache-2.0
"""All that a policy looks at: the images of its cameras and the robot's state, of about the same moment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rclpy.node import Node
from sensor_msgs.msg import JointState

from specvla_ros.engine.outcome import DropReason
from specvla_ros.errors import UserError
from specvla_ros.messages.image_message import stamp_ns
from specvla_ros.messages.state_message import read_state
from specvla_ros.messages.synchronizer import Matched, Synchronizer, Unmatched
from specvla_ros.models.observation import ONLY_CAMERA
from specvla_ros.ros.policy.image_input import Frame, ImageInput
from specvla_ros.ros.policy.parameters import ALL_NUMBERS, RobotParameters
from specvla_ros.ros.qos import STATE

STATE_TOPIC = "state"
_LOG_PERIOD_S = 5.0


@dataclass(frozen=True)
class Senses:
    """What a policy looks at.

    Args:
        cameras: their names; the first leads.
        state_dims: numbers of the robot's state; 0: none.
    """

    cameras: tuple[str, ...] = (ONLY_CAMERA,)
    state_dims: int = 0


@dataclass(frozen=True)
class Frames:
    """Images and state that belong together.

    Args:
        lead: of the first camera, whose stamp is the observation's.
        images: uint8 [height, width, 3] by camera.
        state: float64 [dims]; None: the policy reads none.
    """

    lead: Frame
    images: Mapping[str, np.ndarray]
    state: np.ndarray | None = None


def image_topic(camera: str, cameras: Sequence[str]) -> str:
    """The topic of a camera, for remapping; a policy with a single one listens to `image`."""
    return "image" if len(cameras) == 1 or camera == ONLY_CAMERA else f"{camera}/image"


class ObservationInput:
    """Subscribes to the images of each camera and to the state, for as long as it lives.

    Args:
        node: the node that subscribes.
        senses: what the policy looks at.
        chosen: transports, reliability and the tolerance of the stamps.
        on_message: called with each image that comes: its transport, after the camera's name where there are several.
        on_frames: called with what belongs together.
        on_bad: called with reason and detail for each image that could not be read, and for each of the first camera
            that went without the others.

    Raises:
        UserError: an override of the images' QoS is none.
    """

    def __init__(
        self,
        node: Node,
        senses: Senses,
        chosen: RobotParameters,
        *,
        on_message: Callable[[str], None],
        on_frames: Callable[[Frames], None],
        on_bad: Callable[[DropReason, str], None],
    ) -> None:
        self._node, self._senses = node, senses
        self._names = () if chosen.state_names == ALL_NUMBERS else chosen.state_names
        self._on_frames, self._on_bad = on_frames, on_bad
        lead, *others = senses.cameras
        state = [STATE_TOPIC] if senses.state_dims else []
        self._together = Synchronizer(lead, [*others, *state], chosen.sync_tolerance_s)
        self._cameras = {
            camera: ImageInput(
                node,
                chosen.image_transport,
                chosen.image_reliability,
                topic=image_topic(camera, senses.cameras),
                on_message=partial(self._count, on_message, camera),
                on_frame=partial(self._add_frame, camera),
                on_bad=partial(self._refuse, camera),
            )
            for camera in senses.cameras
        }
        self._state = node.create_subscription(JointState, STATE_TOPIC, self._add_state, STATE) if state else None

    def destroy(self) -> None:
        """Stops listening; an image that still waits for the others goes without."""
        for camera in self._cameras.values():
            camera.destroy()
        if self._state is not None:
            self._node.destroy_subscription(self._state)
        self._end(self._together.give_up())

    def follow_publishers(self) -> None:
        """See ImageInput."""
        for camera in self._cameras.values():
            camera.follow_publishers()

    def _count(self, on_message: Callable[[str], None], camera: str, transport: str) -> None:
        on_message(transport if len(self._senses.cameras) == 1 else f"{camera}_{transport}")

    def _refuse(self, camera: str, reason: DropReason, detail: str) -> None:
        self._on_bad(reason, detail if len(self._senses.cameras) == 1 else f"{camera}: {detail}")

    def _add_frame(self, camera: str, frame: Frame) -> None:
        self._end(self._together.add(camera, frame.stamp_ns, (camera, frame)))

    def _add_state(self, message: JointState) -> None:
        try:
            state = read_state(message, self._names, self._senses.state_dims)
            stamp = stamp_ns(message.header)
        except UserError as error:
            self._node.get_logger().warning(f"a state was refused: {error}", throttle_duration_sec=_LOG_PERIOD_S)
            return
        self._end(self._together.add(STATE_TOPIC, stamp, state))

    def _end(self, ended: Sequence[Matched | Unmatched]) -> None:
        for each in ended:
            camera, lead = each.lead
            if isinstance(each, Unmatched):
                self._on_bad(DropReason.INCOMPLETE, each.why)
                continue
            others: dict[str, Any] = dict(each.others)
            state = others.pop(STATE_TOPIC, None)
            images = {camera: lead.rgb, **{name: frame.rgb for name, (_, frame) in others.items()}}
            self._on_frames(Frames(lead, {name: images[name] for name in self._senses.cameras}, state))
