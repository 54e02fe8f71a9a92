# SPDX-License-Identifier: Apache-2.0
"""OpenVLA-OFT (arXiv 2502.19645): one parallel forward, and a head that makes a chunk of actions of its hidden states.

Read in moojink/openvla-oft: experiments/robot/openvla_utils.py, prismatic/extern/hf/modeling_prismatic.py,
prismatic/models/action_heads.py and projectors.py, prismatic/vla/constants.py; and in its fork of transformers, in
which every row of the sequence sees every other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

from specvla_kernels.device import to_device
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionStatistics, select_statistics
from specvla_ros.models.codecs.head import HeadCodec
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.families.openvla.image_processor import ImageProcessor, center_crop
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.prompt import PromptTokenizer
from specvla_ros.models.generation import NO_RULES, GreedyRules
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.pickled_weights import copy_weights, read_pickled, tensors_in
from specvla_ros.models.settings import ALL_CAMERAS
from specvla_ros.models.target import ImageEmbeddings, Pixels, PromptLayout

HEAD_FILES = "action_head--*.pt"
_CAMERAS = (ONLY_CAMERA, "wrist", "wrist_2")
_USUAL_CAMERAS = _CAMERAS[:2]
_STOP_ID = 2  # </s>, behind the placeholders
_EPS = 1e-8
_JPEG_QUALITY = 95
# Of prismatic/vla/constants.py, by a word in the dataset's name: actions of a chunk, and the bounds of a statistic.
_CONSTANTS = {"libero": (8, ("q01", "q99")), "aloha": (25, ("min", "max")), "bridge": (5, ("q01", "q99"))}


@dataclass(frozen=True)
class _Bounds:
    """Of one vector's values, float64 [dims]; what the mask leaves out is used as it is."""

    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray


class L1Head(nn.Module):
    """An MLP over the hidden states of each action's placeholders (L1RegressionActionHead).

    Args:
        bounds: of the actions.
        hidden: width of a hidden state.
        blocks: with a residual.
    """

    def __init__(self, bounds: _Bounds, hidden: int, width: int, blocks: int) -> None:
        super().__init__()
        dims = len(bounds.low)
        self.dims = dims
        self.norm_in, self.fc_in = nn.LayerNorm(dims * hidden), nn.Linear(dims * hidden, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(blocks))
        self.norm_out, self.fc_out = nn.LayerNorm(width), nn.Linear(width, dims)
        self._bounds = bounds

    def normalised(self, hidden: Tensor) -> Tensor:
        """Hidden states [horizon * dims, hidden] to normalised actions [horizon, dims], not clipped."""
        x = F.relu(self.fc_in(self.norm_in(hidden.reshape(-1, self.dims * hidden.shape[-1]))))
        for block in self.blocks:
            x = x + F.relu(block(x))
        out: Tensor = self.fc_out(self.norm_out(x))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        """The same in the robot's units, float64."""
        values = self.normalised(hidden).double()
        low, high = (torch.from_numpy(each).to(values.device) for each in (self._bounds.low, self._bounds.high))
        scaled = 0.5 * (values + 1) * (high - low + _EPS) + low
        return torch.where(torch.from_numpy(self._bounds.mask).to(values.device), scaled, values)


class ProprioProjector(nn.Module):
    """The robot's state as one row of the prompt."""

    def __init__(self, bounds: _Bounds, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(len(bounds.low), hidden), nn.Linear(hidden, hidden)
        self._bounds = bounds

    def normalised(self, state: np.ndarray) -> np.ndarray:
        """Float [dims] in the robot's units to float64 from -1 to 1."""
        low, high = self._bounds.low, self._bounds.high
        scaled = np.clip(2 * (state - low) / (high - low + _EPS) - 1, -1.0, 1.0)
        values: np.ndarray = np.where(self._bounds.mask, scaled, state)
        return values

    def forward(self, state: Tensor) -> Tensor:
        """Normalised state [dims] to [1, hidden]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(state)))[None]
        return out


@dataclass(frozen=True)
class OFTTarget:
    """A checkpoint, ready to act. Holds no state between observations. See `Target`.

    Its prompt is BOS | images | state | the rest of the text | a zero row per value of the chunk | </s>, and all of it
    sees all of it. The head reads as many rows as there are values, from the text's last row on.

    Args:
        directory: of the checkpoint.
        model: towers, projector and language model.
        image_processor: what becomes of a picture, which is cropped before.
        prompt: instructions to ids.
        codec: names, units and horizon of its actions.
        head_module: hidden states to actions.
        proprio: the robot's state to a row; None: it does not read it.
        cameras: those that it is asked with.
        cropped: to the middle 90 % of a picture's area first.
    """

    directory: Path
    model: OpenVLA
    image_processor: ImageProcessor
    prompt: PromptTokenizer
    codec: HeadCodec
    head_module: L1Head
    proprio: ProprioProjector | None
    cameras: tuple[str, ...]
    cropped: bool

    causal_prompt: bool = False
    action_head: bool = False
    generation: GreedyRules = NO_RULES

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.prompt.tokenizer

    @property
    def decoder(self) -> PackedDecoder:
        return self.model.decoder

    @property
    def unnorm_key(self) -> str:
        return self.codec.unnorm_key

    @property
    def state_dims(self) -> int:
        return 0 if self.proprio is None else self.proprio.fc1.in_features

    @property
    def values(self) -> int:
        """Of a chunk, each with a placeholder of its own."""
        return self.codec.horizon * self.head_module.dims

    @property
    def image_tokens(self) -> int:
        """Rows beside the text: the images', the state's, the placeholders and what ends them."""
        return self._image_rows + (self.proprio is not None) + self.values + 1

    @property
    def _image_rows(self) -> int:
        return len(self.cameras) * self.model.config.image_tokens

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        """All rows of the one forward.

        Raises:
            UserError: an instruction that cannot be asked, images of other cameras, or no state of the right length.
        """
        observation.of_cameras(self.cameras)
        observation.state_of(self.state_dims)
        ids = observation.prompt_ids
        ids = self.prompt.ids(observation.instruction) if ids is None else self.prompt.complete(ids)
        return PromptLayout(ids, len(ids) + self.image_tokens, (range(1, 1 + self._image_rows),), causal=False)

    def pixels(self, observation: Observation) -> Pixels:
        """See `PreparesPictures`; picture by picture: a captured tower has the size of one."""
        images = observation.of_cameras(self.cameras).values()
        return tuple(self.image_processor(self.picture(image)) for image in images)

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Sequence[int],
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        embed, device = self.decoder.embed_tokens, self.decoder.device
        text = embed(to_device((*prompt_ids, _STOP_ID), device))
        images = vision or self.model.image_embeddings
        rows = [images(each).clone() for each in pixels or self.pixels(observation)]
        if self.proprio is not None:
            state = self.proprio.normalised(observation.state_of(self.state_dims))
            rows.append(self.proprio(torch.from_numpy(state).to(device, text.dtype)))
        nothing = torch.zeros(self.values, text.shape[1], dtype=text.dtype, device=device)
        return torch.cat((text[:1], *rows, text[1:-1], nothing, text[-1:]))

    def picture(self, image: np.ndarray) -> np.ndarray:
        """Uint8 RGB at the towers' size: a picture of another size goes through JPEG first, as in training.

        TensorFlow's decoder and resampling, which the original uses, differ from Pillow's by a few shades.
        """
        size = self.model.config.towers[0].image_size
        if image.shape[:2] != (size, size):
            compressed = BytesIO()
            Image.fromarray(image).save(compressed, "JPEG", quality=_JPEG_QUALITY)
            image = np.asarray(Image.open(compressed).resize((size, size), Image.Resampling.LANCZOS))
        return center_crop(image, size) if self.cropped else image

    def head(self, hidden: Tensor) -> Tensor:
        """The prompt's last hidden states [rows, hidden] to actions float64 [horizon, dims] in the robot's units."""
        stop = len(hidden) - 2
        actions: Tensor = self.head_module(hidden[stop - self.values : stop])
        return actions

    def blank_observation(self) -> Observation:
        """Black images, a state of zeros and a prompt of one token."""
        size = self.model.config.towers[0].image_size
        images = dict.fromkeys(self.cameras, np.zeros((size, size, 3), np.uint8))
        return Observation(
            images, "", stamp_ns=1, prompt_ids=self.prompt.complete((1,)), state=np.zeros(self.state_dims)
        )

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.directory),
            "policy": "openvla-oft",
            "unnorm_key": self.unnorm_key,
            "device": str(self.decoder.device),
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "cameras": ", ".join(self.cameras),
            "state": self.state_dims,
            "horizon": self.codec.horizon,
            "center_crop": str(self.cropped).lower(),
        }


@dataclass(frozen=True)
class OFTParts:
    """What an OFT directory has beside OpenVLA's files.

    Args:
        codec: of its actions.
        head: hidden states to actions.
        proprio: the state to a row; None: it has none.
        cameras: those that it is asked with.
    """

    codec: HeadCodec
    head: L1Head
    proprio: ProprioProjector | None
    cameras: tuple[str, ...]


def read_oft(directory: Path, config: OpenVLAConfig, unnorm_key: str, cameras: tuple[str, ...]) -> OFTParts | None:
    """The parts of an OFT checkpoint; None where it is none.

    Raises:
        UserError: it has a head or parts that are not supported, or a file is damaged or does not fit.
    """
    heads = sorted(directory.glob(HEAD_FILES))
    for pattern, what in (("noisy_action_projector--*.pt", "a diffusion head"), ("vision_backbone--*.pt", "FiLM")):
        if list(directory.glob(pattern)):
            raise UserError(f"{directory} is an OpenVLA-OFT checkpoint with {what}, which is not supported")
    if not heads:
        return None
    statistics, name = _statistics(directory, config, unnorm_key)
    horizon, bounds_of = next((each for word, each in _CONSTANTS.items() if word in name.lower()), (0, ("", "")))
    if not horizon:
        raise UserError(
            f"{directory} is an OpenVLA-OFT checkpoint of the dataset '{name}', and how many actions its chunks have "
            f"is known for those with {', '.join(_CONSTANTS)} in their name"
        )
    actions = _bounds(statistics, "action", bounds_of, directory)
    hidden = config.llama.hidden_size
    projector = _only(directory, "proprio_projector--*.pt")
    proprio = None
    if projector is not None:
        proprio = ProprioProjector(_bounds(statistics, "proprio", bounds_of, directory), hidden)
        _fill(proprio, projector, {f"{fc}.{part}": f"{fc}.{part}" for fc in ("fc1", "fc2") for part in _PARTS})
    names = ActionStatistics(name, actions.low, actions.high, actions.mask)
    head = _head(directory, actions, hidden)
    return OFTParts(HeadCodec(names, horizon), head, proprio, _shown(directory, cameras))


def _shown(directory: Path, cameras: tuple[str, ...]) -> tuple[str, ...]:
    shown = _USUAL_CAMERAS if cameras == ALL_CAMERAS else cameras
    if shown not in tuple(_CAMERAS[: n + 1] for n in range(len(_CAMERAS))):
        raise UserError(f"{directory}: model.cameras must begin with {', '.join(_CAMERAS)}, in this order")
    return shown


def _statistics(directory: Path, config: OpenVLAConfig, unnorm_key: str) -> tuple[dict[str, Any], str]:
    """One dataset's, and its name."""
    try:
        name = select_statistics(config.norm_stats, unnorm_key).unnorm_key
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    return config.norm_stats[name], name


def _bounds(statistics: dict[str, Any], kind: str, names: tuple[str, str], directory: Path) -> _Bounds:
    """Of `action` or `proprio`, read as OpenVLA's action statistics are."""
    given = statistics.get(kind)
    if not isinstance(given, dict) or not {*names} <= given.keys():
        raise UserError(f"{directory}: dataset_statistics.json needs {' and '.join(names)} of {kind}")
    fields = {"q01": given[names[0]], "q99": given[names[1]], **({"mask": given["mask"]} if "mask" in given else {})}
    found = select_statistics({"": {kind: fields}}, "", kind)
    return _Bounds(found.low, found.high, found.mask)


_PARTS = ("weight", "bias")
_OF_HEAD = {
    "norm_in": "model.layer_norm1",
    "fc_in": "model.fc1",
    "norm_out": "model.layer_norm2",
    "fc_out": "model.fc2",
}


def _head(directory: Path, bounds: _Bounds, hidden: int) -> L1Head:
    path = _only(directory, HEAD_FILES)
    assert path is not None
    saved = _module(path)
    blocks = len({name.split(".")[2] for name in saved if name.startswith("model.mlp_resnet_blocks.")})
    first = saved.get("model.fc1.weight")
    if first is None or first.dim() != 2:
        raise UserError(f"{path} holds no L1 head (model.fc1.weight); only those are supported")
    head = L1Head(bounds, hidden, first.shape[0], blocks)
    names = {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in _OF_HEAD.items() for part in _PARTS}
    for i in range(blocks):
        for layer in (0, 1):
            theirs = f"model.mlp_resnet_blocks.{i}.ffn.{layer}"
            names |= {f"blocks.{i}.{layer}.{part}": f"{theirs}.{part}" for part in _PARTS}
    _fill(head, path, names)
    return head


def _only(directory: Path, pattern: str) -> Path | None:
    files = sorted(directory.glob(pattern))
    if len(files) > 1:
        raise UserError(f"{directory} holds {len(files)} files {pattern}; keep that of the step to run")
    return files[0] if files else None


def _module(path: Path) -> dict[str, Tensor]:
    """A file's tensors, without the prefix that training on several GPUs leaves."""
    return {name.removeprefix("module."): each for name, each in tensors_in(read_pickled(path), path).items()}


@torch.no_grad()
def _fill(module: nn.Module, path: Path, names: dict[str, str]) -> None:
    wanted = {names[ours]: parameter.detach() for ours, parameter in module.named_parameters()}
    for _ in copy_weights(_module(path), wanted, path):
        pass  # it yields after each tensor, for progress
