# SPDX-License-Identifier: Apache-2.0
"""Frames to decode: from bags, or from what the policy itself does in simulation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from specvla_ros.bags.frames import TopicChoice, bag_frames, choose_topics
from specvla_ros.bags.image_message import rgb_from_message
from specvla_ros.bags.reader import open_bag
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.simulate import TABLE, make_robot, tasks_of
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.simulation.rollout import Clock, Rollout, tick_time
from specvla_ros.speculation.settings import NO_HEAD, AcceptanceSettings, DraftSettings, adjusted

SIMULATION = "sim"
_LONG_ANSWER = 16  # tokens, from which drafts pay even on a CPU


def find_bags(directories: Sequence[Path]) -> tuple[Path, ...]:
    """Every bag that is one of these directories or lies directly in one, sorted."""
    bags: list[Path] = []
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"--data {directory} does not exist; `specvla collect --out {directory}` records some")
        children = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
        bags += [path for path in (directory, *children) if (path / "metadata.yaml").exists()]
    if not bags:
        raise UserError(
            f"no bags in {', '.join(map(str, directories))}; `specvla collect --out {directories[0]}` records some"
        )
    return tuple(bags)


def bag_source(bags: Sequence[Path], seed: int) -> Iterator[Observation]:
    """Every image of every bag with the instruction in force, bags in a random order that the seed fixes."""
    for i in np.random.default_rng(seed).permutation(len(bags)):
        with open_bag(bags[i]) as bag:
            topics = choose_topics(bag, TopicChoice())
            for frame in bag_frames(bag, topics):
                if frame.instruction:
                    yield Observation(rgb_from_message(frame.image.message()), frame.instruction, frame.index + 1)
            bag.warn_of_damage()


def simulation_source(
    policy: Target,
    first_seed: int,
    *,
    world: str = TABLE,
    tasks: Sequence[str] = (),
    engine: EngineSettings | None = None,
) -> Iterator[Observation]:
    """What the policy sees while the policy drives a simulated arm by its own choices, task after task, without end.

    Args:
        first_seed: of the first episode's start; the others follow.
        world: `table`, or the name of a LIBERO suite.
        tasks: names of the tasks; none: all of the world.
        engine: settings of which prompt and text lengths are taken.
    """
    names = tasks_of(world, tasks)
    seen: list[Observation] = []
    rollout = Rollout(
        Engine(policy, lossless(policy, engine or EngineSettings())),
        make_robot(world),
        Clock.LOCKSTEP,
        tick_time(None),
        on_look=seen.append,
    )
    for episode in count():
        rollout.run(names[episode % len(names)], first_seed + episode)
        yield from seen
        seen.clear()


def lossless(policy: Target, engine: EngineSettings) -> EngineSettings:
    """Settings of plain decoding; of long answers what gives the same tokens sooner, without any training."""
    codec = policy.codec.with_text(engine.max_reasoning_tokens)
    if codec.max_tokens <= _LONG_ANSWER:
        return replace(engine, mode="ar")
    chunks = codec.horizon > 1
    drafts = adjusted(DraftSettings(nodes=48, head=NO_HEAD), chunk_shift=chunks, temporal=not chunks)
    return replace(engine, mode="spec", draft=drafts, acceptance=AcceptanceSettings())


def require_frames(source: Iterator[Observation]) -> Iterator[Observation]:
    """The same frames; a source without one is refused."""
    first = next(source, None)
    if first is None:
        raise UserError("the data hold no image with an instruction: nothing to ask the target about")
    yield first
    yield from source
