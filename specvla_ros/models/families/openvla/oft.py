# SPDX-License-Identifier: Apache-2.0
"""OpenVLA-OFT (arXiv 2502.19645): one parallel forward, and a head that makes a chunk of actions of its hidden states.

Read in moojink/openvla-oft: experiments/robot/openvla_utils.py, prismatic/extern/hf/modeling_prismatic.py,
prismatic/models/action_heads.py and projectors.py, prismatic/vla/constants.py; and in its fork of transformers, in
which every row of the sequence sees every other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.chunk import HeadCodec
from specvla_ros.models.codecs.statistics import ActionStatistics, checked_statistics, select_statistics
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.families.openvla.image_processor import ImageProcessor, center_crop
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.oft_head import L1Head, ProprioProjector, read_head, read_proprio
from specvla_ros.models.families.openvla.prompt import PromptTokenizer
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.settings import ALL_CAMERAS
from specvla_ros.models.target import Pixels, PromptLayout
from specvla_ros.models.vision_language import VisionLanguageTarget

_CAMERAS = (ONLY_CAMERA, "wrist", "wrist_2")
_USUAL_CAMERAS = _CAMERAS[:2]
_STOP_ID = 2  # </s>, behind the placeholders
_JPEG_QUALITY = 95
# Of prismatic/vla/constants.py, by a word in the dataset's name: actions of a chunk, and the bounds of a statistic.
_CONSTANTS = {"libero": (8, ("q01", "q99")), "aloha": (25, ("min", "max")), "bridge": (5, ("q01", "q99"))}


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
    heads, projectors = (sorted(directory.glob(f"{name}--*.pt")) for name in ("action_head", "proprio_projector"))
    for pattern, what in (("noisy_action_projector--*.pt", "a diffusion head"), ("vision_backbone--*.pt", "FiLM")):
        if list(directory.glob(pattern)):
            raise UserError(f"{directory} is an OpenVLA-OFT checkpoint with {what}, which is not supported")
    if not heads:
        return None
    name = checked_statistics(directory, config.norm_stats, unnorm_key).unnorm_key
    horizon, bounds_of = next((each for word, each in _CONSTANTS.items() if word in name.lower()), (0, ("", "")))
    if not horizon:
        raise UserError(
            f"{directory} is an OpenVLA-OFT checkpoint of the dataset '{name}', and how many actions its chunks have "
            f"is known for those with {', '.join(_CONSTANTS)} in their name"
        )
    actions = _bounds(directory, config, name, "action", bounds_of)
    hidden = config.llama.hidden_size
    proprio = None
    if projectors:
        state = _bounds(directory, config, name, "proprio", bounds_of)
        proprio = read_proprio(_only(directory, projectors), state, hidden)
    return OFTParts(
        HeadCodec(actions, horizon),
        read_head(_only(directory, heads), actions, hidden),
        proprio,
        _shown(directory, cameras),
    )


def _shown(directory: Path, cameras: tuple[str, ...]) -> tuple[str, ...]:
    shown = _USUAL_CAMERAS if cameras == ALL_CAMERAS else cameras
    if shown not in tuple(_CAMERAS[: n + 1] for n in range(len(_CAMERAS))):
        raise UserError(f"{directory}: model.cameras must begin with {', '.join(_CAMERAS)}, in this order")
    return shown


def _bounds(directory: Path, config: OpenVLAConfig, name: str, kind: str, of: tuple[str, str]) -> ActionStatistics:
    """A dataset's, of `action` or `proprio`, read as OpenVLA's action statistics are."""
    given = config.norm_stats[name].get(kind)
    if not isinstance(given, dict) or not {*of} <= given.keys():
        raise UserError(f"{directory}: dataset_statistics.json needs {' and '.join(of)} of {kind}")
    fields = {"q01": given[of[0]], "q99": given[of[1]], **({"mask": given["mask"]} if "mask" in given else {})}
    return select_statistics({name: {kind: fields}}, name, kind)


def _only(directory: Path, files: list[Path]) -> Path:
    if len(files) > 1:
        kind = files[0].name.partition("--")[0]
        raise UserError(f"{directory} holds {len(files)} files {kind}--*.pt; keep that of the step to run")
    return files[0]


def oft_target(
    directory: Path,
    model: OpenVLA,
    image_processor: ImageProcessor,
    prompt: PromptTokenizer,
    parts: OFTParts,
    *,
    cropped: bool,
) -> "OFTTarget":
    """The target of an OFT checkpoint, whose model is loaded; see `OFTTarget`."""
    for module in (parts.head, parts.proprio):
        if module is not None:
            module.to(model.decoder.device, model.decoder.dtype).eval().requires_grad_(False)
    return OFTTarget(
        directory, model, image_processor, prompt, parts.codec, parts.head, parts.proprio, parts.cameras, cropped
    )


@dataclass(frozen=True)
class OFTTarget(VisionLanguageTarget):
    """A checkpoint, ready to act.

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
        """Of a chunk, each with a placeholder of its own."""
        return self.codec.horizon * self.head_module.dims

    @property
    def image_tokens(self) -> int:
        """Rows beside the text: the images', the state's, the placeholders and what ends them."""
        return self._image_rows + (self.proprio is not None) + self.values + 1

    @property
    def _image_rows(self) -> int:
        return len(self.cameras) * self.model.config.image_tokens

    def ids(self, observation: Observation) -> tuple[int, ...]:
        observation.state_of(self.state_dims)
        return self.prompt.ids_of(observation)

    def layout(self, ids: tuple[int, ...]) -> PromptLayout:
        """All rows of the one forward."""
        return PromptLayout(ids, len(ids) + self.image_tokens, (range(1, 1 + self._image_rows),), causal=False)

    def pixels(self, observation: Observation) -> Pixels:
        """See `PreparesPictures`; picture by picture: a captured tower has the size of one."""
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
        """Black images, a state of zeros and a prompt of one token, which needs no tokenizer."""
        return replace(super().blank_observation(), instruction="", prompt_ids=self.prompt.complete((1,)))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"center_crop": str(self.cropped).lower()}
