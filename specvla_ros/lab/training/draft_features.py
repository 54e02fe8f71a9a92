# SPDX-License-Identifier: Apache-2.0
"""Training data of draft heads: the target's own answers with its hidden states, in shards on disk."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice, takewhile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import DEFAULT_TOPICS, TopicChoice
from specvla_ros.lab.evaluation.frame_sources import count_frames, frames_in
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.plans import MIN_DRAFT_FRAMES, Spread
from specvla_ros.lab.training.artifacts import save_weights
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import OpenVLATarget, require_openvla
from specvla_ros.models.observation import Observation
from specvla_ros.models.settings import ModelSettings
from specvla_ros.models.target import Target

MIN_FRAMES = MIN_DRAFT_FRAMES
SHARD_SAMPLES = MIN_FRAMES - 1
_BATCH = 16  # requests per packed forward
_FORMAT = 2
_SHARDS_AT_ONCE = 8  # shards in memory


@dataclass(frozen=True)
class Sample:
    """One answer of the target."""

    prompt: Tensor  # [prompt_len, hidden], the prompt's embeddings
    # [prompt_len + n - 1, hidden], after the final norm: prompt, then each token of the answer except the last.
    hidden: Tensor
    tokens: Tensor  # int64 [n], the answer


@torch.inference_mode()
def answer(policy: Target, frames: Sequence[Observation], max_text: int = 0) -> list[Sample]:
    """Decodes the target's answers greedily, with all frames in one packed forward per token.

    Answers that are not an action are skipped. `max_text` limits the tokens before the actions.
    """
    prompts = [policy.prompt_embeddings(frame, policy.prompt_layout(frame).ids) for frame in frames]
    decoder, codec = policy.decoder, policy.codec.with_text(max_text)
    cache = new_cache(decoder, slots=len(prompts), slot_rows=max(map(len, prompts)) + codec.max_tokens)
    result = packed_forward(decoder, [Segment(slot, 0, prompt) for slot, prompt in enumerate(prompts)], cache)
    hidden = [[rows] for rows in result.hidden.split([len(prompt) for prompt in prompts])]
    answers = [[token] for token in greedy_choice(result.logits).tolist()]
    root = Ancestry.from_parents((-1,), decoder.device)
    while going := [slot for slot, tokens in enumerate(answers) if not codec.end(tokens, len(tokens) - 1)]:
        newest = torch.tensor([answers[slot][-1] for slot in going], device=decoder.device)
        rows = [len(prompts[slot]) + len(answers[slot]) - 1 for slot in going]
        roots = [Segment(slot, row, token, root) for slot, row, token in zip(going, rows, newest.split(1), strict=True)]
        result = packed_forward(decoder, roots, cache)
        chosen = greedy_choice(result.logits).tolist()
        for slot, row, token in zip(going, result.hidden.split(1), chosen, strict=True):
            hidden[slot].append(row)
            answers[slot].append(token)
    return [
        Sample(prompt, torch.cat(mine), torch.tensor(tokens))
        for prompt, mine, tokens in zip(prompts, hidden, answers, strict=True)
        if not codec.problem(tokens)
    ]


class FeatureStore:
    """Shards of samples in a directory, written atomically; refuses existing features that differ from `described`."""

    def __init__(self, directory: Path, described: dict[str, object]) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "features.json"
        text = json.dumps(described | {"format": _FORMAT}, indent=2, sort_keys=True) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(
                f"{directory} holds features of another target or other data (see {path}); choose another --out, or "
                "remove that directory"
            )
        path.write_text(text, encoding="utf-8")

    @property
    def shards(self) -> list[Path]:
        """The shards before the first missing one."""
        return list(takewhile(Path.exists, map(self._path, count())))

    def fill(
        self,
        policy: Target,
        frames: Iterable[Observation],
        *,
        max_text: int,
        limit_bytes: float,
        on_frame: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Stores the target's answers to frames, until the frames end or the shards' total size reaches `limit_bytes`.

        Called again with the same frames, it resumes after the last complete shard.
        """
        source = iter(frames)
        done = len(self.shards) * SHARD_SAMPLES
        next(islice(source, done, done), None)
        while _size(self.shards) < limit_bytes:
            path = self._path(len(self.shards))
            taken = _fill_shard(path, policy, islice(source, SHARD_SAMPLES), max_text, on_frame, before=done)
            done += taken
            if taken < SHARD_SAMPLES:
                return

    def fill_by_workers(
        self,
        asked: "Asked",
        frames: int,
        spread: Spread,
        *,
        limit_bytes: float,
        on_frame: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Makes the same shards as `fill` from at most `frames` frames of bags, each shard in a worker.

        Meanwhile each worker may store one shard beyond `limit_bytes`.
        """
        jobs = self._jobs(asked, frames)
        missing = [job for job in jobs if not job.path.exists()]
        done = sum(job.frames for job in jobs) - sum(job.frames for job in missing)
        gpu = asked.model.device != "cpu"
        results = run_jobs(make_shard, missing, spread, gpu=gpu, name=lambda job: job.path.name)
        with closing(results):
            while _size(self.shards) < limit_bytes and (ended := next(results, None)) is not None:
                done += ended[1]
                on_frame(done)
        kept: list[Path] = []
        for job in jobs:
            if _size(kept) < limit_bytes:
                kept.append(job.path)
            else:  # `fill` would not have written it
                job.path.unlink(missing_ok=True)

    def _jobs(self, asked: "Asked", frames: int) -> list["ShardJob"]:
        ends = np.cumsum([count_frames(bag, asked.topics) for bag in asked.bags])
        total = min(frames, int(ends[-1]))
        jobs = []
        for number, start in enumerate(range(0, total, SHARD_SAMPLES)):
            first = int(np.searchsorted(ends, start, side="right"))
            skip = start - (int(ends[first - 1]) if first else 0)
            mine = replace(asked, bags=asked.bags[first:])
            jobs.append(ShardJob(self._path(number), mine, skip, min(SHARD_SAMPLES, total - start)))
        return jobs

    def _path(self, number: int) -> Path:
        return self._directory / f"shard-{number:05d}.safetensors"


@dataclass(frozen=True)
class Asked:
    """A worker's input: the target, and the bags whose images it answers."""

    policy: Path  # checkpoint directory
    model: ModelSettings
    bags: tuple[Path, ...]  # in the order of their frames
    topics: TopicChoice = DEFAULT_TOPICS  # topics of the bags
    max_text: int = 0  # maximum number of text tokens before the actions


@dataclass(frozen=True)
class ShardJob:
    """One shard to make."""

    path: Path
    asked: Asked
    skip: int  # frames of the first bag that belong to the previous shard
    frames: int


def make_shard(job: ShardJob) -> int:
    """Makes a shard and returns the number of frames taken. The target is cached for the next shard."""
    asked = job.asked
    policy = _target(asked.policy, asked.model)
    frames = frames_in(policy, asked.bags, asked.topics)
    return _fill_shard(job.path, policy, islice(frames, job.skip, job.skip + job.frames), asked.max_text)


@lru_cache(maxsize=1)
def _target(directory: Path, model: ModelSettings) -> OpenVLATarget:
    return require_openvla(load_target(directory, **vars(model)))


def _size(shards: Sequence[Path]) -> int:
    return sum(shard.stat().st_size for shard in shards)


def _fill_shard(
    path: Path,
    policy: Target,
    frames: Iterator[Observation],
    max_text: int,
    on_frame: Callable[[int], None] = lambda done: None,
    before: int = 0,
) -> int:
    """Writes the answers to frames and returns the number of frames taken; `before` is added to reported progress."""
    samples: list[Sample] = []
    taken = 0
    while batch := list(islice(frames, _BATCH)):
        samples += answer(policy, batch, max_text)
        taken += len(batch)
        on_frame(before + taken)
    if samples:
        _write(path, samples)
    elif taken == SHARD_SAMPLES:
        raise UserError(
            f"the target answered none of {taken} images in a row with an action: give --data that shows its robot "
            "and tasks"
        )
    return taken


def _write(path: Path, samples: Sequence[Sample]) -> None:
    kept = torch.bfloat16  # halves the disk space; training adds more noise than the rounding
    tensors = {
        "lengths": torch.tensor([len(sample.prompt) for sample in samples]),
        "answers": torch.tensor([len(sample.tokens) for sample in samples]),
        "prompts": torch.cat([sample.prompt for sample in samples]).to("cpu", kept),
        "hidden": torch.cat([sample.hidden for sample in samples]).to("cpu", kept),
        "tokens": torch.cat([sample.tokens for sample in samples]).cpu(),
    }
    save_weights(path, tensors)


def read_shard(path: Path) -> list[Sample]:
    """A shard's samples, bfloat16, on the CPU."""
    with safe_open(path, framework="pt") as file:
        names = ("lengths", "answers", "prompts", "hidden", "tokens")
        lengths, answers, prompts, hidden, tokens = map(file.get_tensor, names)
    rows = (lengths + answers - 1).tolist()
    parts = prompts.split(lengths.tolist()), hidden.split(rows), tokens.split(answers.tolist())
    return [Sample(*tensors) for tensors in zip(*parts, strict=True)]


def shuffled_samples(shards: Sequence[Path], *, seed: int, epoch: int) -> Iterator[Sample]:
    """All samples of an epoch in random order, with only a few shards in memory at once."""
    order = np.random.default_rng([seed, epoch])
    shards = [shards[i] for i in order.permutation(len(shards))]
    for start in range(0, len(shards), _SHARDS_AT_ONCE):
        samples = [sample for shard in shards[start : start + _SHARDS_AT_ONCE] for sample in read_shard(shard)]
        for i in order.permutation(len(samples)):
            yield samples[i]
