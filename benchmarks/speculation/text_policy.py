# SPDX-License-Identifier: Apache-2.0
"""A small policy that writes what it sees and plans before it acts; trained on demand, not bundled.

python -m benchmarks.speculation.text_policy --out text-policy

It extends the nano policy's vocabulary: its own actions at the simulated table follow a text like that of embodied
chain-of-thought policies, generated from the table's true state. Only the language model is trained. Takes about ten
minutes on two CPU cores. Its draft head takes about as long, with one command:

specvla train-draft --policy text-policy --data sim --out text-policy/draft --max-reasoning-tokens 64 --frames 5000
                    --epochs 8 --learning-rate 0.001 --own-steps 5
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from specvla_ros import Action, Engine, EngineSettings, Observation
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.files import write_json
from specvla_ros.lab.plans import NanoShape
from specvla_ros.lab.simulation.collect import holds
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.rollout import Clock, Rollout, tick_time
from specvla_ros.lab.simulation.tasks import TASKS, TEXT_POLICY_FIRST_SEED, Task, WorldState
from specvla_ros.lab.training.artifacts import save_weights
from specvla_ros.lab.training.batched_forward import decoder_hidden, image_embeddings
from specvla_ros.lab.training.nano import write_nano
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.target import OpenVLATarget, require_openvla
from specvla_ros.models.observation import ONLY_CAMERA

LONGEST_TEXT = 64  # tokens
_LAYERS = NanoShape().layers  # the nano policy's own, whose weights are the initial ones
_CELL_M, _ORIGIN_M = 0.04, (0.3, -0.2)
_NEAR_M = 0.05
_PLANS = {
    "lift": "reach the {c} , close the hand , lift the {c}",
    "push": "get behind the {c} , push the {c} into the white zone",
    "put": "reach the {c} , close the hand , carry the {c} over the block , open the hand",
}
_ACTS = {"lift": "lift the {c}", "push": "push the {c} into the white zone", "put": "carry the {c} over the block"}


def reasoning(task: Task, state: WorldState) -> str:
    """Returns the text that the policy should write before it acts."""
    cube = task.cube.replace("_", " ")
    x, y, _ = state.positions[task.cube]
    row, column = (min(9, max(0, round((at - low) / _CELL_M))) for at, low in zip((x, y), _ORIGIN_M, strict=True))
    near = np.linalg.norm(state.positions[task.cube] - state.hand) < _NEAR_M
    acting = holds(state, task.cube) or (task.verb == "push" and near)
    approach = "get behind the {c}" if task.verb == "push" else "close the hand" if near else "reach the {c}"
    now = _ACTS[task.verb] if acting else approach
    text = f"plan : {_PLANS[task.verb]} . the {{c}} is at row {row} , column {column} . now {now} :"
    return text.format(c=cube)


@dataclass(frozen=True)
class Frame:
    """An image of an episode and the policy's desired answer."""

    observation: Observation
    task: Task
    text: str  # the text that it should write
    tokens: tuple[int, ...]  # action tokens of the nano policy


@dataclass(frozen=True)
class Sample:
    """A frame as a training sample of the decoder."""

    image: Tensor  # float [image_tokens, hidden], the projector's output
    prompt: tuple[int, ...]  # token ids
    answer: tuple[int, ...]  # token ids of text and action


def main(
    out: Annotated[Path, typer.Option(help="Directory for the checkpoint and a card.json about its training.")] = Path(
        "text-policy"
    ),
    episodes: Annotated[int, typer.Option(help="Training episodes of the nano policy.", min=1)] = 400,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 1000,
    batch: Annotated[int, typer.Option(help="Images per step.", min=1)] = 24,
    layers: Annotated[
        int, typer.Option(help="Layers of the language model; fewer for a draft model.", min=1)
    ] = _LAYERS,
) -> None:
    """Train the text policy."""
    torch.manual_seed(0)
    nano = require_openvla(load_target(nano_policy(), device="cpu"))
    seen = _look(nano, episodes)
    texts = sorted({frame.text for frame in seen} | {" ".join(map(str, range(10)))})
    _write_untrained(nano, out, texts, layers)
    policy = require_openvla(load_target(out, device="cpu"))
    samples = [_sample(policy, nano, frame) for frame in seen]
    stride = max(2, len(samples) // 200)
    held_out = samples[::stride]
    started = time.monotonic()
    _train(policy, [sample for i, sample in enumerate(samples) if i % stride], steps, batch)
    accuracy = _accuracy(policy, held_out)
    tensors = policy.model.checkpoint_tensors()
    save_weights(out / "model.safetensors", {name: tensor.bfloat16() for name, tensor in tensors.items()})
    card = {
        "command": f"python -m benchmarks.speculation.text_policy --episodes {episodes} --steps {steps} --batch {batch}"
        f" --layers {layers}",
        "images": len(samples),
        "longest_answer": max(len(sample.answer) for sample in samples),
        "held_out_token_accuracy": accuracy,
        "training_s": time.monotonic() - started,
    }
    write_json(out / "card.json", card)
    print(json.dumps(card, indent=2))


def _look(nano: OpenVLATarget, episodes: int) -> list[Frame]:
    robot = TableRobot()
    states: list[tuple[Observation, WorldState]] = []
    engine = Engine(nano, EngineSettings("ar"))
    rollout = Rollout(
        engine,
        robot,
        Clock.LOCKSTEP,
        tick_time(),
        on_look=lambda observation: states.append((observation, robot.state())),
    )
    seen = []
    for episode in range(episodes):
        task = TASKS[episode % len(TASKS)]
        states.clear()
        rollout.run(task.name, TEXT_POLICY_FIRST_SEED + episode)
        engine.reset()
        for observation, state in states:
            action = engine.act(observation)
            if isinstance(action, Action):
                seen.append(Frame(observation, task, reasoning(task, state), action.tokens))
        if episode % 50 == 49:
            print(f"{episode + 1} episodes, {len(seen)} images", file=sys.stderr, flush=True)
    return seen


def _write_untrained(nano: OpenVLATarget, out: Path, texts: list[str], layers: int) -> None:
    """Writes the nano policy's weights with `layers` layers of its language model and rows for additional words."""
    config = json.loads((nano.directory / "config.json").read_text(encoding="utf-8"))
    instructions = [task.instruction for task in TASKS]
    write_nano(out, NanoShape(layers=layers), [*instructions, *texts], config["norm_stats"], seed=0)
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    write_json(out / "config.json", written | {"instructions": instructions})  # the texts only provided words
    model, known = OpenVLA(read_config(out)), nano.model.checkpoint_tensors()
    tensors = model.checkpoint_tensors()
    fresh = require_openvla(load_target(out, device="cpu"))
    for name, tensor in fresh.model.checkpoint_tensors().items():
        tensors[name].copy_(known[name] if tensor.shape == known[name].shape else tensor)
    rows = _rows_of_known_words(nano, fresh)
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        tensors[name][rows[:, 1]] = known[name][rows[:, 0]]
    save_weights(out / "model.safetensors", tensors)


def _rows_of_known_words(nano: OpenVLATarget, writer: OpenVLATarget) -> Tensor:
    """Token ids in the nano policy and in the writer, int64 [n, 2]."""
    assert nano.prompt.tokenizer is not None and writer.prompt.tokenizer is not None
    ids = writer.prompt.tokenizer.get_vocab()
    pairs = [(old, ids[word]) for word, old in nano.prompt.tokenizer.get_vocab().items() if word in ids]
    ours, theirs = _action_tokenizer(nano), _action_tokenizer(writer)
    pairs += [(ours.first_id + i, theirs.first_id + i) for i in range(ours.vocab_size - ours.first_id)]
    return torch.tensor(pairs)


def _action_tokenizer(policy: OpenVLATarget) -> ActionTokenizer:
    assert isinstance(policy.codec, BinsCodec)
    return policy.codec.tokenizer


@torch.inference_mode()
def _sample(policy: OpenVLATarget, nano: OpenVLATarget, frame: Frame) -> Sample:
    assert policy.prompt.tokenizer is not None
    pixels = policy.image_processor(frame.observation.cameras[ONLY_CAMERA])[None]
    words = policy.prompt.tokenizer.encode(frame.text, add_special_tokens=False).ids
    shift = _action_tokenizer(policy).first_id - _action_tokenizer(nano).first_id
    answer = (*words, *(token + shift for token in frame.tokens))
    image = image_embeddings(policy.model, pixels)[0]
    return Sample(image, tuple(policy.prompt.ids(frame.task.instruction)), answer)


def _train(policy: OpenVLATarget, samples: list[Sample], steps: int, batch: int) -> None:
    trained = list(policy.decoder.parameters())
    for parameter in trained:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    rng = np.random.default_rng(0)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        logits, answers = _logits(policy, [samples[i] for i in rng.integers(0, len(samples), batch)])
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    policy.model.requires_grad_(False)


@torch.inference_mode()
def _accuracy(policy: OpenVLATarget, samples: list[Sample]) -> float:
    logits, answers = _logits(policy, samples)
    written = answers >= 0
    return float((logits.argmax(-1) == answers)[written].float().mean())


def _logits(policy: OpenVLATarget, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Logits [batch, longest answer, vocab] and the answers, int64, padded with -100."""
    embed, longest = policy.decoder.embed_tokens, max(len(sample.answer) for sample in samples)
    width = max(len(sample.prompt) for sample in samples) + longest - 1
    texts = torch.zeros(len(samples), width, dtype=torch.int64)
    answers = torch.full((len(samples), longest), -100)
    for i, sample in enumerate(samples):
        ids = (*sample.prompt, *sample.answer[:-1])
        texts[i, : len(ids)] = torch.tensor(ids)
        answers[i, : len(sample.answer)] = torch.tensor(sample.answer)
    images = torch.stack([sample.image for sample in samples]).clone()
    embedded = embed(texts)
    rows = torch.cat((embedded[:, :1], images, embedded[:, 1:]), dim=1)
    ends = torch.tensor([len(sample.prompt) for sample in samples]) - 1 + images.shape[1]
    wanted = (ends[:, None] + torch.arange(longest)).clamp(max=rows.shape[1] - 1)
    positions = torch.arange(rows.shape[1])
    mask = positions[:, None] >= positions
    hidden = decoder_hidden(policy.decoder, rows, mask, positions, wanted)
    return F.linear(hidden, policy.decoder.lm_head.weight), answers


if __name__ == "__main__":
    typer.run(main)
