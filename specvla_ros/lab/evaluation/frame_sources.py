# SPDX-License-Identifier: Apache-2.0
"""Frames to decode: from bags, or from the policy's own episodes in simulation."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, cycle
from pathlib import Path

import numpy as np

from specvla_ros.control.convention import GRIPPER, positions_joints
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Drop
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import bags_in, find_bags
from specvla_ros.lab.bags.frames import DEFAULT_TOPICS, TopicChoice, bag_frames, choose_topics, rgb_from_message
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.evaluation.replay import check_senses
from specvla_ros.lab.evaluation.simulate import TABLE, make_robot, starts_of, tasks_of
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.arms import ALL_ARMS
from specvla_ros.lab.simulation.rollout import Clock, Rollout, tick_time
from specvla_ros.lab.simulation.tasks import FRAME_FIRST_SEED
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import NO_HEAD, AcceptanceSettings, DraftSettings, adjusted

_log = logging.getLogger(__name__)

SIMULATION = "sim"
_FRAME_STARTS = 10  # per task, of a world that has few starts
_LONG_ANSWER = 16  # tokens; for longer answers drafts pay even on a CPU


def bags_or_simulation(data: Sequence[str]) -> list[Path] | None:
    """The bags given by --data, with a warning about other files found; None for simulation."""
    if SIMULATION in data and len(data) > 1:
        raise UserError("--data sim cannot be combined with bags: run the command once for each")
    return None if list(data) == [SIMULATION] else [*bags_in([Path(each) for each in data])]


def frame_source(
    policy: Target,
    data: Sequence[Path] | None,
    seed: int,
    topics: TopicChoice = DEFAULT_TOPICS,
    *,
    world: str = TABLE,
    tasks: Sequence[str] = (),
    engine: EngineSettings | None = None,
) -> Iterator[Observation]:
    """Frames of bags, or of directories of bags, in random order; of `simulation_source` if `data` is None.

    Raises UserError if there is no frame, or if the topics do not match the policy's sensors.
    """
    if data is None:
        if topics != DEFAULT_TOPICS:
            raise UserError(
                "--image-topic, --camera, --state-topic, --state-names and --instruction apply to bags only: omit "
                "them with --data sim"
            )
        source = simulation_source(policy, first_frame_seed(world) + seed, world=world, tasks=tasks, engine=engine)
    else:
        check_senses(policy, topics.cameras, topics.state_topic)
        source = frames_in(policy, shuffled(find_bags(data).bags, seed), topics)
    first = next(source, None)
    if first is None:
        raise UserError("--data contains no image with an instruction; give the robot's task with --instruction 'TEXT'")
    return chain([first], source)


def first_frame_seed(world: str) -> int:
    """First seed of the episodes that give frames; a policy is judged on those before it."""
    starts = starts_of(world)
    return FRAME_FIRST_SEED if starts is None else starts - _FRAME_STARTS


def shuffled(bags: Sequence[Path], seed: int) -> list[Path]:
    """Bags in random order."""
    return [bags[i] for i in np.random.default_rng(seed).permutation(len(bags))]


def frames_in(
    policy: Target,
    bags: Sequence[Path],
    topics: TopicChoice,
    on_lost: Callable[[str], None] = lambda what: None,
) -> Iterator[Observation]:
    """Yields every image of every bag with its instruction and the policy's other sensors, bag by bag.

    Images without matching samples of the other sensors are skipped. A warning, and `on_lost`, tell how many, and which
    part of a bag could not be read.
    """
    lead, *others = policy.cameras
    for path in bags:
        missing: list[str] = []
        with open_bag(path) as bag:
            for frame in bag_frames(bag, choose_topics(bag, topics.of(policy)), topics.instruction):
                if frame.missing:
                    missing.append(frame.missing)
                elif frame.instruction:
                    seen = {lead: frame.image} | {name: frame.others[name] for name in others}
                    images = {name: rgb_from_message(message.message()) for name, message in seen.items()}
                    yield Observation(images, frame.instruction, frame.index + 1, state=frame.state)
            lost = [bag.damage] if bag.damage else []
        if missing:
            lost.append(f"{len(missing)} images are skipped, the first: {missing[0]}")
        for what in lost:
            _log.warning("bag %s: %s", path, what)
            on_lost(what)


def count_frames(path: Path, topics: TopicChoice) -> int:
    """Number of frames that `frames_in` yields for a bag, counted without decoding images."""
    with open_bag(path) as bag:
        found = bag_frames(bag, choose_topics(bag, topics), topics.instruction)
        return sum(1 for frame in found if frame.instruction and not frame.missing)


def simulation_source(
    policy: Target,
    first_seed: int,
    *,
    world: str = TABLE,
    tasks: Sequence[str] = (),
    engine: EngineSettings | None = None,
) -> Iterator[Observation]:
    """Yields the observations of a policy that drives a simulated arm, cycling through the tasks.

    A policy of joints drives the arm that has them. Episodes start at `first_seed`, incremented each episode, until the
    world has no further start. `world` is `table` or the name of a LIBERO suite; `engine` gives the lengths of prompt
    and text.
    """
    joints = positions_joints(policy.unnorm_key)
    moved = next((arm for arm in ALL_ARMS if joints and policy.codec.names == (*arm.joints, GRIPPER)), TABLE_ARM)
    names = tasks_of(world, tasks, moved.name)
    seen: list[Observation] = []
    decoder = Engine(policy, lossless(policy, engine or EngineSettings()))
    robot = make_robot(world, moved.name, joints=joints)
    rollout = Rollout(decoder, robot, Clock.LOCKSTEP, tick_time(), on_look=seen.append)
    starts = starts_of(world)
    seeds = count(first_seed) if starts is None else range(first_seed, starts)
    for task, seed in zip(cycle(names), seeds, strict=False):
        rollout.run(task, seed)
        yield from seen
        seen.clear()


def lossless(policy: Target, engine: EngineSettings) -> EngineSettings:
    """Settings that yield plain decoding's tokens, except for near ties in half precision.

    For long answers they use untrained drafters, which are faster.
    """
    codec = policy.codec.with_text(engine.max_reasoning_tokens)
    if codec.max_tokens <= _LONG_ANSWER:
        return replace(engine.without_prefix(), mode="ar")
    chunks = codec.horizon > 1
    drafts = adjusted(DraftSettings(nodes=48, head=NO_HEAD), chunk_shift=chunks, temporal=not chunks)
    return replace(engine.without_prefix(), mode="spec", draft=drafts, acceptance=AcceptanceSettings())


@dataclass
class CollectedAnswers:
    """A policy's own answers, for drafting later ones."""

    answers: dict[tuple[int, ...], None] = field(default_factory=dict)  # distinct answers, in order of first occurrence
    frames: int = 0  # decoded frames
    dropped: Counter[str] = field(default_factory=Counter)  # frames without an action, by reason


def collect_answers(
    policy: Target, frames: Iterable[Observation], on_frame: Callable[[int], None] = lambda done: None
) -> CollectedAnswers:
    """Collects a policy's answers to frames, decoded in order; drafts do not change them.

    Raises UserError if the policy answers with single actions, or answers no frame with actions.
    """
    if policy.codec.horizon < 2:
        raise UserError(
            f"{policy.directory} answers with a single action, but draft.chunk_shift looks up answers with several: "
            "set draft.temporal instead"
        )
    engine = Engine(policy, lossless(policy, EngineSettings()))
    found = CollectedAnswers()
    for frame in frames:
        if frame.stamp_ns <= engine.mailbox.last_stamp_ns:  # another bag or episode
            engine.reset()
        outcome = engine.act(frame)
        found.frames += 1
        if isinstance(outcome, Drop):
            found.dropped[outcome.reason.value] += 1
        else:
            found.answers[outcome.tokens] = None
        on_frame(found.frames)
    if not found.answers:
        raise UserError(
            f"the policy answered none of the {found.frames} images of --data with an action: {dict(found.dropped)}; "
            "give images of its own robot and tasks"
        )
    return found
