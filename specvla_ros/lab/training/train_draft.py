# SPDX-License-Identifier: Apache-2.0
"""`specvla train-draft`: trains an EAGLE draft head to predict its target's hidden states and tokens."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import DEFAULT_TOPICS, TopicChoice
from specvla_ros.lab.evaluation.frame_sources import SIMULATION, count_frames, frame_source, shuffled
from specvla_ros.lab.evaluation.replay import check_senses
from specvla_ros.lab.evaluation.run_directory import file_hashes
from specvla_ros.lab.plans import THIS_PROCESS, DraftTraining, Spread
from specvla_ros.lab.training.artifacts import save_draft_head
from specvla_ros.lab.training.batched_forward import draft_features
from specvla_ros.lab.training.draft_features import MIN_FRAMES, Asked, FeatureStore, Sample, shuffled_samples
from specvla_ros.lab.training.trainer import STATE_DIRECTORY, Progress, Trainer, begin_or_resume, warm_up
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.settings import ModelSettings
from specvla_ros.models.target import Target
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tree import Tree

_FEATURE_WEIGHT, _TOKEN_WEIGHT = 1.0, 0.1  # Spec-VLA section 5.1
_LATER_STEP = 0.8  # weight of each step fed with the head's own features, relative to the previous step
_WARM_UP = 2000
_CLIP = 0.5
_BETAS = (0.9, 0.95)
_NOISE = 0.2 * 512  # EAGLE: uniform noise of this width divided by the sequence's length
_HELD_OUT = 20  # one in this many shards, at least one
_MAX_SAMPLES = 256  # per validation


@dataclass(frozen=True)
class DraftValidation:
    """Strict acceptance of the head's trees on held-out answers."""

    epoch: int  # passes over the features before it
    tau: float  # tokens committed per verification forward
    # Mean accept length by the position of the first drafted token in the answer (Spec-VLA, Table 3).
    accept_length_by_place: tuple[tuple[int, float], ...]
    samples: int  # drafted answers


def check_frames(data: Sequence[Path] | None, frames: int, topics: TopicChoice = DEFAULT_TOPICS) -> None:
    """Refuses too few frames before the target is loaded; `data` as in `collect_features`."""
    if frames < MIN_FRAMES:
        raise UserError(f"--frames {frames} is too few to train on and to validate with; {MIN_FRAMES} are the minimum")
    if data is None:
        return
    held = 0
    for path in find_bags(data).bags:
        held += count_frames(path, topics)
        if held >= MIN_FRAMES:
            return
    raise UserError(
        f"the data hold {held} images with an instruction, too few to train on and to validate with; {MIN_FRAMES} are "
        "the minimum: give more bags, or run the target in simulation with train-draft --data sim"
    )


def check_output(out: Path) -> None:
    """Raises UserError if a directory holds a finished head, which the training would replace at its end."""
    if (out / "model.safetensors").exists() and not (out / STATE_DIRECTORY).exists():
        raise UserError(f"{out} already holds a draft head; choose another --out, or move that head away")


def collect_features(
    policy: Target,
    data: Sequence[Path] | None,
    out: Path,
    *,
    seed: int,
    frames: int,
    max_text: int = 0,
    max_bytes: float,
    topics: TopicChoice = DEFAULT_TOPICS,
    model: ModelSettings | None = None,
    spread: Spread = THIS_PROCESS,
    on_frame: Callable[[int], None] = lambda done: None,
) -> list[Path]:
    """Runs the target on frames and stores its features below `out`; called again, it resumes where it stopped.

    Raises UserError if there are no usable data, or if `out` holds features of another target or other data.

    Args:
        data: bags, or directories of bags; None: the target's own episodes in simulation, without end.
        frames: maximum number of frames; `max_text`: maximum number of text tokens before the actions.
        max_bytes: maximum size of the features on disk.
        model, spread: how and where workers load the target, as for `run_jobs`; each fills shard after shard.
    """
    if data is None and (spread.workers or spread.ray):
        raise UserError(
            "--workers and --ray need bags: in simulation each image depends on the previous answer; "
            "`specvla collect --policy` records bags of the target's episodes"
        )
    named = sorted(str(bag.resolve()) for bag in find_bags(data).bags) if data is not None else [SIMULATION]
    weights = file_hashes(sorted(policy.directory.glob("*.safetensors")))
    described = {"target": weights, "data": named, "seed": seed, "max_text": max_text}
    described |= {"topics": str(topics)} if topics != DEFAULT_TOPICS else {}
    store = FeatureStore(out / STATE_DIRECTORY / "features", described)
    if data is not None and (spread.workers or spread.ray):
        check_senses(policy, topics.cameras, topics.state_topic)
        topics = topics.of(policy)  # also decides which images count
        bags = tuple(shuffled(find_bags(data).bags, seed))
        by = Asked(policy.directory, model or ModelSettings(), bags, topics, max_text)
        store.fill_by_workers(by, frames, spread, limit_bytes=max_bytes, on_frame=on_frame)
    else:
        engine = EngineSettings(max_reasoning_tokens=max_text)
        asked = islice(frame_source(policy, data, seed, topics, engine=engine), frames)
        store.fill(policy, asked, max_text=max_text, limit_bytes=max_bytes, on_frame=on_frame)
    return store.shards


def train_draft(
    policy: Target,
    shards: Sequence[Path],
    out: Path,
    training: DraftTraining,
    on_progress: Callable[[Progress[DraftValidation]], None] = lambda progress: None,
) -> list[DraftValidation]:
    """Trains a draft head and writes its checkpoint to `out`; called again, it resumes after the last whole epoch."""
    from accelerate import Accelerator

    if len(shards) < 2:
        raise UserError(
            "the features fill one shard only: too few to train on and to validate with; give more --frames, or more "
            "bags"
        )
    accelerator = Accelerator()
    task = _DraftTask(accelerator, policy, shards, out, training)
    described = asdict(training) | {"samples": task.samples, "target": str(policy.directory.resolve())}
    begin_or_resume(accelerator, out, described)
    return Trainer(accelerator, task, out).run(on_progress)


class _DraftTask:
    """A draft head on its target's features; see TrainingTask."""

    def __init__(
        self, accelerator: Any, policy: Target, shards: Sequence[Path], out: Path, training: DraftTraining
    ) -> None:
        held_out = max(1, len(shards) // _HELD_OUT)
        self._accelerator, self._policy, self._out = accelerator, policy, out
        self._shards, self._held_out, self._seed = shards[:-held_out], shards[-held_out:], training.seed
        torch.manual_seed(training.seed)
        self.trained = EagleHead(policy.decoder.config, training.parallel_depth).to(policy.decoder.device)
        _initialise(self.trained)
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(self.trained.parameters(), lr=training.learning_rate, betas=_BETAS, weight_decay=0.0)
        ]
        self.model = _DraftLoss(policy, self.trained, steps=max(training.own_steps, training.parallel_depth))
        self.samples = sum(1 for _ in self._epoch(0))
        self.batch_size = training.batch_size
        self.validate_every = self.samples // training.batch_size
        if not self.validate_every:
            raise UserError(
                f"{self.samples} samples are fewer than --batch-size {training.batch_size}: give more images or a "
                "smaller batch. Answers that are not an action, or whose text exceeds --max-reasoning-tokens, do not "
                "count"
            )
        self.steps = self.validate_every * training.epochs
        self.clip = _CLIP

    def schedule(self, step: int) -> float:
        return warm_up(step, self.steps, _WARM_UP) * (1 - step / self.steps)

    def batches(self, start: int) -> Iterator[tuple[list[Sample], torch.Generator]]:
        rank, share = self._accelerator.process_index, self._accelerator.num_processes
        for epoch in range(start // self.validate_every, self.steps // self.validate_every):
            samples = self._epoch(epoch)
            for i in range(self.validate_every):
                step = epoch * self.validate_every + i
                noise = torch.Generator().manual_seed(hash((self._seed, step, rank)))
                yield list(islice(samples, self.batch_size))[rank::share], noise

    def validate(self, step: int, seconds: float) -> DraftValidation:
        samples = (sample for path in self._held_out for sample in shuffled_samples([path], seed=0, epoch=0))
        return validate_draft(self._policy, self.trained, samples, epoch=step // self.validate_every)

    def validation_from_json(self, raw: dict[str, Any]) -> DraftValidation:
        lengths = tuple((int(dim), float(length)) for dim, length in raw["accept_length_by_place"])
        return DraftValidation(**raw | {"accept_length_by_place": lengths})

    def write(self, described: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
        save_draft_head(self._out, self.trained)
        finished = time.strftime("%Y-%m-%d", time.gmtime())
        return described | {"target": self._policy.directory.name, "epochs_done": history, "finished": finished}

    def _epoch(self, epoch: int) -> Iterator[Sample]:
        return shuffled_samples(self._shards, seed=self._seed, epoch=epoch)


class _DraftLoss(nn.Module):
    """The loss of a batch; holds only the head's weights."""

    def __init__(self, policy: Target, head: EagleHead, steps: int) -> None:
        super().__init__()
        self.head = head
        # A tuple keeps the target out of this module's parameters.
        self._decoder = (cast("PackedDecoder", policy.decoder),)
        self._steps = steps

    def forward(self, samples: list[Sample], noise: torch.Generator) -> Tensor:
        (decoder,) = self._decoder
        batch = collate(samples, decoder.embed_tokens)
        answer = batch.following.shape[1] - batch.prompt_rows
        width = _NOISE / batch.hidden.shape[1]
        noisy = batch.hidden + (torch.rand(batch.hidden.shape, generator=noise) - 0.5).to(batch.hidden.device) * width
        rotation = decoder.rotation(torch.arange(batch.hidden.shape[1], device=batch.hidden.device))
        steps = min(self._steps, answer)
        predictions = draft_features(
            self.head, batch.following, noisy, batch.padding, *rotation, answer=answer, steps=steps
        )
        with torch.no_grad():
            probabilities = decoder.logits(batch.goal.flatten(0, 1)).softmax(-1).view(*batch.goal.shape[:2], -1)
        weights = [_LATER_STEP**step for step in range(len(predictions))]
        losses = []
        for step, (weight, predicted) in enumerate(zip(weights, predictions, strict=True)):
            there = batch.there[:, step:]
            goal, wanted = batch.goal[:, step:][there], probabilities[:, step:][there]
            losses.append(weight * draft_loss(predicted[there], goal, wanted, decoder.lm_head.weight))
        return torch.stack(losses).sum() / sum(weights)


def draft_loss(predicted: Tensor, features: Tensor, probabilities: Tensor, lm_head: Tensor) -> Tensor:
    """Mean smooth-L1 of the features plus 0.1 times the mean cross-entropy with the target (Spec-VLA, section 5.1).

    `predicted` and `features` are the head's and the target's hidden states, [rows, hidden]; `probabilities` the
    target's distribution at each row, [rows, vocab]; `lm_head` its output head, [vocab, hidden].
    """
    logits = F.linear(predicted, lm_head.to(predicted.dtype))
    tokens = -(probabilities * logits.log_softmax(-1)).sum(-1).mean()
    return _FEATURE_WEIGHT * F.smooth_l1_loss(predicted, features) + _TOKEN_WEIGHT * tokens


@dataclass(frozen=True)
class DraftBatch:
    """Samples of one batch, padded on both sides so that their answers start in the same row."""

    following: Tensor  # float32 [batch, rows, hidden], the embedding of the token after each row
    hidden: Tensor  # float32 [batch, rows, hidden], the target's state at each row
    goal: Tensor  # float32 [batch, answer rows, hidden], the target's state after each of the answer's rows
    there: Tensor  # bool [batch, answer rows]; False: padding after a shorter answer
    padding: Tensor  # int64 [batch], number of padding rows at the left end
    prompt_rows: int  # rows before the answer


def collate(samples: Sequence[Sample], embed: nn.Embedding) -> DraftBatch:
    """Makes a batch on the target's device."""
    device = embed.weight.device
    answer = max(len(sample.tokens) for sample in samples) - 1
    longest = max(len(sample.prompt) for sample in samples)
    padding = [longest - len(sample.prompt) for sample in samples]
    following, hidden, goal, there = [], [], [], []
    for sample, left in zip(samples, padding, strict=True):
        mine = len(sample.tokens) - 1
        right = answer - mine
        answered = embed(sample.tokens[:-1].to(device)).detach().float()
        prompt, states = sample.prompt.to(device).float(), sample.hidden.to(device).float()
        following.append(F.pad(torch.cat((prompt[1:], answered)), (0, 0, left, right)))
        hidden.append(F.pad(states[:-1], (0, 0, left, right)))
        goal.append(F.pad(states[len(prompt) :], (0, 0, 0, right)))
        there.append(torch.arange(answer, device=device) < mine)
    return DraftBatch(
        torch.stack(following),
        torch.stack(hidden),
        torch.stack(goal),
        torch.stack(there),
        torch.tensor(padding, device=device),
        prompt_rows=longest - 1,
    )


def _initialise(head: EagleHead) -> None:
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)


@torch.inference_mode()
def validate_draft(policy: Target, head: EagleHead, samples: Iterable[Sample], *, epoch: int) -> DraftValidation:
    """Replays up to 256 held-out answers of the target with drafts from the head, under strict acceptance.

    The target does not run: strict acceptance only commits its own tokens, and those are known.
    """
    settings = DraftSettings()
    if head.parallel_depth > 1:
        settings = replace(settings, depth=min(settings.depth, head.parallel_depth))
    decoder = cast("PackedDecoder", policy.decoder)
    head = copy.deepcopy(head).to(decoder.dtype)  # the dtype it will be served in
    drafter: EagleDrafter | None = None
    found: defaultdict[int, list[int]] = defaultdict(list)
    done = 0
    for sample in islice(samples, _MAX_SAMPLES):
        rows = len(sample.prompt) + len(sample.tokens)
        if drafter is None or drafter.committed_rows < rows:
            drafter = EagleDrafter(head, decoder, settings, slots=1, slot_rows=rows)
        for dim, accepted in _replay(policy, drafter, sample):
            found[dim].append(accepted)
        done += 1
    lengths = [length for of_dim in found.values() for length in of_dim]
    return DraftValidation(
        epoch=epoch,
        tau=1 + sum(lengths) / len(lengths) if lengths else 0.0,
        accept_length_by_place=tuple((dim, sum(of_dim) / len(of_dim)) for dim, of_dim in sorted(found.items())),
        samples=done,
    )


def _replay(policy: Target, drafter: EagleDrafter, sample: Sample) -> list[tuple[int, int]]:
    """Returns (dimension of the first drafted token, accept length) for each verification."""
    device, dtype = policy.decoder.device, policy.decoder.dtype
    hidden, tokens = sample.hidden.to(device, dtype), sample.tokens.to(device)
    following = torch.cat((sample.prompt.to(device, dtype)[1:], policy.decoder.embed_tokens(tokens)))
    prompt, answer = len(sample.prompt), len(tokens)
    goal = tokens.tolist()
    fed, dim, results = 0, 1, []
    while dim < answer:
        prefix = prompt + dim - 1
        given = DraftInput(
            slot=0,
            prefix_len=prefix,
            new=NewRows(hidden[fed:prefix], following[fed:prefix]),
            root=tokens[dim - 1],
            max_depth=answer - dim - 1,
            position=policy.codec.position(goal[:dim]),
            in_text=policy.codec.in_text(goal[:dim]),
        )
        accepted = _longest_match(drafter.draft([given])[0], goal[dim:])
        if answer - dim > 1:  # the last token is never drafted
            results.append((dim, accepted))
        fed, dim = prefix, dim + accepted + 1
    return results


def _longest_match(tree: Tree, goal: list[int]) -> int:
    parents, tokens = tree.ancestry.parents.tolist(), tree.tokens.tolist()
    valid: list[bool] = tree.valid.tolist()
    node = 0
    for depth, wanted in enumerate(goal):
        children = [i for i, parent in enumerate(parents) if parent == node and valid[i] and tokens[i] == wanted]
        if not children:
            return depth
        node = children[0]
    return len(goal)
