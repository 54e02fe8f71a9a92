# SPDX-License-Identifier: Apache-2.0
"""Demonstrations as training data: reads bags and makes batches."""

import hashlib
import json
import logging
import multiprocessing
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specvla_ros.control.convention import ACTION_NAMES, is_gripper
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.demonstrations import (
    ACTION_TOPIC,
    HINDSIGHT_ACTION_TOPIC,
    HINDSIGHT_INSTRUCTION_TOPIC,
)
from specvla_ros.lab.bags.frames import TopicChoice, action_names_of, bag_frames, choose_topics, rgb_from_message
from specvla_ros.lab.bags.reader import Bag, bag_files, open_bag
from specvla_ros.lab.files import write_json
from specvla_ros.models.codecs.bins import BinsCodec
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import normalise_instruction

PADDING = -100  # after answers; ignored by PyTorch's cross-entropy
_VERSION = 6
# Steps per action range that digits are trained on; 1 mm at the table. Finer differences in demonstrations are
# tracking noise of the arm, which a policy can only memorise. The joints' ranges are wider than the tool's.
_DIGIT_STEPS = 100
_JOINT_DIGIT_STEPS = 250
_MANY_BAGS = 64
_VALIDATION_SHARE = 20  # one in this many episodes
_ARRAYS = ("states", "actions", "instruction_of", "episode_of", "time_ns")  # one file each, next to the images
_BRIGHTNESS = 0.1
_TINT = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DemonstrationSet:
    """All steps of all demonstrations.

    A step is one image of each camera with one action per known instruction: its episode's instruction and those of the
    bag's hindsight topics. All steps have the same number of instructions.
    """

    images: np.ndarray  # uint8 [steps, cameras, size, size, 3], mapped from a file
    states: np.ndarray  # float64 [steps, state_dims]
    actions: np.ndarray  # float64 [steps, asked, action_dim], in the robot's units; of joints: their goals
    instruction_of: np.ndarray  # int64 [steps, asked], index into `instructions`
    episode_of: np.ndarray  # int64 [steps], index of the bag
    time_ns: np.ndarray  # int64 [steps], time of the images
    instructions: tuple[str, ...]  # sorted and unique
    state_names: tuple[str, ...] = ()  # names of the state's values; empty if they have none
    action_names: tuple[str, ...] = ()  # names of the actions' joints, and perhaps GRIPPER; empty: of a tool's action

    @property
    def starts(self) -> np.ndarray:
        """The joints' positions, from which displacements count, float64 [steps, action_dim]; zeros for other actions.

        Raises UserError if the state lacks a joint of the actions.
        """
        found = np.zeros((len(self.actions), self.actions.shape[-1]))
        joints = [name for name in self.action_names if not is_gripper(name)]
        if missing := [name for name in joints if name not in self.state_names]:
            raise UserError(
                f"the actions position {', '.join(joints)}, but the state lacks {', '.join(missing)}: displacements "
                "count from the joints in the image; give the joints' topic with --state-topic"
            )
        for column, name in enumerate(self.action_names):
            if not is_gripper(name):
                found[:, column] = self.states[:, self.state_names.index(name)]
        return found

    @property
    def validation(self) -> np.ndarray:
        """Mask [steps] of every 20th episode, which is held out from training."""
        return self.episode_of % _VALIDATION_SHARE == _VALIDATION_SHARE - 1


def load_demonstrations(
    bags: Sequence[Path],
    cache: Path,
    size: int,
    topics: TopicChoice,
    on_progress: Callable[[int, int], None] | None = None,
) -> DemonstrationSet:
    """Reads bags into `cache`, or maps the cache of an earlier call with the same bags.

    Args:
        bags: hold images, an instruction, and a recorded action of seven values, or of named joints, per image.
        size: side of the images in pixels; they are squeezed like in OpenVLA's image processor (bicubic, on bytes).
        on_progress: called with the number of bags read and of all bags.

    Raises:
        UserError: a bag has no actions, or no such camera or state; or an action has other values than named.
    """
    names = "\n".join(f"{bag.resolve()} {max(each.stat().st_mtime_ns for each in bag_files(bag))}" for bag in bags)
    fingerprint = hashlib.sha256(f"{_VERSION} {size} {topics}\n{names}".encode()).hexdigest()
    index = cache / "index.json"
    if not index.exists() or json.loads(index.read_text())["fingerprint"] != fingerprint:
        _fill(bags, cache, size, topics, fingerprint, on_progress)
    described = json.loads(index.read_text())
    images = np.load(cache / "images.npy", mmap_mode="r")
    arrays = {name: np.load(cache / f"{name}.npy") for name in _ARRAYS}
    instructions, state_names, action_names = (
        tuple(described[each]) for each in ("instructions", "state_names", "action_names")
    )
    return DemonstrationSet(
        images, **arrays, instructions=instructions, state_names=state_names, action_names=action_names
    )


@dataclass(frozen=True)
class _Steps:
    """One bag's steps; see DemonstrationSet."""

    images: np.ndarray
    states: np.ndarray
    actions: np.ndarray
    texts: tuple[tuple[str, ...], ...]
    time_ns: tuple[int, ...]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    left_out: str = ""  # the number of skipped images, and why


def _fill(
    bags: Sequence[Path],
    cache: Path,
    size: int,
    topics: TopicChoice,
    fingerprint: str,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    actions: list[np.ndarray] = []
    states: list[np.ndarray] = []
    texts: list[tuple[str, ...]] = []
    episodes: list[int] = []
    times: list[int] = []
    names: tuple[str, ...] = ()  # names of the state's values
    action_names: tuple[str, ...] = ()
    with (cache / "images.raw").open("wb") as images:
        for episode, (bag, steps) in enumerate(zip(bags, _read(bags, size, topics), strict=True)):
            if steps.left_out:
                _log.warning("bag %s: %s", bag, steps.left_out)
            if any(len(asked) != len((texts or steps.texts)[0]) for asked in steps.texts):
                raise UserError(
                    f"bag {bag} has {len(steps.texts[0])} instructions per image, earlier bags have {len(texts[0])}: "
                    "train on bags of one kind"
                )
            if states and len(steps.states) and (steps.state_names, steps.states.shape[1]) != (names, len(states[0])):
                raise UserError(
                    f"bag {bag}: the state on {topics.state_topic} has {', '.join(steps.state_names)}, but earlier "
                    f"bags have {', '.join(names)}: choose the values and their order with --state-names"
                )
            if actions and len(steps.actions) and steps.action_names != action_names:
                one, other = (", ".join(each or ACTION_NAMES) for each in (steps.action_names, action_names))
                raise UserError(f"bag {bag}: its actions are of {one}, but earlier bags' are of {other}")
            names, action_names = names or steps.state_names, action_names or steps.action_names
            images.write(steps.images.tobytes())
            actions += list(steps.actions)
            states += list(steps.states)
            texts += steps.texts
            episodes += [episode] * len(steps.texts)
            times += steps.time_ns
            if on_progress is not None:
                on_progress(episode + 1, len(bags))
    if not actions:
        raise UserError(
            f"the {len(bags)} bags hold no image with an instruction and a recorded action; name the topics of images "
            "and actions with --image-topic and --action-topic"
        )
    raw = cache / "images.raw"
    # Adds NumPy's header to the pixels, so that they can be mapped.
    shape = (len(actions), 1 + len(topics.cameras), size, size, 3)
    np.save(cache / "images.npy", np.memmap(raw, dtype=np.uint8, mode="r", shape=shape))
    raw.unlink()
    instructions = sorted({text for asked in texts for text in asked})
    index_of = {text: index for index, text in enumerate(instructions)}
    instruction_of = [[index_of[text] for text in asked] for asked in texts]
    for name, rows in zip(_ARRAYS, (states, actions, instruction_of, episodes, times), strict=True):
        np.save(cache / f"{name}.npy", np.array(rows))
    described = {"fingerprint": fingerprint, "instructions": instructions, "bags": len(bags), "steps": len(actions)}
    described |= {"state_names": names, "action_names": action_names}
    write_json(cache / "index.json", described)


def _read(bags: Sequence[Path], size: int, topics: TopicChoice) -> Iterator[_Steps]:
    """Reads the bags in order, on all cores if there are many."""
    if len(bags) < _MANY_BAGS:
        yield from (_read_bag(bag, size, topics) for bag in bags)
        return
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_read_bag, bags, [size] * len(bags), [topics] * len(bags), chunksize=16)


def _read_bag(bag: Path, size: int, topics: TopicChoice) -> _Steps:
    images: list[list[np.ndarray]] = []
    states: list[np.ndarray] = []
    missing: list[str] = []
    actions: list[np.ndarray] = []
    texts: list[tuple[str, ...]] = []
    times: list[int] = []
    untaught = 0  # images without an instruction or an action
    with open_bag(bag) as reader:
        chosen = choose_topics(reader, topics)
        if chosen.action is None:
            raise UserError(f"bag {bag} has no actions on {ACTION_TOPIC}; name their topic with --action-topic")
        hindsight, action_names = _hindsight(reader), action_names_of(reader, chosen.action)
        for frame in bag_frames(reader, chosen, topics.instruction):
            if frame.missing:
                missing.append(frame.missing)
                continue
            others = [answers.get(frame.image.time_ns) for answers in hindsight.values()]
            if frame.recorded is None or not frame.instruction or any(other is None for other in others):
                untaught += 1
                continue
            answers = [frame.recorded, *(other for other in others if other is not None)]
            wanted = len(action_names or ACTION_NAMES)
            if any(len(answer) != wanted for answer in answers) or not np.isfinite(answers).all():
                raise UserError(f"bag {bag}, image {frame.index}: the recorded action must be {wanted} finite numbers")
            messages = [frame.image, *(frame.others[name] for name in topics.cameras)]
            seen = [Image.fromarray(rgb_from_message(message.message())) for message in messages]
            images.append([np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)) for image in seen])
            states.append(frame.state if frame.state is not None else np.empty(0))
            actions.append(np.array(answers))
            texts.append((normalise_instruction(frame.instruction), *hindsight))
            times.append(frame.image.time_ns)
        reader.warn_of_damage()
    if missing and not images:
        raise UserError(f"bag {bag}: no image has all inputs: {missing[0]}")
    reasons = [f"{len(missing)} images are skipped, the first: {missing[0]}"] if missing else []
    if untaught > 1:  # the last image's action is often not recorded
        reasons.append(f"{untaught} images are skipped: no instruction, or no recorded action before the next image")
    left_out = "; ".join(reasons)
    names, arrays = chosen.states.names, (np.array(images, np.uint8), np.array(states), np.array(actions))
    return _Steps(*arrays, tuple(texts), tuple(times), names, action_names, left_out)


def _hindsight(reader: Bag) -> dict[str, dict[int, tuple[float, ...]]]:
    """The expert's actions under other instructions: instruction -> time -> action."""
    pattern = re.compile(HINDSIGHT_ACTION_TOPIC.format(r"(\w+)"))
    found = {match[1]: topic.name for topic in reader.topics if (match := pattern.fullmatch(topic.name))}
    asked = {HINDSIGHT_INSTRUCTION_TOPIC.format(name): name for name in sorted(found)}
    if not found:
        return {}
    texts: dict[str, str] = {}
    actions: dict[str, dict[int, tuple[float, ...]]] = {name: {} for name in found.values()}
    for message in reader.messages((*asked, *found.values())):
        if message.topic in actions:
            actions[message.topic][message.time_ns] = tuple(message.message().data)
        else:
            texts[asked[message.topic]] = normalise_instruction(message.message().data)
    return {texts[name]: actions[found[name]] for name in sorted(texts)}


def action_statistics(actions: np.ndarray, names: Sequence[str] = ACTION_NAMES) -> dict[str, Any]:
    """Action statistics for OpenVLA's config.json from float64 [..., n]: 1st and 99th percentile.

    The last value is not scaled if `names` end with a gripper's.
    """
    low, high = np.quantile(actions.reshape(-1, actions.shape[-1]), (0.01, 0.99), axis=0)
    mask = [True] * len(low)
    if is_gripper(names[-1]):
        low[-1], high[-1], mask[-1] = 0.0, 1.0, False
    return {"action": {"q01": low.tolist(), "q99": high.tolist(), "mask": mask}}


def state_statistics(states: np.ndarray) -> dict[str, Any]:
    """Statistics of the robot's state, float64 [steps, dims], under OpenVLA-OFT's name."""
    low, high = np.quantile(states, (0.01, 0.99), axis=0)
    return {"proprio": {"q01": low.tolist(), "q99": high.tolist(), "mask": [True] * len(low)}}


@dataclass(frozen=True)
class Batch:
    """Some steps of demonstrations, each with all its known instructions."""

    pixels: Tensor  # float32 [batch, cameras, 3 * towers, size, size], normalised
    prompt_ids: Tensor  # int64 [batch, asked, n], padded on the right
    lengths: Tensor  # int64 [batch, asked], number of ids without padding
    answers: Tensor  # int64 [batch, asked, n], the tokens of each answer; shorter ones end with PADDING

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in vars(self).values()))


class Batches:
    """Makes batches of a policy's demonstrations."""

    def __init__(self, policy: OpenVLATarget, data: DemonstrationSet) -> None:
        self._images = data.images
        # A chunk includes the next actions, which only follow from the episode's own instruction.
        chunks = not isinstance(policy.codec, BinsCodec)
        self._instruction_of = data.instruction_of[:, :1] if chunks else data.instruction_of
        prompts = [torch.tensor(policy.prompt.ids(text)) for text in data.instructions]
        self._lengths = torch.tensor([len(ids) for ids in prompts])
        self._prompts = pad_sequence(prompts, batch_first=True)
        self._states = torch.from_numpy(policy.state.ids(data.states)) if policy.state is not None else None
        if isinstance(policy.codec, BinsCodec):
            normalised = policy.codec.statistics.normalise(data.actions - data.starts[:, None])
            self._answers = torch.from_numpy(policy.codec.tokenizer.encode(normalised))
        else:
            self._answers = _chunk_answers(policy.codec, data)
        towers = policy.image_processor.towers
        self._mean = torch.from_numpy(np.concatenate([tower.mean for tower in towers]))[:, None, None]
        self._std = torch.from_numpy(np.concatenate([tower.std for tower in towers]))[:, None, None]
        self._towers = len(towers)

    def make(self, steps: np.ndarray, augment: np.random.Generator | None = None) -> Batch:
        """Makes a batch of these steps; `augment` changes the brightness and tint of each image."""
        order = np.argsort(steps)  # reads the file from front to back
        steps = steps[order]
        pixels = torch.from_numpy(self._images[steps]).permute(0, 1, 4, 2, 3).float().div_(255.0)
        if augment is not None:
            cameras = pixels.shape[1]
            gain = augment.uniform(1 - _BRIGHTNESS, 1 + _BRIGHTNESS, (len(steps), cameras, 1, 1, 1))
            tint = augment.uniform(-_TINT, _TINT, (len(steps), cameras, 3, 1, 1))
            pixels.mul_(torch.from_numpy(gain)).add_(torch.from_numpy(tint)).clamp_(0.0, 1.0)
        pixels = (pixels.repeat(1, 1, self._towers, 1, 1) - self._mean) / self._std
        asked, rows = torch.from_numpy(self._instruction_of[steps]), torch.from_numpy(steps)
        prompts, lengths = self._prompts[asked], self._lengths[asked]
        if self._states is not None:
            states = self._states[rows][:, None].expand(-1, asked.shape[1], -1)
            prompts = torch.cat((prompts[..., :1], states, prompts[..., 1:]), dim=-1)
            lengths = lengths + states.shape[-1]
        return Batch(pixels, prompts, lengths, self._answers[rows])


def action_chunks(
    data: DemonstrationSet, horizon: int, action_range: tuple[np.ndarray, np.ndarray], step_s: float | None
) -> np.ndarray:
    """The chunk of actions that starts at each image, float64 [steps, horizon, action_dim].

    Uses each episode's own instruction; after its end the last action repeats. Joints count from their positions at the
    image. Values are clipped to the usual range,
    as for bins: a few outliers would give a FAST tokenizer more coefficients than it has ids.

    Args:
        action_range: smallest and largest usual value of each dimension.
        step_s: seconds between a chunk's actions, each taken from the nearest image; None: one action per image.
    """
    steps = np.arange(len(data.actions))
    rows = steps[:, None] + np.arange(horizon)
    if step_s is not None:
        episodes = np.split(steps, np.flatnonzero(np.diff(data.episode_of)) + 1)
        rows = np.concatenate([_rows_at(data.time_ns, mine, horizon, step_s) for mine in episodes])
    last = np.searchsorted(data.episode_of, data.episode_of, side="right") - 1
    chunks: np.ndarray = data.actions[:, 0][np.minimum(rows, last[:, None])] - data.starts[:, None]
    return chunks.clip(*action_range)


def _rows_at(time_ns: np.ndarray, mine: np.ndarray, horizon: int, step_s: float) -> np.ndarray:
    """The nearest step of an episode for each action of each step's chunk: int64 [its steps, horizon]."""
    times = time_ns[mine]
    wanted = times[:, None] + np.rint(np.arange(horizon) * step_s * 1e9).astype(np.int64)
    behind = np.searchsorted(times, wanted).clip(1, len(times) - 1) if len(times) > 1 else np.zeros_like(wanted)
    before = np.maximum(behind - 1, 0)
    nearer = np.where(wanted - times[before] <= times[behind] - wanted, before, behind)
    return mine[nearer]


def _chunk_answers(codec: Codec, data: DemonstrationSet) -> Tensor:
    """Each chunk's tokens, an end token and PADDING, int64 [steps, 1, longest answer]."""
    end = min(codec.end_ids)  # type: ignore[attr-defined]
    chunks = action_chunks(data, codec.horizon, codec.action_range, codec.dt_s)
    if isinstance(codec, DigitsCodec):
        low, high = codec.action_range
        steps = _JOINT_DIGIT_STEPS if data.action_names else _DIGIT_STEPS
        step = np.where(high > low, high - low, 1.0) / steps
        chunks = low + np.rint((chunks - low) / step) * step
    answers = [torch.tensor((*codec.encode(chunk), end)) for chunk in chunks]
    return pad_sequence(answers, batch_first=True, padding_value=PADDING)[:, None]


def shuffled(steps: np.ndarray, batch_size: int, *, seed: int, start: int = 0) -> Iterator[np.ndarray]:
    """Endless batches of steps, int64 [n], each epoch in a new order that depends only on the seed and the epoch.

    A batch has at most n rows; `start` batches are skipped, to resume a training.
    """
    size = min(batch_size, len(steps))
    per_epoch = len(steps) // size
    epoch, skip = divmod(start, per_epoch)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(steps)
        for i in range(skip, per_epoch):
            yield order[i * size : (i + 1) * size]
        epoch, skip = epoch + 1, 0
