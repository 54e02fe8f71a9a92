"""The frames of a bag: each image with the instruction in force and the action that was recorded for it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from specvla_ros.bags.reader import Bag, BagMessage
from specvla_ros.bags.topics import ReplayTopics


@dataclass(frozen=True)
class BagFrame:
    """One image of a bag.

    Args:
        index: counts the images, from 0.
        image: the image message.
        instruction: in force when the image was recorded; empty: none yet.
        epoch: 0 before the first instruction, bumped on each new one, as in the node.
        recorded: the first recorded action from this image on and before the next one.
    """

    index: int
    image: BagMessage
    instruction: str
    epoch: int
    recorded: tuple[float, ...] | None = None


def bag_frames(bag: Bag, topics: ReplayTopics, instruction: str | None = None) -> Iterator[BagFrame]:
    """The frames in bag time, each as soon as its recorded action is known.

    Args:
        bag: an open bag.
        topics: which of its topics to read.
        instruction: in place of a topic.

    Raises:
        UserError: an instruction or a recorded action is damaged.
    """
    text, epoch = instruction or "", int(bool(instruction))
    index = 0
    newest: BagFrame | None = None
    for message in _in_causal_order(bag, topics):
        if message.topic == topics.image.name:
            if newest is not None:
                yield newest
            newest = BagFrame(index, message, text, epoch)
            index += 1
        elif topics.instruction is not None and message.topic == topics.instruction.name:
            asked = str(message.message().data)
            if asked != text or not epoch:
                text, epoch = asked, epoch + 1
        elif newest is not None and newest.recorded is None:
            newest = replace(newest, recorded=tuple(float(value) for value in message.message().data))
    if newest is not None:
        yield newest


def _in_causal_order(bag: Bag, topics: ReplayTopics) -> Iterator[BagMessage]:
    """In bag time; at equal times the instruction, then the image that it is for, then the action that answers it."""
    names = (topics.instruction, topics.image, topics.action)
    rank = {topic.name: place for place, topic in enumerate(names) if topic is not None}
    for _, simultaneous in groupby(bag.messages(topics.names), key=lambda message: message.time_ns):
        yield from sorted(simultaneous, key=lambda message: rank[message.topic])
