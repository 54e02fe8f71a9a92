"""Which topics of a bag a replay reads."""

from dataclasses import dataclass

from specvla_ros.bags.reader import Bag, Topic
from specvla_ros.errors import UserError

RAW_IMAGE = "sensor_msgs/msg/Image"
COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
TEXT = "std_msgs/msg/String"
NUMBERS = ("std_msgs/msg/Float32MultiArray", "std_msgs/msg/Float64MultiArray")

_USUAL_IMAGES = ("/camera/image_raw", "/camera/image_raw/compressed")
_USUAL_INSTRUCTION = "/instruction"
_USUAL_ACTION = "/ground_truth/action"


@dataclass(frozen=True)
class TopicChoice:
    """What the user says about a bag's topics; None: not said, the usual one is looked for.

    Args:
        image_topic: default: /camera/image_raw, raw or compressed, or the only image topic.
        instruction_topic: default: /instruction.
        instruction: in place of a topic.
        action_topic: recorded actions to compare with; default: /ground_truth/action, where the bag has it.
    """

    image_topic: str | None = None
    instruction_topic: str | None = None
    instruction: str | None = None
    action_topic: str | None = None


@dataclass(frozen=True)
class ReplayTopics:
    """What a replay reads.

    Args:
        image: the camera.
        instruction: None: the user gave the instruction.
        action: the recorded action to compare with; None: none.
    """

    image: Topic
    instruction: Topic | None
    action: Topic | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that are read."""
        return tuple(topic.name for topic in (self.image, self.instruction, self.action) if topic is not None)


def choose_topics(bag: Bag, choice: TopicChoice) -> ReplayTopics:
    """Takes the topics named, and finds the others.

    Raises:
        UserError: a topic is missing, of another type, or cannot be told among several.
    """
    named = choice.image_topic
    image = _typed(bag, named, (RAW_IMAGE, COMPRESSED_IMAGE)) if named else _find_image(bag)
    if choice.instruction is not None:
        text = None
    elif choice.instruction_topic:
        text = _typed(bag, choice.instruction_topic, (TEXT,))
    else:
        text = _find_instruction(bag)
    if choice.action_topic:
        action: Topic | None = _typed(bag, choice.action_topic, NUMBERS)
    else:
        action = next((each for each in bag.topics if each.name == _USUAL_ACTION and each.msgtype in NUMBERS), None)
    return ReplayTopics(image, text, action)


def _typed(bag: Bag, name: str, types: tuple[str, ...]) -> Topic:
    topic = bag.topic(name)
    if topic.msgtype not in types:
        raise UserError(f"bag {bag.path}: topic {name} is of type {topic.msgtype}, but {' or '.join(types)} is needed")
    return topic


def _find_image(bag: Bag) -> Topic:
    images = [topic for topic in bag.topics if topic.msgtype in (RAW_IMAGE, COMPRESSED_IMAGE)]
    candidates = {topic.name: topic for topic in images if not topic.name.lower().endswith("/compresseddepth")}
    for name in _USUAL_IMAGES:
        if name in candidates:
            return candidates[name]
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        raise UserError(f"bag {bag.path} has several cameras; pick one with --image-topic: {', '.join(candidates)}")
    held = ", ".join(f"{topic.name} ({topic.msgtype})" for topic in bag.topics)
    raise UserError(f"bag {bag.path} has no images ({RAW_IMAGE} or {COMPRESSED_IMAGE}); it holds: {held}")


def _find_instruction(bag: Bag) -> Topic:
    texts = [topic for topic in bag.topics if topic.msgtype == TEXT]
    for topic in texts:
        if topic.name == _USUAL_INSTRUCTION:
            return topic
    others = ", ".join(topic.name for topic in texts)
    hint = f", or pick a topic with --instruction-topic: {others}" if others else ""
    raise UserError(
        f"bag {bag.path} has no instruction on {_USUAL_INSTRUCTION}; say what the robot was to do with "
        f"--instruction 'TEXT'{hint}"
    )
