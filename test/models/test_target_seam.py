# SPDX-License-Identifier: Apache-2.0
"""A second family of policies and a second codec, in one file: two cameras, a state, and actions written as digits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import edit_json, write_checkpoint

from benchmarks.random_policy import random_decoder
from specvla_ros import Engine, EngineSettings, Observation, Policy, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.models import checkpoint
from specvla_ros.models.codecs.codec import CODECS, ActionIds, Codec
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.generation import NO_RULES
from specvla_ros.models.target import TARGETS, PromptLayout, Target
from specvla_ros.speculation.settings import DraftSettings, adjusted

DIGITS = range(10, 20)
CAMERAS = ("left", "right")


@dataclass(frozen=True)
class DigitCodec(Codec):
    """Two actions of two dimensions, each a number of two digits from 0 to 99; any other token counts as 0."""

    max_text: int = 0
    names = ("reach", "grip")
    unnorm_key = ""
    horizon = 2
    dt_s = 0.1
    action_range = (np.zeros(2), np.full(2, 99.0))
    action_ids = ActionIds(DIGITS.start, DIGITS.stop, bins=10)
    distances = action_ids
    max_tokens = 8

    def with_text(self, max_text: int) -> "DigitCodec":
        return replace(self, max_text=max_text)

    def legal_ids(self, tokens: Sequence[int]) -> range:
        return DIGITS

    def problem(self, tokens: Sequence[int]) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        digits = np.array([token - DIGITS.start if token in DIGITS else 0 for token in tokens], dtype=np.float64)
        return digits.reshape(2, 2, 2) @ [10.0, 1.0]

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        numbers = np.clip(np.rint(actions), 0, 99).astype(int).ravel()
        return tuple(DIGITS.start + digit for number in numbers.tolist() for digit in divmod(number, 10))

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        return actions / 50 - 1

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        raise UserError("digits have no unit")

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        return (0, bins[0]) * 4  # the last digit of each number

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        return np.asarray(bins, dtype=np.float64).reshape(2, 2, 2) @ [10.0, 1.0]


@dataclass(frozen=True)
class TwoCameras:
    """Each camera's mean colour is a prompt row, and so is the state."""

    directory: Path
    decoder: PackedDecoder
    codec = DigitCodec()
    causal_prompt = True
    action_head = False
    image_tokens = 2
    tokenizer = None
    unnorm_key = ""
    pixel_shape = ()
    cameras = CAMERAS
    state_dims = 2
    state_names = ()
    head = None
    generation = NO_RULES

    @property
    def model(self) -> "TwoCameras":
        return self

    def image_embeddings(self, pixel_values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        if tuple(observation.cameras) != CAMERAS or observation.state is None:
            raise UserError(f"this policy needs the cameras {', '.join(CAMERAS)} and a state")
        ids = tuple(20 + len(word) % 10 for word in observation.instruction.split())
        return PromptLayout(ids, 3 + len(ids), (range(2),))

    def prompt_embeddings(
        self, observation: Observation, prompt_ids: Sequence[int], vision: Any = None
    ) -> torch.Tensor:
        assert observation.state is not None
        means = [float(image.mean()) / 255 for image in observation.cameras.values()]
        seen = torch.tensor([*means, float(observation.state.sum())], dtype=self.decoder.dtype)
        rows = torch.sin(seen[:, None] * torch.arange(1, self.decoder.config.hidden_size + 1))
        return torch.cat((rows, self.decoder.embed_tokens(torch.tensor(prompt_ids))))

    def blank_observation(self) -> Observation:
        return observation(0, stamp_ns=1)

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": str(self.directory)}


def load_two_cameras(directory: Path, **_: Any) -> TwoCameras:
    torch.manual_seed(3)
    decoder = random_decoder(DecoderShape(32, 40, 2, 4, 2, 16, vocab_size=50), dtype=torch.float64)
    return TwoCameras(directory, decoder)


def observation(seed: int, stamp_ns: int, instruction: str = "stack both cubes") -> Observation:
    images = np.random.default_rng(seed).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)
    state = np.array([0.1 * seed, 0.2])
    return Observation(dict(zip(CAMERAS, images, strict=True)), instruction, stamp_ns, state=state)


def plain_tokens(target: Target, seen: Observation) -> list[int]:
    """One token at a time, each by a forward over everything before it."""
    layout = target.prompt_layout(seen)
    rows = target.prompt_embeddings(seen, layout.ids)
    tokens: list[int] = []
    for _ in range(target.codec.max_tokens):
        cache = new_cache(target.decoder, slots=1, slot_rows=len(rows) + 1)
        logits = packed_forward(target.decoder, [Segment(0, 0, rows)], cache).logits
        tokens.append(int(logits.argmax()))
        rows = torch.cat((rows, target.decoder.embed_tokens(torch.tensor(tokens[-1:]))))
    return tokens


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    TARGETS.entries()
    monkeypatch.setattr(TARGETS, "_entries", dict(TARGETS._entries))
    TARGETS.register("two_cameras")(load_two_cameras)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "two_cameras"}))
    return tmp_path


@pytest.mark.parametrize("mode", ["ar", "spec", "pipeline", "specpipe"])
@torch.inference_mode()
def test_every_mode_decodes_another_family_losslessly(directory: Path, mode: str) -> None:
    target = checkpoint.load_target(directory)
    chosen = EngineSettings(mode, draft=adjusted(DraftSettings(nodes=12), temporal=True), in_order=True)
    engine = Engine(target, chosen)
    engine.warm_up()
    for seed in range(4):
        seen = observation(seed % 2, stamp_ns=seed + 2)
        action = engine.act(seen)
        assert isinstance(action, Action)
        assert list(action.tokens) == plain_tokens(target, seen)
        assert action.actions.shape == (2, 2) and action.dt_s == 0.1 and action.names == ("reach", "grip")


def test_another_family_has_the_public_face_too(directory: Path) -> None:
    policy = Policy.load(directory)
    seen = observation(1, 1)
    action = policy.act(seen.cameras, "stack both cubes", state=seen.state)
    assert list(action.tokens) == plain_tokens(policy.engine.target, seen)
    with pytest.raises(UserError, match="needs the cameras left, right and a state"):
        policy.engine.target.prompt_layout(Observation(seen.cameras["left"], "stack both cubes", 1))


@pytest.mark.parametrize("actions", [[[3.0, 97.0], [40.0, 0.0]], [[99.0, 10.0], [0.0, 1.0]]])
def test_the_codec_round_trips_and_bounds_what_it_accepts(actions: list[list[float]]) -> None:
    codec = DigitCodec()
    tokens = codec.encode(np.array(actions))
    assert codec.decode(tokens).tolist() == actions
    assert codec.bound(codec.spread_bins([2], 0)).tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_checkpoint_may_name_another_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(action_codec="pairs"))
    with pytest.raises(UserError, match="unknown action codec 'pairs'; known: bins"):
        checkpoint.load_target(tmp_path, device="cpu")
    monkeypatch.setattr(CODECS, "_entries", dict(CODECS.entries()))
    CODECS.register("pairs")(lambda context: DigitCodec())
    target = checkpoint.load_target(tmp_path, device="cpu")
    action = Engine(target, EngineSettings("ar")).act(Observation(np.zeros((8, 8, 3), np.uint8), "lift the cube", 1))
    assert isinstance(action, Action) and action.actions.shape == (2, 2) and len(action.tokens) == 8
