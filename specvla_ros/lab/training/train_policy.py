# SPDX-License-Identifier: Apache-2.0
"""Behaviour cloning of a small policy."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_ros.control.convention import ActionFrame, known_dataset
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.files import write_json
from specvla_ros.lab.plans import PolicyTraining
from specvla_ros.lab.training import dataset
from specvla_ros.lab.training.artifacts import fit_fast_tokenizer, save_fast_tokenizer, save_weights
from specvla_ros.lab.training.batched_forward import action_logits
from specvla_ros.lab.training.nano import teach_instructions, write_nano
from specvla_ros.lab.training.trainer import STATE_DIRECTORY, Progress, Trainer, begin_or_resume, warm_up
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.codec import CODEC_FILE, CODEC_FOLDER
from specvla_ros.models.codecs.statistics import select_statistics
from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.openvla.target import OpenVLATarget, require_openvla
from specvla_ros.models.observation import ONLY_CAMERA

# Blur of the true bin: neighbouring bins are similar actions, which plain cross-entropy must learn bin by bin.
_BLUR_BINS = 2.0
_VALIDATION_STEPS = 2048
_WARM_UP = 300
_WEIGHT_DECAY = 0.05
_CLIP = 1.0
_MUON_FACTOR = 2.0
_MUON_SCALE = "match_rms_adamw"  # lets both optimisers share one learning rate
_NUMBERS = 1000  # largest number in digits, as in VLA-0
_POSITIONS = 1024  # prompt, answer and draft of 8 actions in digits
_FAST_IDS = 256  # number of action tokens of the nano policy
_FAST_SCALE = 20.0  # twice the paper's: half the rounding error, a third more tokens
# Displacements of joints all count from the image, so the range of a chunk is that of its longest one.
_JOINT_FAST_SCALE = 30.0
_END_ID = 2  # `</s>`, the end of an answer of chunks


def action_loss(logits: Tensor, answers: Tensor, tokenizer: ActionTokenizer) -> Tensor:
    """Mean cross-entropy over the vocabulary against the true bin blurred over its neighbours; the gripper's is sharp.

    `logits` are [..., action_dim, vocab], `answers` the action tokens, int64 [..., action_dim].
    """
    bins = logits.float().log_softmax(-1)[..., tokenizer.first_id : tokenizer.vocab_size]
    candidates = torch.arange(bins.shape[-1], device=bins.device)
    true = (answers - tokenizer.first_id)[..., None]
    weights = torch.exp(-0.5 * ((candidates - true) / _BLUR_BINS) ** 2)
    weights[..., -1, :] = (candidates == true[..., -1, :]).float()
    weights = weights / weights.sum(-1, keepdim=True)
    return -(weights * bins).sum(-1).mean()


def cross_entropy(logits: Tensor, answers: Tensor) -> Tensor:
    """Mean cross-entropy of the true tokens without padding, comparable with models trained without a blur."""
    return F.cross_entropy(logits.float().flatten(0, -2), answers.flatten(), ignore_index=dataset.PADDING)


@dataclass(frozen=True)
class Validation:
    """Results on held-out demonstrations."""

    step: int  # optimiser steps before it
    loss: float  # cross-entropy of the true tokens in nats, mean over the tokens
    accuracy: tuple[float, ...]  # share of exactly predicted tokens, per dimension; a single value for chunks
    bin_distance: tuple[float, ...]  # mean distance to the true token in bins, per dimension; empty for chunks
    seconds: float  # training time so far


def train_policy(
    data: Sequence[Path],
    out: Path,
    training: PolicyTraining,
    *,
    init: Path | None = None,
    on_reading: Callable[[int, int], None] | None = None,
    on_progress: Callable[[Progress[Validation]], None] = lambda progress: None,
) -> list[Validation]:
    """Trains a policy and writes an OpenVLA checkpoint to `out`; called again, it resumes where it stopped.

    Until the end the training's state is in a folder of `out`. Raises UserError if there are no usable bags, or if
    `out` holds the state of another training.

    Args:
        init: directory of the checkpoint `training.init`; None: `training.init` is that directory.
        on_reading: called with the number of bags read and of all bags.
    """
    from accelerate import Accelerator

    init = init or (Path(training.init) if training.init else None)
    bags = find_bags(data).bags
    accelerator = Accelerator(mixed_precision=precision())
    size = read_config(init).towers[0].image_size if init is not None else training.shape.image_size
    report = on_reading if accelerator.is_main_process else None
    with accelerator.main_process_first():  # the other processes then use its cache
        cache = out / STATE_DIRECTORY / "demonstrations"
        demonstrations = dataset.load_demonstrations(bags, cache, size, training.topics, report)
    episodes = int(demonstrations.episode_of.max()) + 1
    if demonstrations.validation.all() or not demonstrations.validation.any():
        raise UserError(
            f"{len(demonstrations.images)} steps in {episodes} episodes are too few to train on and to "
            "validate with: at least 20 episodes are needed; `specvla collect --episodes N` records more"
        )
    _check_joints(demonstrations, training)
    settings = json.loads(json.dumps(asdict(training)))  # in the form in which they are read back
    described = settings | {"demonstration_steps": len(demonstrations.images), "episodes": episodes}
    begin_or_resume(accelerator, out, described, lambda: _write_untrained(out, demonstrations, training, init))
    return Trainer(accelerator, _PolicyTask(accelerator, demonstrations, out, training), out).run(on_progress)


def _write_untrained(out: Path, data: dataset.DemonstrationSet, training: PolicyTraining, init: Path | None) -> None:
    if (out / "config.json").exists():
        raise UserError(f"{out} already holds a checkpoint; choose another --out")
    if init is not None:
        _check_statistics(init, data, training)
        _copy_checkpoint(init, out, data.instructions, seed=training.seed)
        if _continues(init, data, training):
            return
    else:
        norm_stats = {training.unnorm_key: dataset.action_statistics(data.actions)}
        write_nano(out, training.shape, data.instructions, norm_stats, seed=training.seed)
    if data.action_names:
        _choose_actions(out, data, training)
    if training.topics.cameras or training.topics.state_topic:
        _choose_sensors(out, data, training.topics)
    if training.codec != "bins":
        _choose_codec(out, data, training)


def _check_joints(data: dataset.DemonstrationSet, training: PolicyTraining) -> None:
    """Raises UserError for actions of joints without their state, or with the name of a dataset of tool actions."""
    known = known_dataset(training.unnorm_key)
    if data.action_names and known is not None and known.frame is not ActionFrame.JOINTS:
        raise UserError(
            f"the actions are of joints, but '{training.unnorm_key}' is known for actions of the tool: give "
            "--unnorm-key another name; specvla_joints is that of `specvla collect --joints`"
        )
    _ = data.starts


def _check_statistics(init: Path, data: dataset.DemonstrationSet, training: PolicyTraining) -> None:
    """Raises UserError if a policy of the tool, which keeps its statistics, has none of the chosen name."""
    names = read_config(init).norm_stats
    if not data.action_names and training.unnorm_key not in names:
        raise UserError(
            f"--unnorm-key {training.unnorm_key}: a policy that is trained further keeps its statistics, and those of "
            f"{init} are named {', '.join(names)}: give that name, or train without --init for statistics of these data"
        )


def _continues(init: Path, data: dataset.DemonstrationSet, training: PolicyTraining) -> bool:
    """True if a checkpoint was trained on such data: it keeps its statistics, so that its tokens mean the same.

    A FAST tokenizer is fitted again, since it cannot write coefficients larger than those that it was fitted on.
    """
    config = read_config(init)
    if not config.action_codec == training.codec == "bins" or training.unnorm_key not in config.norm_stats:
        return False
    names = select_statistics(config.norm_stats, training.unnorm_key).given_names
    inputs = (len(config.cameras), config.state_names)
    return names == data.action_names and inputs == (data.images.shape[1], data.state_names)


def _chunk_shape(data: dataset.DemonstrationSet, training: PolicyTraining, unnorm_key: str) -> dict[str, Any]:
    known = known_dataset(unnorm_key)
    step_s = known.dt_s if known else None
    return {"time_horizon": training.horizon, "action_dim": data.actions.shape[-1], "dt_s": step_s}


def _choose_actions(out: Path, data: dataset.DemonstrationSet, training: PolicyTraining) -> None:
    """Changes an untrained checkpoint to move joints."""
    fields, step_s = (
        read_checkpoint_json(out / "config.json"),
        _chunk_shape(data, training, training.unnorm_key)["dt_s"],
    )
    horizon = 1 if training.codec == "bins" else training.horizon
    everything = np.full(data.actions.shape[-1], np.inf)
    chunks = dataset.action_chunks(data, horizon, (-everything, everything), step_s)
    statistics = dataset.action_statistics(chunks, data.action_names)
    statistics["action"]["names"] = list(data.action_names)
    write_json(out / "config.json", fields.raw | {"norm_stats": {training.unnorm_key: statistics}})


def _choose_sensors(out: Path, data: dataset.DemonstrationSet, topics: TopicChoice) -> None:
    """Changes an untrained checkpoint to use several cameras or a state."""
    fields = read_checkpoint_json(out / "config.json")
    cameras = [*dict.fromkeys((ONLY_CAMERA, *topics.cameras))]
    if len(cameras) != data.images.shape[1]:
        raise UserError(
            f"--camera {ONLY_CAMERA}=…: this is the first camera's name; give the further camera another one"
        )
    changed = fields.raw | {"cameras": cameras, "state_dims": data.states.shape[1]}
    if data.state_names:
        changed["state_names"] = list(data.state_names)
    if data.states.shape[1]:
        norm_stats = fields.inner("norm_stats").raw
        changed["norm_stats"] = {key: of | dataset.state_statistics(data.states) for key, of in norm_stats.items()}
    write_json(out / "config.json", changed)


def _choose_codec(out: Path, data: dataset.DemonstrationSet, training: PolicyTraining) -> None:
    """Changes an untrained checkpoint to answer with chunks; the codec reuses its tokens for bins."""
    fields = read_checkpoint_json(out / "config.json")
    decoder = fields.inner("text_config").raw | {"max_position_embeddings": _POSITIONS}
    changed = {"action_codec": training.codec, "eos_token_id": _END_ID, "text_config": decoder}
    write_json(out / "config.json", fields.raw | changed)
    statistics = select_statistics(fields.inner("norm_stats").raw, training.unnorm_key)
    shape = _chunk_shape(data, training, statistics.unnorm_key)
    folder = out / CODEC_FOLDER
    if training.codec == "digits":
        folder.mkdir(exist_ok=True)
        write_json(folder / CODEC_FILE, shape | {"bins": _NUMBERS})
    else:
        chunks = dataset.action_chunks(data, training.horizon, (statistics.low, statistics.high), shape["dt_s"])
        scale = _JOINT_FAST_SCALE if data.action_names else _FAST_SCALE
        tokenizer = fit_fast_tokenizer(statistics.normalise(chunks), scale=scale, vocab_size=_FAST_IDS)
        save_fast_tokenizer(tokenizer, folder, **shape)


def _copy_checkpoint(init: Path, out: Path, instructions: tuple[str, ...], *, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    try:
        for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"):
            shutil.copy(init / name, out / name)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be copied to {out}: {error.strerror}") from None
    taught = read_config(init).instructions
    if taught and not {*instructions} <= {*taught}:
        teach_instructions(out, instructions, seed=seed)


class _PolicyTask:
    """Behaviour cloning; see TrainingTask."""

    def __init__(self, accelerator: Any, data: dataset.DemonstrationSet, out: Path, training: PolicyTraining) -> None:
        self._accelerator, self._out, self._training = accelerator, out, training
        self._train, self._held_out = np.flatnonzero(~data.validation), np.flatnonzero(data.validation)
        self._policy = require_openvla(load_target(out, device=str(accelerator.device), dtype="float32"))
        self._data = dataset.Batches(self._policy, data)
        self.model = _PolicyLoss(self._policy)
        self.trained = self._policy.model
        self.optimisers, self.clip = _optimisers(self.model, training.learning_rate), _CLIP
        self.steps, self.batch_size = training.steps, training.batch_size
        self.validate_every = training.validate_every

    def schedule(self, step: int) -> float:
        return warm_up(step, self.steps, _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def batches(self, start: int) -> Iterator[tuple[dataset.Batch]]:
        rank, share = self._accelerator.process_index, self._accelerator.num_processes
        seed = self._training.seed
        order = dataset.shuffled(self._train, max(1, self.batch_size // share) * share, seed=seed, start=start)
        for step, steps in enumerate(order, start):
            augment = np.random.default_rng([seed, step, rank])
            yield (self._data.make(steps[rank::share], augment).to(self._accelerator.device),)

    @torch.no_grad()
    def validate(self, step: int, seconds: float) -> Validation:
        some = self._held_out[:: max(1, len(self._held_out) // _VALIDATION_STEPS)]
        losses, right, distance = [], [], []
        for start in range(0, len(some), 256):
            batch = self._data.make(some[start : start + 256]).to(self._accelerator.device)
            with self._accelerator.autocast():
                logits = self.model.logits(batch)
            predicted, there = logits.argmax(-1), batch.answers != dataset.PADDING
            losses.append(cross_entropy(logits, batch.answers) * there.sum())
            right.append(torch.where(there, (predicted == batch.answers).float(), torch.nan).flatten(0, 1))
            distance.append((predicted - batch.answers).abs().float().flatten(0, 1))
        found, of_bins = torch.cat(right), self.model.tokenizer is not None
        accuracy = found.mean(0) if of_bins else found.nanmean()[None]
        bin_distance = tuple(torch.cat(distance).mean(0).tolist()) if of_bins else ()
        loss = float(torch.stack(losses).sum() / (~found.isnan()).sum())
        return Validation(step, loss, tuple(accuracy.tolist()), bin_distance, seconds)

    def validation_from_json(self, raw: dict[str, Any]) -> Validation:
        return Validation(**raw | {name: tuple(raw[name]) for name in ("accuracy", "bin_distance")})

    def write(self, described: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
        """Writes the weights in bfloat16, like OpenVLA's."""
        tensors = {name: tensor.bfloat16().cpu() for name, tensor in self.trained.checkpoint_tensors().items()}
        save_weights(self._out / "model.safetensors", tensors)
        return described | {"validation": history}


class _PolicyLoss(nn.Module):
    def __init__(self, policy: OpenVLATarget) -> None:
        super().__init__()
        self.model = policy.model.train().requires_grad_(True)
        # None: answers are chunks instead of one binned action.
        self.tokenizer = policy.codec.tokenizer if isinstance(policy.codec, BinsCodec) else None

    def logits(self, batch: dataset.Batch) -> Tensor:
        """Logits [batch, asked, action_dim, vocab]."""
        return action_logits(self.model, batch.pixels, batch.prompt_ids, batch.lengths, batch.answers)

    def forward(self, batch: dataset.Batch) -> Tensor:
        logits = self.logits(batch)
        if self.tokenizer is None:
            return cross_entropy(logits, batch.answers)
        return action_loss(logits, batch.answers, self.tokenizer)


def _optimisers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the inner matrices, AdamW for embeddings, head, norms and biases.

    On this task Muon needs about half of AdamW's images until the policy finds the objects on the table.
    """
    inside: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (inside if is_matrix else rest).append(parameter)
    return [
        torch.optim.Muon(inside, lr=_MUON_FACTOR * learning_rate, weight_decay=_WEIGHT_DECAY, adjust_lr_fn=_MUON_SCALE),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def precision() -> str:
    """Accelerate's precision: `bf16` if the processor multiplies it in hardware, else `no`: float32 is then faster."""
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()
    return "bf16" if fast else "no"
