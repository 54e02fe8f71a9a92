"""Frames that a draft head's target is asked about: from bags, or from what the target itself does in simulation."""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.bag_reader import open_bag
from specvla_ros.evaluation.bag_topics import RAW_IMAGE, TopicChoice, choose_topics
from specvla_ros.evaluation.replay_frames import bag_frames
from specvla_ros.image_message import rgb_from_compressed, rgb_from_image
from specvla_ros.models.policy import Policy
from specvla_ros.training.draft_features import Frame

SIMULATION = "sim"
_FIRST_SEED = 2_000_000  # neither those of `simulate` nor those of `collect`


def bag_source(bags: Sequence[Path], seed: int) -> Iterator[Frame]:
    """Every image of every bag with the instruction in force, bags in a random order that the seed fixes.

    Raises:
        UserError: a bag that cannot be read.
    """
    for i in np.random.default_rng(seed).permutation(len(bags)):
        with open_bag(bags[i]) as bag:
            topics = choose_topics(bag, TopicChoice())
            to_rgb = rgb_from_image if topics.image.msgtype == RAW_IMAGE else rgb_from_compressed
            for frame in bag_frames(bag, topics):
                if frame.instruction:
                    yield to_rgb(frame.image.message()), frame.instruction


def simulation_source(policy: Policy, seed: int) -> Iterator[Frame]:
    """What the camera sees while the target drives the simulated arm, task after task, without end."""
    from specvla_ros.simulation.device_pace import tick_time
    from specvla_ros.simulation.rollout import Clock, Rollout
    from specvla_ros.simulation.table_robot import TableRobot
    from specvla_ros.simulation.tasks import TASKS

    robot = TableRobot()
    seen: list[Frame] = []
    rollout = Rollout(
        Engine(policy, EngineSettings()),
        robot,
        Clock.LOCKSTEP,
        tick_time(None),
        on_look=lambda observation: seen.append((observation.image, observation.instruction)),
    )
    for episode in count():
        rollout.run(TASKS[episode % len(TASKS)].name, _FIRST_SEED + seed + episode)
        yield from seen
        seen.clear()


def require_frames(source: Iterator[Frame]) -> Iterator[Frame]:
    """The same frames.

    Raises:
        UserError: there is not one.
    """
    first = next(source, None)
    if first is None:
        raise UserError("the data hold no image with an instruction: nothing to ask the target about")
    yield first
    yield from source
