# SPDX-License-Identifier: Apache-2.0
"""OpenVLA-OFT (arXiv 2502.19645): one parallel forward, and a head that turns its hidden states into a chunk.

Source: moojink/openvla-oft: experiments/robot/openvla_utils.py, prismatic/extern/hf/modeling_prismatic.py,
prismatic/models/action_heads.py and projectors.py, prismatic/vla/constants.py; and its fork of transformers, in which
every row of the sequence attends to every other.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

from specvla_ros.errors import UserError, missing_package
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.statistics import ActionStatistics, checked_statistics, select_statistics
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.families.openvla.image_processor import ImageProcessor, center_crop
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.prompt import PromptTokenizer
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.pickled_weights import copy_weights, read_pickled, tensors_in
from specvla_ros.models.settings import ALL_CAMERAS
from specvla_ros.models.target import Pixels, PromptLayout
from specvla_ros.models.vision_language import VisionLanguageTarget

_CAMERAS = (ONLY_CAMERA, "wrist", "wrist_2")
_STOP_ID = 2  # </s>, after the placeholders
_JPEG_QUALITY = 95
_EPS = 1e-8
_log = logging.getLogger(__name__)
# From prismatic/vla/constants.py, by a word in the dataset's name: actions per chunk, and the statistics for bounds.
_CONSTANTS = {"libero": (8, ("q01", "q99")), "aloha": (25, ("min", "max")), "bridge": (5, ("q01", "q99"))}
_OF_HEAD = {"norm_in": "layer_norm1", "fc_in": "fc1", "norm_out": "layer_norm2", "fc_out": "fc2"}


@dataclass(frozen=True)
class HeadCodec(Codec):
    """Codec of a policy that writes no tokens, whose actions come from a head: see `Target.head`.

    An answer ends with its first token, which has no meaning.
    """

    WRITES: ClassVar[str] = "actions of a head"

    statistics: ActionStatistics
    horizon: int
    dt_s: float | None = None
    max_tokens: int = 1

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return ()

    def problem(self, tokens: Sequence[int]) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        raise UserError("actions of OpenVLA-OFT come from a head, not from tokens")

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        raise UserError("actions of OpenVLA-OFT come from a head, not from tokens")

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        return len(draft)


class L1Head(nn.Module):
    """An MLP over the hidden states of each action's placeholders (L1RegressionActionHead), with residual `blocks`.

    Dimensions outside the mask of `bounds` are not scaled.
    """

    def __init__(self, bounds: ActionStatistics, hidden: int, width: int, blocks: int) -> None:
        super().__init__()
        dims = len(bounds.low)
        self.dims = dims
        self.norm_in, self.fc_in = nn.LayerNorm(dims * hidden), nn.Linear(dims * hidden, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(blocks))
        self.norm_out, self.fc_out = nn.LayerNorm(width), nn.Linear(width, dims)
        self._bounds = bounds

    def normalised(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [horizon * dims, hidden] to normalised actions [horizon, dims], not clipped."""
        x = F.relu(self.fc_in(self.norm_in(hidden.reshape(-1, self.dims * hidden.shape[-1]))))
        for block in self.blocks:
            x = x + F.relu(block(x))
        out: Tensor = self.fc_out(self.norm_out(x))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states to actions in the robot's units, float64."""
        values = self.normalised(hidden).double()
        low, high = (torch.from_numpy(each).to(values.device) for each in (self._bounds.low, self._bounds.high))
        scaled = 0.5 * (values + 1) * (high - low + _EPS) + low
        return torch.where(torch.from_numpy(self._bounds.mask).to(values.device), scaled, values)


class ProprioProjector(nn.Module):
    """Projects the robot's state to one row of the prompt."""

    def __init__(self, bounds: ActionStatistics, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(len(bounds.low), hidden), nn.Linear(hidden, hidden)
        self._bounds = bounds

    def normalised(self, state: np.ndarray) -> np.ndarray:
        """Normalises a state, float [dims] in the robot's units, to float64 from -1 to 1."""
        low, high = self._bounds.low, self._bounds.high
        scaled = 2 * (state - low) / (high - low + _EPS) - 1
        return np.clip(np.where(self._bounds.mask, scaled, state), -1.0, 1.0)  # also values that are not scaled

    def forward(self, state: Tensor) -> Tensor:
        """Maps a normalised state [dims] to [1, hidden]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(state)))[None]
        return out


def _read_head(path: Path, bounds: ActionStatistics, hidden: int) -> L1Head:
    saved = _tensors(path)
    blocks = len({name.split(".")[2] for name in saved if name.startswith("model.mlp_resnet_blocks.")})
    first = saved.get("model.fc1.weight")
    if first is None or first.dim() != 2:
        raise UserError(f"{path} contains no L1 head (model.fc1.weight); no other heads are supported")
    head = L1Head(bounds, hidden, first.shape[0], blocks)
    modules = {ours: f"model.{theirs}" for ours, theirs in _OF_HEAD.items()}
    for i in range(blocks):
        modules |= {f"blocks.{i}.{layer}": f"model.mlp_resnet_blocks.{i}.ffn.{layer}" for layer in (0, 1)}
    _fill(head, path, {f"{ours}.{part}": f"{modules[ours]}.{part}" for ours in modules for part in ("weight", "bias")})
    return head


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, without the name prefix that training on several GPUs leaves."""
    return {name.removeprefix("module."): each for name, each in tensors_in(read_pickled(path), path).items()}


@torch.no_grad()
def _fill(module: nn.Module, path: Path, names: dict[str, str]) -> None:
    wanted = {names.get(ours, ours): parameter.detach() for ours, parameter in module.named_parameters()}
    copy_weights(_tensors(path), wanted, path)


@dataclass(frozen=True)
class OFTParts:
    """An OFT directory's additions to OpenVLA's files; `proprio` turns the state into a row, if the policy reads it."""

    codec: HeadCodec
    head: L1Head
    proprio: ProprioProjector | None
    cameras: tuple[str, ...]

    def target(
        self,
        directory: Path,
        model: OpenVLA,
        image_processor: ImageProcessor,
        prompt: PromptTokenizer,
        *,
        cropped: bool,
    ) -> "OFTTarget":
        _jpeg_decoder()  # if missing, fails now and not at the first image of another size
        for module in (self.head, self.proprio):
            if module is not None:
                module.to(model.decoder.device, model.decoder.dtype).eval().requires_grad_(False)
        return OFTTarget(
            directory, model, image_processor, prompt, self.codec, self.head, self.proprio, self.cameras, cropped
        )


def read_oft(directory: Path, config: OpenVLAConfig, unnorm_key: str, cameras: tuple[str, ...]) -> OFTParts | None:
    """Reads the parts of an OFT checkpoint; None if it is not an OFT checkpoint.

    Raises UserError if it has an unsupported head or part, or a file is damaged or does not fit.
    """
    for pattern, what in (("noisy_action_projector--*.pt", "a diffusion head"), ("vision_backbone--*.pt", "FiLM")):
        if list(directory.glob(pattern)):
            raise UserError(f"{directory} is an OpenVLA-OFT checkpoint with {what}, which is not supported")
    head_file, projector = (_only(directory, kind) for kind in ("action_head", "proprio_projector"))
    if head_file is None:
        if projector is not None:
            raise UserError(
                f"{directory} is an incomplete OpenVLA-OFT checkpoint: it has {projector.name}, but no "
                "action_head--*.pt, which gives the actions; copy that of the same step next to it"
            )
        return None
    if projector is not None and _step(projector) != _step(head_file):
        raise UserError(f"{directory}: {head_file.name} and {projector.name} are of different steps; keep one step's")
    name = checked_statistics(directory, config.norm_stats, unnorm_key).unnorm_key
    horizon, bounds_of = next((each for word, each in _CONSTANTS.items() if word in name.lower()), (0, ("", "")))
    if not horizon:
        raise UserError(
            f"{directory} is an OpenVLA-OFT checkpoint of the dataset '{name}', but the number of actions per chunk is "
            f"known only for datasets with {', '.join(_CONSTANTS)} in their name"
        )
    actions = _bounds(directory, config, name, "action", bounds_of)
    hidden = config.llama.hidden_size
    proprio = None
    if projector is None and "proprio" in config.norm_stats[name]:
        _log.warning(
            "%s has no proprio_projector--*.pt: the policy reads no state of the robot; if it was trained with the "
            "state, copy that file of the step of %s next to it",
            directory,
            head_file.name,
        )
    if projector is not None:
        proprio = ProprioProjector(_bounds(directory, config, name, "proprio", bounds_of), hidden)
        _fill(proprio, projector, {})
    head = _read_head(head_file, actions, hidden)
    return OFTParts(HeadCodec(actions, horizon), head, proprio, _shown(directory, cameras))


def _shown(directory: Path, cameras: tuple[str, ...]) -> tuple[str, ...]:
    shown = _CAMERAS[:2] if cameras == ALL_CAMERAS else cameras
    if shown not in tuple(_CAMERAS[: n + 1] for n in range(len(_CAMERAS))):
        raise UserError(f"{directory}: model.cameras must begin with {', '.join(_CAMERAS)}, in this order")
    return shown


def _bounds(directory: Path, config: OpenVLAConfig, name: str, kind: str, of: tuple[str, str]) -> ActionStatistics:
    """The bounds of `action` or `proprio`, read like OpenVLA's action statistics."""
    given = config.norm_stats[name].get(kind)
    if not isinstance(given, dict) or not {*of} <= given.keys():
        raise UserError(f"{directory}: dataset_statistics.json needs {' and '.join(of)} of {kind}")
    fields = {"q01": given[of[0]], "q99": given[of[1]], **({"mask": given["mask"]} if "mask" in given else {})}
    return select_statistics({name: {kind: fields}}, name, kind)


def _only(directory: Path, kind: str) -> Path | None:
    files = list(directory.glob(f"{kind}--*.pt"))
    if len(files) > 1:
        raise UserError(f"{directory} contains {len(files)} files {kind}--*.pt; keep that of the step to run")
    return files[0] if files else None


def _step(file: Path) -> str:
    return file.name.partition("--")[2]


def _jpeg_decoder() -> Callable[..., np.ndarray]:
    try:
        from simplejpeg import decode_jpeg
    except ModuleNotFoundError as error:
        raise missing_package(error, "requirements/robot-oft.txt") from None
    decode: Callable[..., np.ndarray] = decode_jpeg
    return decode


def through_jpeg(image: np.ndarray) -> np.ndarray:
    """Encodes and decodes uint8 RGB as JPEG, with exactly TensorFlow's result.

    TensorFlow's decoder uses libjpeg's fast integer cosine transform, which Pillow cannot: values differ by up to 10.
    """
    compressed = BytesIO()
    Image.fromarray(image).save(compressed, "JPEG", quality=_JPEG_QUALITY, subsampling="4:2:0")
    pixels: np.ndarray = _jpeg_decoder()(compressed.getvalue(), "RGB", fastdct=True)
    return pixels


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """Resizes like TensorFlow's antialiased Lanczos filter, in float with one rounding; Pillow rounds uint8 twice."""
    channels = (Image.fromarray(each) for each in image.astype(np.float32).transpose(2, 0, 1))
    fitted = np.stack([np.asarray(each.resize((size, size), Image.Resampling.LANCZOS)) for each in channels], axis=2)
    return np.clip(np.rint(fitted), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class OFTTarget(VisionLanguageTarget):
    """A checkpoint, ready to act.

    Its prompt is BOS | images | state | rest of the text | a zero row per value of the chunk | </s>, with full
    attention. The head reads one row per value, starting at the text's last row.
    """

    directory: Path
    model: OpenVLA
    image_processor: ImageProcessor
    prompt: PromptTokenizer
    codec: HeadCodec
    head_module: L1Head
    proprio: ProprioProjector | None
    cameras: tuple[str, ...]
    cropped: bool  # images are cropped to the middle 90 % of their area before the image processor

    FAMILY = "openvla-oft"

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.prompt.tokenizer

    @property
    def causal_prompt(self) -> bool:
        return False

    @property
    def state_dims(self) -> int:
        return 0 if self.proprio is None else self.proprio.fc1.in_features

    @property
    def values(self) -> int:
        """Number of values of a chunk, each with its own placeholder."""
        return self.codec.horizon * self.head_module.dims

    @property
    def image_tokens(self) -> int:
        """Rows other than the text: images, state, placeholders and </s>."""
        return self._image_rows + (self.proprio is not None) + self.values + 1

    @property
    def _image_rows(self) -> int:
        return len(self.cameras) * self.model.config.image_tokens

    def ids(self, observation: Observation) -> tuple[int, ...]:
        observation.state_of(self.state_dims)
        return self.prompt.ids_of(observation)

    def layout(self, ids: tuple[int, ...]) -> PromptLayout:
        return PromptLayout(ids, len(ids) + self.image_tokens, (range(1, 1 + self._image_rows),), causal=False)

    def pixels(self, observation: Observation) -> Pixels:
        images = observation.of_cameras(self.cameras).values()
        return tuple(self.image_processor(self.picture(image)) for image in images)

    def assemble(self, observation: Observation, prompt_ids: Sequence[int], images: Tensor) -> Tensor:
        text = self.embedded((*prompt_ids, _STOP_ID))
        rows = [images]
        if self.proprio is not None:
            state = self.proprio.normalised(observation.state_of(self.state_dims))
            rows.append(self.proprio(torch.from_numpy(state).to(text)))
        nothing = text.new_zeros(self.values, text.shape[1])
        return torch.cat((text[:1], *rows, text[1:-1], nothing, text[-1:]))

    def picture(self, image: np.ndarray) -> np.ndarray:
        """The image at the towers' size, uint8 RGB. One of another size goes through JPEG first, as in training."""
        size = self.model.config.towers[0].image_size
        if image.shape[:2] != (size, size):
            image = resized(through_jpeg(image), size)
        return center_crop(image, size) if self.cropped else image

    def head(self, hidden: Tensor) -> Tensor:
        """See `ActionHead`."""
        stop = len(hidden) - 2
        actions: Tensor = self.head_module(hidden[stop - self.values : stop])
        return actions

    def blank_observation(self) -> Observation:
        return replace(super().blank_observation(), instruction="", prompt_ids=self.prompt.complete((1,)))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"center_crop": str(self.cropped).lower()}
