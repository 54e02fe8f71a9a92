# SPDX-License-Identifier: Apache-2.0
"""A draft model for a language model: its own first layers, distilled on the whole model's answers.

    pip install -r requirements/train.txt
    python -m benchmarks.papers.smollm smollm2
    python -m benchmarks.papers.smollm_draft smollm2 smollm2-draft

The target answers the prompts (`seeds`) once greedily; the remaining answers are sampled. Its first layers, followed by
its final norm and head, are then trained on the target's distribution after each prefix of these answers, with
cross-entropy and AdamW; embeddings and head are frozen. Takes about ten minutes on two otherwise idle CPU cores. An
interrupted training resumes from its last validation.
"""

import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.papers.text_target import TextTarget, load_language_model
from benchmarks.transformers_baseline import transformers_decoder
from specvla_ros.errors import UserError
from specvla_ros.lab.files import write_json
from specvla_ros.lab.plans import check_settings
from specvla_ros.lab.training.artifacts import save_weights
from specvla_ros.lab.training.batched_forward import decoder_hidden
from specvla_ros.lab.training.dataset import shuffled
from specvla_ros.lab.training.train_policy import precision
from specvla_ros.lab.training.trainer import STATE_DIRECTORY, Progress, Trainer, begin_or_resume, warm_up
from specvla_ros.models.decoder import PackedDecoder, decoder_tensors

_ANSWERS = "answers.safetensors"
_GENERATED_AT_ONCE = 32
_TEMPERATURE = 0.7
_HELD_OUT = 16  # one prompt in 16 is held out, with all its answers
_WARM_UP = 30
_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

# The target's prompts, of the same kinds as the FLy benchmark's (fly_prompts.json); a test checks that none is in both.
_PROMPTS = Path(__file__).with_name("smollm_draft_prompts.json")


@dataclass(frozen=True)
class DraftTraining:
    """Training settings of the first layers."""

    layers: int = 8
    answers: int = 1024
    tokens: int = 64  # maximum length of an answer
    steps: int = 360
    batch_size: int = 8  # answers per step
    learning_rate: float = 1e-3  # peak after a warm-up; cosine decay to 0
    validate_every: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, ("layers", "answers", "tokens", "steps", "batch_size", "validate_every"))


@dataclass(frozen=True)
class Validation:
    """Agreement of the draft with the target on answers to held-out prompts."""

    step: int
    loss: float  # cross-entropy with the target's distribution, nats
    agreement: float  # share of the target's greedy choices that the draft makes too
    seconds: float


def first_layers(decoder: PackedDecoder, layers: int) -> PackedDecoder:
    """Returns a decoder's first layers as a decoder with copied weights; UserError unless fewer than its own."""
    config = decoder.config
    if layers >= config.num_hidden_layers:
        raise UserError(f"the target has {config.num_hidden_layers} layers: a draft of it needs fewer, not {layers}")
    first = PackedDecoder(replace(config, num_hidden_layers=layers)).to(decoder.dtype)
    if config.tie_word_embeddings:
        first.lm_head.weight = first.embed_tokens.weight
    known = decoder_tensors(decoder)
    with torch.no_grad():
        for name, tensor in decoder_tensors(first).items():
            tensor.copy_(known[name])
    return first


def write_first_layers(out: Path, directory: Path, draft: PackedDecoder) -> None:
    """Writes a directory for `draft.model`; the weights come last, so that an unfinished one is incomplete."""
    out.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        if (directory / name).exists():
            shutil.copy(directory / name, out / name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write_json(out / "config.json", config | {"num_hidden_layers": draft.config.num_hidden_layers})
    save_weights(out / "model.safetensors", decoder_tensors(draft))


def answer_prompts(target: TextTarget, training: DraftTraining) -> dict[str, Tensor]:
    """Returns the target's own answers to the seeds: the first answer to each is greedy, further ones are sampled.

    Returns:
        `ids` int64 [answers, rows], prompt and answer, padded on the right; `prompts` int64 [answers], length of each
        prompt; `lengths` int64 [answers], length of each answer including its end token; `states` float32
        [answers, tokens, hidden], the target's last hidden state before each token, after the final norm.
    """
    torch.manual_seed(training.seed)
    model = transformers_decoder(target.decoder)
    asked = [target.tokenizer.encode(text).ids for text in seeds(training.seed)]
    parts = []
    for first in range(0, training.answers, _GENERATED_AT_ONCE):
        numbers = range(first, min(first + _GENERATED_AT_ONCE, training.answers))
        prompts = [asked[number % len(asked)] for number in numbers]
        sampled = {"temperature": _TEMPERATURE, "top_k": 0} if numbers[-1] >= len(asked) else {}
        parts.append(_answers(model, prompts, target.codec.end_ids, training.tokens, sampled))
        print(f"{numbers[-1] + 1} of {training.answers} answers", file=sys.stderr, flush=True)
    width = max(part["ids"].shape[1] for part in parts)
    for part in parts:
        part["ids"] = F.pad(part["ids"], (0, width - part["ids"].shape[1]))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.inference_mode()
def _answers(
    model: Any, prompts: Sequence[Sequence[int]], end_ids: frozenset[int], tokens: int, sampled: dict[str, Any]
) -> dict[str, Tensor]:
    """A batch of `answer_prompts`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    states: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda module, inputs, output: states.append(output[:, -1].float()))
    try:
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=bool(sampled),
            eos_token_id=sorted(end_ids),
            pad_token_id=0,
            **sampled,
        )
    finally:
        hook.remove()
    answers = out[:, longest:]
    ended = torch.isin(answers, torch.tensor(sorted(end_ids)))
    lengths = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, answers.shape[1])
    rows = [
        torch.tensor([*prompt, *answer[:length].tolist()])
        for prompt, answer, length in zip(prompts, answers, lengths, strict=True)
    ]
    seen = torch.stack(states, dim=1)
    return {
        "ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "prompts": torch.tensor([len(prompt) for prompt in prompts]),
        "lengths": lengths,
        "states": F.pad(seen, (0, 0, 0, tokens - seen.shape[1])),
    }


class DraftLoss(nn.Module):
    """Cross-entropy of the draft with the target's distribution, averaged over the answers' tokens."""

    def __init__(self, draft: PackedDecoder) -> None:
        super().__init__()
        self.draft = draft.train().requires_grad_(True)
        for kept in (draft.embed_tokens, draft.lm_head):
            kept.requires_grad_(False)

    def logits(self, ids: Tensor, prompts: Tensor, lengths: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the draft's and the target's logits for all answer tokens, [n, vocab] each; see `answer_prompts`."""
        ids = ids[:, : int((prompts + lengths).max())]
        rows = torch.arange(ids.shape[1], device=ids.device)
        at = torch.arange(int(lengths.max()), device=ids.device)
        wanted = (prompts[:, None] - 1 + at).clamp(max=ids.shape[1] - 1)
        there = at < lengths[:, None]
        embedded = self.draft.embed_tokens(ids)
        hidden = decoder_hidden(self.draft, embedded, rows[:, None] >= rows, rows, wanted)[there]
        head = self.draft.lm_head.weight
        with torch.no_grad():
            goal = F.linear(states[:, : len(at)][there], head)
        return F.linear(hidden, head), goal

    def forward(self, *answers: Tensor) -> Tensor:
        logits, goal = self.logits(*answers)
        return -(goal.float().softmax(dim=-1) * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


class _DraftTask:
    """Distillation; see TrainingTask."""

    def __init__(self, accelerator: Any, target: TextTarget, out: Path, training: DraftTraining) -> None:
        self._target, self._out, self._training = target, out, training
        self._answers = load_file(out / STATE_DIRECTORY / _ANSWERS, device=str(accelerator.device))
        held_out = np.arange(training.answers) % len(seeds(training.seed)) % _HELD_OUT == 0
        self._held_out, self._train = np.flatnonzero(held_out), np.flatnonzero(~held_out)
        self.trained = first_layers(target.decoder, training.layers)
        self.model = DraftLoss(self.trained)
        taught = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(taught, lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        ]
        self.steps, self.batch_size = training.steps, training.batch_size
        self.validate_every = training.validate_every
        self.clip = 1.0

    def schedule(self, step: int) -> float:
        return warm_up(step, self.steps, _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def batches(self, start: int) -> Iterator[tuple[Tensor, ...]]:
        for numbers in shuffled(self._train, self.batch_size, seed=self._training.seed, start=start):
            yield self._some(numbers)

    @torch.no_grad()
    def validate(self, step: int, seconds: float) -> Validation:
        losses, same = [], []
        for first in range(0, len(self._held_out), self.batch_size):
            logits, goal = self.model.logits(*self._some(self._held_out[first : first + self.batch_size]))
            losses.append(-(goal.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1))
            same.append((logits.argmax(dim=-1) == goal.argmax(dim=-1)).float())
        return Validation(step, float(torch.cat(losses).mean()), float(torch.cat(same).mean()), seconds)

    def validation_from_json(self, raw: dict[str, Any]) -> Validation:
        return Validation(**raw)

    def write(self, described: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
        write_first_layers(self._out, self._target.directory, self.trained)
        return described | {"validation": history}

    def _some(self, numbers: np.ndarray) -> tuple[Tensor, ...]:
        return tuple(self._answers[name][numbers] for name in ("ids", "prompts", "lengths", "states"))


def train_draft_model(directory: Path, out: Path, training: DraftTraining) -> list[Validation]:
    """Collects a language model's answers, trains its first layers on them, and writes these as a separate directory.

    Raises:
        UserError: `out` already holds a model, or the state of another training.
    """
    from accelerate import Accelerator

    if (out / "model.safetensors").exists():
        raise UserError(f"{out} already holds a model; choose another directory")
    accelerator = Accelerator(mixed_precision=precision())
    target = load_language_model(directory, str(accelerator.device))

    def answer() -> None:
        (out / STATE_DIRECTORY).mkdir(parents=True, exist_ok=True)
        save_weights(out / STATE_DIRECTORY / _ANSWERS, answer_prompts(target, training))

    begin_or_resume(accelerator, out, {"target": directory.name, **asdict(training)}, answer)
    return Trainer(accelerator, _DraftTask(accelerator, target, out, training), out).run(_show)


def _show(progress: Progress[Validation]) -> None:
    if progress.step % 10 and progress.step != progress.steps:
        return
    newest = progress.validation
    known = f", held out {newest.loss:.3f}, agreement {newest.agreement:.1%}" if newest else ""
    print(f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}{known}", file=sys.stderr, flush=True)


def main(
    target: Annotated[Path, typer.Argument(help="Directory of the language model.")] = Path("smollm2"),
    out: Annotated[Path, typer.Argument(help="Directory to write.")] = Path("smollm2-draft"),
    layers: Annotated[int, typer.Option(help="Number of the target's first layers.")] = DraftTraining.layers,
    answers: Annotated[int, typer.Option(help="Training answers of the target.", min=2)] = DraftTraining.answers,
    tokens: Annotated[int, typer.Option(help="Maximum length of an answer.")] = DraftTraining.tokens,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = DraftTraining.steps,
) -> None:
    """Make a draft model from a language model's first layers."""
    started = time.monotonic()
    training = DraftTraining(layers=layers, answers=answers, tokens=tokens, steps=steps)
    validations = train_draft_model(target, out, training)
    print(f"{out}: agreement {validations[-1].agreement:.1%} after {time.monotonic() - started:.0f} s")


def seeds(rng_seed: int) -> list[str]:
    """Returns the prompts as tokenizer input, each once, in an order determined by the seed."""
    parts: dict[str, list[str]] = json.loads(_PROMPTS.read_text(encoding="utf-8"))
    asked = [form.format(topic) for form, topic in product(parts["about"], parts["topics"])]
    asked += [f"Write a Python function that {what}." for what in parts["functions"]]
    asked += [f"Count from {first} to {first + 15}." for first in range(2, 60, 3)]
    asked += [f"What is {a} plus {b}?" for a, b in product(range(3, 15, 2), range(2, 20, 4))]
    asked += [
        form.format(f"{who} {does}") for form, who, does in product(parts["rewrite"], parts["who"], parts["does"])
    ]
    plain = [f"def {definition}:\n    " for definition in parts["definitions"]]
    plain += [
        f"{', '.join(str(first + i * step) for i in range(6))}," for first, step in product(range(11, 80, 7), (1, 3, 5))
    ]
    found = [*map(chat, asked), *plain]
    random.Random(rng_seed).shuffle(found)
    return found


def chat(question: str) -> str:
    """Returns a question in SmolLM2's chat format, without a system turn, up to the start of the answer."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


if __name__ == "__main__":
    typer.run(main)
