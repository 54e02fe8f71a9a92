# SPDX-License-Identifier: Apache-2.0
"""The frames of a bag: choice of topics, and each image with its instruction and recorded action."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from specvla_ros.control.convention import ACTION_NAMES, GRIPPER, ConventionSettings
from specvla_ros.control.joint_parts import TOLERANCE_S
from specvla_ros.control.state_units import StateConvention
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.lerobot.dataset import as_episode
from specvla_ros.messages.image_message import is_depth, rgb_from_compressed, rgb_from_image, stamp_ns
from specvla_ros.messages.state_message import StateReader
from specvla_ros.messages.synchronizer import Matched, Synchronizer, Unmatched

if TYPE_CHECKING:  # the commands load these declarations where rosbags, which the reader needs, may be missing
    import numpy as np

    from specvla_ros.lab.bags.reader import Bag, BagMessage, Topic
    from specvla_ros.models.target import PolicyFacts

RAW_IMAGE = "sensor_msgs/msg/Image"
COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
JOINT_STATE = "sensor_msgs/msg/JointState"
TEXT = "std_msgs/msg/String"
NUMBERS = ("std_msgs/msg/Float32MultiArray", "std_msgs/msg/Float64MultiArray")
ANSWERS = ("specvla_ros/msg/VlaAction", "specvla_msgs/msg/VlaAction")  # today's type and that of old bags

STATE = "state"

_COMPRESSED_SUFFIXES = ("/compressed", "/ffmpeg")  # of image_transport: JPEG or PNG, and video
_DEFAULT_IMAGES = tuple("/camera/image_raw" + suffix for suffix in ("", *_COMPRESSED_SUFFIXES))
_DEFAULT_INSTRUCTION = "/instruction"
_DEFAULT_ACTION = "/ground_truth/action"


@dataclass(frozen=True)
class TopicChoice:
    """The user's choice of a bag's topics; None selects the default."""

    image_topic: str | None = None  # default: /camera/image_raw, raw or compressed, or the only image topic
    instruction_topic: str | None = None  # default: /instruction
    instruction: str | None = None  # replaces the topic
    action_topic: str | None = None  # actions to compare with; default: /ground_truth/action, if the bag has it
    cameras: Mapping[str, str] = field(default_factory=dict)  # topics of further cameras, by the policy's names
    state_topic: str | None = None  # the robot's state, for a policy that reads it
    state_names: tuple[str, ...] = ()  # the state's values in the policy's order; empty: as in the first message
    state_dims: int = 0  # number of the state's values; 0: any
    sync_tolerance_s: float = TOLERANCE_S  # maximum difference of stamps from the first camera's
    action: ConventionSettings | None = None  # as the user gave it; None: not at all
    convention: StateConvention | None = None  # of the state; None: it is read as recorded

    def of(self, policy: PolicyFacts) -> TopicChoice:
        """Returns a copy completed with the policy's own state names and dimensions."""
        names, convention = self.state_names or policy.state_names, None
        if self.action is not None:
            convention = StateConvention(self.action, policy.unnorm_key, policy.codec.names)
        return replace(self, state_names=names, state_dims=policy.state_dims, convention=convention)

    def states(self, bag: Bag) -> StateReader:
        """Reads the state's messages; those of a dataset already have the unit of the training data.

        Raises UserError if the state's names or its unit do not follow from the choice.
        """
        units = None
        if self.convention is not None and self.state_topic and as_episode(bag.path) is None:
            units = self.convention.units(self.state_names)
        return StateReader(self.state_names, self.state_dims, self.sync_tolerance_s, units)


DEFAULT_TOPICS = TopicChoice()


def rgb_from_message(message: Any) -> np.ndarray:
    """The pixels of a sensor_msgs/Image or CompressedImage."""
    return rgb_from_compressed(message) if hasattr(message, "format") else rgb_from_image(message)


@dataclass(frozen=True)
class ReplayTopics:
    """The topics that a replay reads."""

    image: Topic  # the first camera
    instruction: Topic | None  # None: the user gave the instruction
    action: Topic | None  # the recorded action to compare with, if any
    note: str = ""  # note for the user on the choice
    cameras: Mapping[str, Topic] = field(default_factory=dict)  # further cameras
    state: Topic | None = None
    states: StateReader = field(default_factory=lambda: StateReader(()))  # reads the state's messages
    sync_tolerance_s: float = TOLERANCE_S

    @property
    def answers(self) -> Topic | None:
        """The action if it is a policy's answer, which arrives late and is matched with its image by stamp."""
        return self.action if self.action is not None and self.action.msgtype in ANSWERS else None

    @property
    def names(self) -> tuple[str, ...]:
        """The topics that are read in bag time; answers are read before."""
        action = self.action if self.answers is None else None
        topics = (self.image, self.instruction, action, *self.sensors.values())
        return tuple(topic.name for topic in topics if topic is not None)

    @property
    def sensors(self) -> dict[str, Topic]:
        """The inputs matched with each image: further cameras by name, and the state."""
        return {**self.cameras, **({STATE: self.state} if self.state is not None else {})}


def choose_topics(bag: Bag, choice: TopicChoice) -> ReplayTopics:
    """Selects the topics that the user named, and finds the others."""
    image = _named_image(bag, choice.image_topic) if choice.image_topic else _find_image(bag)
    cameras = {name: _named_image(bag, topic) for name, topic in choice.cameras.items()}
    state = _typed(bag, choice.state_topic, (JOINT_STATE,)) if choice.state_topic else None
    instruction: Topic | None = None
    if choice.instruction is None:
        named = choice.instruction_topic
        instruction = _typed(bag, named, (TEXT,)) if named else _find_instruction(bag)
    numbers = (topic for topic in bag.topics if topic.msgtype in NUMBERS)
    action = next((topic for topic in numbers if topic.name == _DEFAULT_ACTION), None)
    if choice.action_topic:
        action = _typed(bag, choice.action_topic, (*NUMBERS, *ANSWERS))
    note = ""
    if choice.image_topic and image.name != choice.image_topic:
        note = f"bag {bag.path} holds {choice.image_topic} only compressed: reading {image.name}"
    return ReplayTopics(image, instruction, action, note, cameras, state, choice.states(bag), choice.sync_tolerance_s)


@dataclass(frozen=True)
class BagFrame:
    """One image of a bag."""

    index: int  # index of the image, from 0
    image: BagMessage
    instruction: str  # the instruction when the image was recorded; empty if there was none yet
    epoch: int  # 0 before the first instruction, incremented on each new one, as in the node
    # The first action recorded between this image and the next; of a policy's answers the first action to this image.
    recorded: tuple[float, ...] | None = None
    others: Mapping[str, BagMessage] = field(default_factory=dict)  # other cameras; the nearest by stamp
    state: np.ndarray | None = None  # float64 [dims], the nearest by stamp; None: not read, or see `missing`
    missing: str = ""  # the missing input, due to which the image cannot be answered; empty if all inputs exist


def bag_frames(bag: Bag, topics: ReplayTopics, instruction: str | None = None) -> Iterator[BagFrame]:
    """Yields the frames in bag time, each once its recorded action is known; `instruction` replaces the topic."""
    text, epoch = instruction or "", int(bool(instruction))
    index = 0
    newest: BagFrame | None = None
    refused = ""  # why the last message of the state was refused
    before = ""  # the same of an earlier one, which the newest image may lack
    together = Synchronizer(topics.image.name, [*topics.sensors], topics.sync_tolerance_s)
    sensors = {topic.name: name for name, topic in topics.sensors.items()}
    answers = {} if topics.answers is None else _first_actions(bag, topics.answers)
    for message in _in_causal_order(bag, topics):
        if message.topic == topics.image.name:
            if newest is not None:
                yield _ended(newest, together.give_up(), refused or before)
            # only when needed: it deserialises the whole message
            stamp = recorded_ns(message) if sensors or answers else 0
            newest, before = BagFrame(index, message, text, epoch, answers.get(stamp)), ""
            newest = _ended(newest, together.add(message.topic, stamp, message), refused)
            index += 1
        elif message.topic in sensors:
            name, stamp = sensors[message.topic], recorded_ns(message)
            sample: BagMessage | np.ndarray | None = message
            if name == STATE:
                before = refused or before
                try:
                    sample, refused = topics.states.read(message.message(), stamp), topics.states.lacking
                    stamp = topics.states.stamp_ns
                except UserError as error:
                    sample, refused = None, str(error)
            if sample is not None:
                ended = together.add(name, stamp, sample)
                newest = _ended(newest, ended, refused or before) if newest is not None else None
        elif topics.instruction is not None and message.topic == topics.instruction.name:
            received = str(message.message().data)
            if received != text or not epoch:
                text, epoch = received, epoch + 1
        elif newest is not None and newest.recorded is None:
            newest = replace(newest, recorded=tuple(float(value) for value in message.message().data))
    if newest is not None:
        yield _ended(newest, together.give_up(), refused or before)


def _ended(frame: BagFrame, ended: list[Matched | Unmatched], refused: str) -> BagFrame:
    """The frame with its image's match, if that is known; `refused`: why the last state was refused."""
    for each in ended:
        if isinstance(each, Unmatched):
            frame = replace(frame, missing=each.why + (f"; a state was refused: {refused}" if refused else ""))
        else:
            others = {**each.others}
            frame = replace(frame, state=others.pop(STATE, None), others=others)
    return frame


def recorded_ns(message: BagMessage) -> int:
    """A message's own stamp, or its bag time if it has none."""
    try:
        return stamp_ns(message.message().header)
    except UserError:
        return message.time_ns


def _first_actions(bag: Bag, topic: Topic) -> dict[int, tuple[float, ...]]:
    """The first action of each answer, by its image's stamp in nanoseconds; of several to one image the first."""
    found: dict[int, tuple[float, ...]] = {}
    for each in bag.messages([topic.name]):
        answer = each.message()
        values = tuple(float(value) for value in answer.values[: len(answer.names)])
        found.setdefault(recorded_ns(each), values)
    return found


def _in_causal_order(bag: Bag, topics: ReplayTopics) -> Iterator[BagMessage]:
    """Yields messages in bag time; at equal times the instruction, the other sensors, the image, then its action.

    The image comes after the other sensors, since it is matched with the nearest available samples.
    """
    names = (topics.instruction, *topics.sensors.values(), topics.image, topics.action)
    rank = {topic.name: order for order, topic in enumerate(names) if topic is not None}
    for _, simultaneous in groupby(bag.messages(topics.names), key=lambda message: message.time_ns):
        yield from sorted(simultaneous, key=lambda message: rank[message.topic])


def action_names_of(bag: Bag, topic: Topic) -> tuple[str, ...]:
    """Names of the actions' values from their dimension's label; empty if it has none, or if they are of a tool.

    A single word over several values, such as `action`, names the dimension.
    """
    from specvla_ros.lab.bags.demonstrations import ACTION_LABELS

    first = next(iter(bag.messages((topic.name,))), None)
    message = first.message() if first is not None else None
    if message is None:
        return ()
    if topic.msgtype in ANSWERS:
        names = tuple(message.names)
    else:
        label = next((each.label for each in message.layout.dim if each.label), "")
        names = tuple(name.strip() for name in label.split(ACTION_LABELS)) if label else ()
        names = names if len(names) > 1 or len(message.data) == 1 else ()
    return () if _of_tool(names) else names


def _of_tool(names: Sequence[str]) -> bool:
    """True for the names of a tool's action, also in the forms of other recorders: dx, delta_x, gripper_open."""
    if len(names) != len(ACTION_NAMES):
        return False
    place = tuple(re.sub(r"^(d|delta_)(?=[xyz]$)", "", name.lower()) for name in names[:3])
    return place == ACTION_NAMES[:3] and names[-1].lower().startswith(GRIPPER)


def _typed(bag: Bag, name: str, types: tuple[str, ...]) -> Topic:
    topic = bag.topic(name)
    if topic.msgtype not in types:
        needed = " or ".join(filter(None, (", ".join(types[:-1]), types[-1])))
        raise UserError(f"bag {bag.path}: topic {name} is of type {topic.msgtype}, but {needed} is needed")
    return topic


def _named_image(bag: Bag, name: str) -> Topic:
    """The topic of that name or, if the bag lacks it, its compressed form as named by image_transport."""
    held = {topic.name: topic.msgtype for topic in bag.topics}
    compressed = (name + suffix for suffix in _COMPRESSED_SUFFIXES)
    if name not in held:
        name = next((each for each in compressed if held.get(each) in (RAW_IMAGE, COMPRESSED_IMAGE)), name)
    return _typed(bag, name, (RAW_IMAGE, COMPRESSED_IMAGE))


def _find_image(bag: Bag) -> Topic:
    images = {topic.name: topic for topic in bag.topics if topic.msgtype in (RAW_IMAGE, COMPRESSED_IMAGE)}
    twins = {name + suffix for name in images for suffix in _COMPRESSED_SUFFIXES}
    candidates = {name: topic for name, topic in images.items() if name not in twins}
    if len(candidates) > 1:
        candidates = {name: topic for name, topic in candidates.items() if _is_colour(bag, name)}
    for name in _DEFAULT_IMAGES:
        if name in candidates:
            return candidates[name]
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        raise UserError(f"bag {bag.path} has several cameras; pick one with --image-topic: {', '.join(candidates)}")
    held = ", ".join(f"{topic.name} ({topic.msgtype})" for topic in bag.topics)
    raise UserError(f"bag {bag.path} has no images ({RAW_IMAGE} or {COMPRESSED_IMAGE}); it holds: {held}")


def _is_colour(bag: Bag, name: str) -> bool:
    """True if a topic's first image is a colour or grey image, not a depth image."""
    if name.lower().endswith("/compresseddepth"):
        return False
    try:
        return not is_depth(next(bag.messages([name])).message())
    except (UserError, StopIteration):  # reading the topic later reports the error
        return True


def _find_instruction(bag: Bag) -> Topic:
    candidates = {topic.name: topic for topic in bag.topics if topic.msgtype == TEXT}
    if _DEFAULT_INSTRUCTION in candidates:
        return candidates[_DEFAULT_INSTRUCTION]
    hint = f", or pick a topic with --instruction-topic: {', '.join(candidates)}" if candidates else ""
    raise UserError(
        f"bag {bag.path} has no instruction on {_DEFAULT_INSTRUCTION}; give the robot's task with "
        f"--instruction 'TEXT'{hint}"
    )
