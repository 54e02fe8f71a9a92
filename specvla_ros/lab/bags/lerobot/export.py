# SPDX-License-Identifier: Apache-2.0
"""`specvla export`: bags as a LeRobot dataset. Each image becomes one frame; none is resampled.

LeRobot's timestamps are multiples of 1 / fps. The images' own stamps are in the feature `stamp_ns`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.demonstrations import STATE_TOPIC
from specvla_ros.lab.bags.frames import (
    ANSWERS,
    COMPRESSED_IMAGE,
    JOINT_STATE,
    RAW_IMAGE,
    BagFrame,
    TopicChoice,
    action_names_of,
    bag_frames,
    choose_topics,
    recorded_ns,
    rgb_from_message,
)
from specvla_ros.lab.bags.lerobot.episode import STAMP_KEY
from specvla_ros.lab.bags.lerobot.export_plan import ExportPlan
from specvla_ros.lab.bags.lerobot.writer import Frame, Layout, LeRobotWriter, Numbers
from specvla_ros.lab.bags.reader import Bag, open_bag
from specvla_ros.messages.image_message import stamp_ns

IMAGES, STATE, ACTION = "observation.images.{}", "observation.state", "action"
POLICY_ACTION, POLICY_LATENCY = "policy.action", "policy.latency_s"  # LeRobot trains on keys with other beginnings
_GENERIC = ("image_raw", "image_rect", "image", "compressed", "color", "rgb")  # parts of a topic that name no camera
_UNEVEN = 0.5  # of a period: maximum difference between two images' distance and 1 / fps
_SHOWN_BAGS = 5


@dataclass
class ExportResult:
    """The number of exported frames, and the reasons for others."""

    episodes: int = 0
    frames: int = 0
    fps: int = 0
    rate_hz: float = 0.0  # of the images, by the median of their periods
    jitter_s: float = 0.0  # maximum difference of a period from 1 / fps
    answered: int = 0  # frames with an answer of the policy
    dropped: Counter[str] = field(default_factory=Counter)  # images that became no frame, by reason
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Answer:
    """The first action of an answer."""

    names: tuple[str, ...]
    values: tuple[float, ...]  # in the units of the message, one per name
    latency_s: float  # image stamp to publication


@dataclass(frozen=True)
class _Survey:
    """A bag's content, without its images."""

    path: Path
    choice: TopicChoice
    stamps_ns: tuple[int, ...]  # of the images that become frames
    sizes: Mapping[str, tuple[int, int]]  # height and width of the first frame's images, by feature
    state_names: tuple[str, ...]
    action_dims: int  # 0: no recorded actions
    action_names: tuple[str, ...]  # of the joints that the recorded actions position; empty: not given
    answers: Mapping[int, _Answer]  # the policy's, by stamp
    unread: tuple[str, ...]  # topics of cameras that are not exported

    def same(self) -> dict[str, Any]:
        """Properties that all bags of a dataset must have in common."""
        names = {each.names for each in self.answers.values()}
        action = {"action": self.action_dims, "the actions' names": self.action_names}
        return {"images": dict(self.sizes), "state": self.state_names, **action, "answers": names}


def export(
    bags: Sequence[Path],
    out: Path,
    plan: ExportPlan,
    topics: TopicChoice,
    answers: Mapping[Path, Path] | None = None,
    on_bag: Callable[[int], None] = lambda done: None,
) -> ExportResult:
    """Writes each bag as an episode of a new dataset.

    All bags are examined before anything is written. The actions are the recorded ones or, where no bag has any, the
    policy's answers.

    Args:
        answers: bags of a policy's answers, by the bag that they answer; by default those in the bag itself.
        on_bag: gets the number of written bags.

    Raises:
        UserError: the bags differ in cameras, state or actions; images are unevenly spaced; or there is no frame.
    """
    result = ExportResult()
    surveys = [_survey(bag, topics, (answers or {}).get(bag), result) for bag in bags]
    surveys = [survey for survey in surveys if survey.stamps_ns]
    if not surveys:
        why = ", ".join(f"{count} images: {reason}" for reason, count in result.dropped.items())
        raise UserError(f"no frame can be exported: {why or 'the bags hold no images'}")
    _check_same(surveys)
    if unread := {topic: None for survey in surveys for topic in survey.unread}:
        result.notes.append(f"not exported: {', '.join(unread)}; add a camera with --camera NAME=TOPIC")
    _set_rate(result, surveys, plan)
    with LeRobotWriter(out, _layout(surveys, plan, result)) as writer:
        for done, survey in enumerate(surveys):
            result.episodes += bool(writer.add_episode(_frames(survey, plan, result)))
            on_bag(done + 1)
        result.frames = writer.frames
    return result


def _survey(path: Path, choice: TopicChoice, answers: Path | None, result: ExportResult) -> _Survey:
    with open_bag(path) as bag:
        held = {topic.name: topic.msgtype for topic in bag.topics}
        if choice.state_topic is None and held.get(STATE_TOPIC) == JOINT_STATE:
            choice = replace(choice, state_topic=STATE_TOPIC)
        chosen = choose_topics(bag, choice)
        answered = _answers(bag, answers)
        stamps, first, dims = list[int](), None, Counter[int]()
        for frame in bag_frames(bag, chosen, choice.instruction):
            stamp = recorded_ns(frame.image)
            if reason := _unusable(frame, chosen.action is not None, answered, stamp):
                result.dropped[reason] += 1
                continue
            stamps.append(stamp)
            first = first or frame
            dims[len(frame.recorded or ())] += 1
        if bag.damage:
            result.notes.append(f"bag {path}: {bag.damage}")
        if len(dims) > 1:
            raise UserError(f"bag {path}: the recorded actions have different numbers of values: {sorted(dims)}")
        if any(later <= earlier for earlier, later in pairwise(stamps)):
            raise UserError(f"bag {path}: the images' stamps do not increase")
        if first is not None and chosen.action is None and not answered:
            raise UserError(
                f"bag {path} has no actions: name their topic with --action-topic, or give a replay with --answers"
            )
        images = _images(first, choice, chosen.image.name) if first is not None else {}
        read = {chosen.image.name, *(topic.name for topic in chosen.cameras.values())}
        unread = (name for name, kind in held.items() if kind in (RAW_IMAGE, COMPRESSED_IMAGE) and name not in read)
        return _Survey(
            path,
            choice,
            tuple(stamps),
            {key: image.shape[:2] for key, image in images.items()},
            chosen.states.names if chosen.state is not None else (),
            next(iter(dims), 0),
            action_names_of(bag, chosen.action) if chosen.action is not None else (),
            answered,
            tuple(unread),
        )


def _answers(bag: Bag, other: Path | None) -> Mapping[int, _Answer]:
    if other is None:
        return _answers_in(bag)
    with open_bag(other) as replayed:
        return _answers_in(replayed)


def _answers_in(bag: Bag) -> Mapping[int, _Answer]:
    """Answers by image stamp, ns; of an answer in several messages the last. Empty if the bag holds none.

    Raises UserError if several topics hold answers, or an answer has another number of values than names.
    """
    topics = [topic.name for topic in bag.topics if topic.msgtype in ANSWERS]
    if len(topics) > 1:
        raise UserError(f"bag {bag.path} holds answers on several topics, {', '.join(topics)}: record one policy's")
    found = {}
    for each in bag.messages(topics) if topics else ():
        message = each.message()
        names = tuple(message.names)
        values = tuple(float(value) for value in message.values[: len(names)])
        if not names or len(values) < len(names):
            raise UserError(f"bag {bag.path}: an answer has {len(values)} values for {len(names)} names")
        found[stamp_ns(message.header)] = _Answer(names, values, float(message.latency_s))
    return found


def _unusable(frame: BagFrame, has_actions: bool, answers: Mapping[int, _Answer], stamp: int) -> str:
    """The reason why an image cannot become a frame; empty if it can."""
    if frame.missing:
        return re.sub(r", the nearest is .* away", "", frame.missing)  # one reason, not one per image
    if not frame.instruction:
        return "recorded before any instruction"
    if not has_actions:
        return "" if stamp in answers or not answers else "no answer of the policy"
    if frame.recorded is None:
        return "no recorded action before the next image"
    return "" if np.isfinite(frame.recorded).all() else "the recorded action is not finite"


def _check_same(surveys: Sequence[_Survey]) -> None:
    """Raises UserError if the bags cannot be episodes of one dataset."""
    first = surveys[0]
    for other in surveys[1:]:
        for name, value in other.same().items():
            wanted = first.same()[name]
            if value != wanted and not (name == "answers" and not (value and wanted)):
                raise UserError(
                    f"bags {first.path} and {other.path} differ in {name}: {wanted} and {value}; export them separately"
                )


def _set_rate(result: ExportResult, surveys: Sequence[_Survey], plan: ExportPlan) -> None:
    """Sets fps; UserError if images are unevenly spaced, or come at another rate."""
    periods = [np.diff(survey.stamps_ns) * 1e-9 for survey in surveys]
    everything = np.concatenate(periods)
    if not len(everything):
        if not plan.fps:
            raise UserError("no bag has two images, so that their rate is unknown: give it with --fps")
        result.fps = plan.fps
        return
    result.rate_hz = float(1 / np.median(everything))
    result.fps = plan.fps or max(1, round(result.rate_hz))
    if not plan.fps and abs(result.rate_hz / result.fps - 1) > 0.05:
        raise UserError(
            f"the images come at {result.rate_hz:.2f} Hz, but LeRobot's rate is a whole number: choose it with --fps"
        )
    result.jitter_s = float(np.abs(everything - 1 / result.fps).max())
    wrong = {
        survey.path: found
        for survey, each in zip(surveys, periods, strict=True)
        if (found := _uneven(each, result.fps))
    }
    if wrong and not plan.uneven:
        listed = "\n".join(f"  {path}: {found}" for path, found in [*wrong.items()][:_SHOWN_BAGS])
        raise UserError(
            f"the images of {len(wrong)} of {len(surveys)} bags are not {1e3 / result.fps:.0f} ms apart, the period of "
            f"{result.fps} fps (they come at {result.rate_hz:.2f} Hz):\n{listed}\nleave these bags out, or export them "
            "with --uneven"
        )
    result.notes += [f"bag {path}: {found}" for path, found in wrong.items()]


def _uneven(periods: np.ndarray, fps: int) -> str:
    """The periods, in seconds, that are not 1 / fps; empty if all are."""
    wrong = periods[np.abs(periods * fps - 1) > _UNEVEN]
    if not len(wrong):
        return ""
    return f"{len(wrong)} of {len(periods)} periods are off, from {wrong.min():.3f} to {wrong.max():.3f} s"


def _layout(surveys: Sequence[_Survey], plan: ExportPlan, result: ExportResult) -> Layout:
    first = surveys[0]
    answer = next((each for survey in surveys for each in survey.answers.values()), None)
    numbers = {STAMP_KEY: Numbers("int64")}
    if first.state_names:
        numbers[STATE] = Numbers("float32", first.state_names)
    names = answer.names if answer is not None else ()
    dims = first.action_dims or len(names)
    given = next((each for each in (first.action_names, names) if len(each) == dims), ())
    numbers[ACTION] = Numbers("float32", given or tuple(f"action_{i}" for i in range(dims)))
    if answer is not None:
        numbers |= {POLICY_ACTION: Numbers("float32", names), POLICY_LATENCY: Numbers("float32")}
        if not first.action_dims:
            result.notes.append("no bag has recorded actions: the feature action holds the policy's answers")
    odd = [key for key, size in first.sizes.items() if size[0] % 2 or size[1] % 2]
    if odd and not plan.images:
        raise UserError(f"videos need an even width and height, but {odd[0]} has {first.sizes[odd[0]]}: give --images")
    return Layout(result.fps, first.sizes, numbers, plan.images, plan.robot)


def _frames(survey: _Survey, plan: ExportPlan, result: ExportResult) -> Iterator[Frame]:
    """The frames of a bag, with their images."""
    wanted, last_ns = frozenset(survey.stamps_ns), 0
    with open_bag(survey.path) as bag:
        chosen = choose_topics(bag, survey.choice)
        for frame in bag_frames(bag, chosen, survey.choice.instruction):
            stamp = recorded_ns(frame.image)
            if stamp not in wanted or _unusable(frame, chosen.action is not None, survey.answers, stamp):
                continue
            try:
                images = _images(frame, survey.choice, chosen.image.name)
            except UserError as error:
                result.dropped[f"an image cannot be read: {error}"] += 1
                continue
            if last_ns and not plan.uneven and _uneven(np.array([(stamp - last_ns) * 1e-9]), result.fps):
                raise UserError(
                    f"bag {survey.path}: unreadable images leave a gap before image {frame.index}; give --uneven"
                )
            last_ns = stamp
            for key, image in images.items():
                if image.shape[:2] != survey.sizes[key]:
                    raise UserError(
                        f"bag {survey.path}, image {frame.index}: {key} is {image.shape[:2]}, not {survey.sizes[key]}"
                    )
            answer = survey.answers.get(stamp)
            result.answered += answer is not None
            yield Frame(images, _numbers(survey, frame, stamp, answer), frame.instruction)


def _numbers(survey: _Survey, frame: BagFrame, stamp: int, answer: _Answer | None) -> dict[str, Any]:
    numbers: dict[str, Any] = {STAMP_KEY: [stamp]}
    if frame.state is not None:
        numbers[STATE] = frame.state
    recorded = frame.recorded if survey.action_dims else None
    numbers[ACTION] = recorded if recorded is not None else answer.values if answer is not None else ()
    if survey.answers:
        nothing = [np.nan] * len(next(iter(survey.answers.values())).names)
        numbers[POLICY_ACTION] = answer.values if answer is not None else nothing
        numbers[POLICY_LATENCY] = [answer.latency_s if answer is not None else np.nan]
    return numbers


def _images(frame: BagFrame, choice: TopicChoice, lead: str) -> dict[str, np.ndarray]:
    """The images of a frame by feature, RGB uint8 [height, width, 3]."""
    parts = [part for part in lead.split("/") if part and part not in _GENERIC]
    first = "_".join(parts) or "camera"
    if first in choice.cameras:
        raise UserError(f"--camera {first}=…: the first camera, {lead}, has this name; give the further one another")
    messages = {first: frame.image} | {name: frame.others[name] for name in choice.cameras}
    return {IMAGES.format(name): rgb_from_message(message.message()) for name, message in messages.items()}
