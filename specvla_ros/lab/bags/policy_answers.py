# SPDX-License-Identifier: Apache-2.0
"""The answers of a policy that a bag holds, by the stamps of the images that they answer."""

from collections.abc import Mapping
from dataclasses import dataclass

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.message_types import VLA_ACTION
from specvla_ros.lab.bags.reader import Bag
from specvla_ros.messages.image_message import stamp_ns

_TYPES = (VLA_ACTION, VLA_ACTION.replace("specvla_ros/", "specvla_msgs/"))


@dataclass(frozen=True)
class Answer:
    """The first action of an answer."""

    names: tuple[str, ...]
    values: tuple[float, ...]  # in the units of the message, one per name
    latency_s: float  # image stamp to publication


def answers_in(bag: Bag) -> Mapping[int, Answer]:
    """Answers by image stamp, ns; of an answer in several messages the last. Empty if the bag holds none.

    Raises UserError if several topics hold answers, or an answer has another number of values than names.
    """
    topics = [topic.name for topic in bag.topics if topic.msgtype in _TYPES]
    if len(topics) > 1:
        raise UserError(f"bag {bag.path} holds answers on several topics, {', '.join(topics)}: record one policy's")
    found = {}
    for each in bag.messages(topics) if topics else ():
        message = each.message()
        names = tuple(message.names)
        values = tuple(float(value) for value in message.values[: len(names)])
        if not names or len(values) < len(names):
            raise UserError(f"bag {bag.path}: an answer has {len(values)} values for {len(names)} names")
        found[stamp_ns(message.header)] = Answer(names, values, float(message.latency_s))
    return found
