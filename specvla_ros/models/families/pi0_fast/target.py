# SPDX-License-Identifier: Apache-2.0
"""From a pi0-FAST checkpoint directory, as LeRobot saves it, to a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import TARGETS, refuse_options
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.fast_tokenizer import read_fast_tokenizer
from specvla_ros.models.config import check_directory
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.pi0_fast.config import MODEL_TYPE, Normalisation, Pi0FastConfig, read_config
from specvla_ros.models.families.pi0_fast.model import PaliGemma, load_model
from specvla_ros.models.families.pi0_fast.pictures import padded_picture
from specvla_ros.models.generation import NO_RULES, GreedyRules
from specvla_ros.models.observation import Observation
from specvla_ros.models.settings import ALL_CAMERAS
from specvla_ros.models.target import ImageEmbeddings, Pixels, PromptLayout
from specvla_ros.models.tokenizer import check_instruction, check_tokenizer, refuse_special_tokens, require_tokenizer
from specvla_ros.models.weights import Progress

_EDGES = np.linspace(-1, 1, 257)[:-1]  # of the state's bins, as openpi's tokenizer has them
_BEGINNING, _END = "Action: ", "|"


@dataclass(frozen=True)
class Pi0FastTarget:
    """A checkpoint, ready to decode. Holds no state between observations. See `Target`.

    Its prompt is [images][text]<bos>, and all of it sees all of it; LeRobot's padding takes no part, and is left out.

    Args:
        directory: of the checkpoint.
        model: vision tower and language model.
        tokenizer: text to ids and back.
        codec: its answers.
        state: normalises the robot's state.
        cameras: those that it is asked with, in its order.
        image_size: height and width of a picture.
        prompt_tokens: longest prompt.
        bos_id: the token behind the text.
    """

    directory: Path
    model: PaliGemma
    tokenizer: Tokenizer
    codec: Codec
    state: Normalisation
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    prompt_tokens: int
    bos_id: int

    unnorm_key: str = ""
    causal_prompt: bool = False
    action_head: bool = False
    head: None = None
    generation: GreedyRules = NO_RULES

    @property
    def decoder(self) -> PackedDecoder:
        return self.model.decoder

    @property
    def image_tokens(self) -> int:
        return self.model.image_tokens

    @property
    def state_dims(self) -> int:
        return len(self.state.first)

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        """Images, task, state and <bos>.

        Raises:
            UserError: an instruction that cannot be asked, images of other cameras, or no state of the right length.
        """
        observation.of_cameras(self.cameras)
        ids = observation.prompt_ids
        if ids is None:
            ids = self.prompt_ids(observation.instruction, observation.state_of(self.state_dims))
        return PromptLayout(tuple(ids), self.image_tokens + len(ids), (range(self.image_tokens),), causal=False)

    def prompt_ids(self, instruction: str, state: np.ndarray) -> tuple[int, ...]:
        """Ids of a task and a state, <bos> last.

        Raises:
            UserError: it is no plain text of a usable length, or holds one of the tokenizer's special tokens.
        """
        check_instruction(instruction)
        refuse_special_tokens(instruction, self.tokenizer)
        task = instruction.strip().replace("_", " ").replace("\n", " ")
        bins = (np.digitize(self.state(state), _EDGES) - 1).tolist()
        ids = self.tokenizer.encode(f"Task: {task}, State: {' '.join(map(str, bins))};\n").ids
        if len(ids) > self.prompt_tokens:
            raise UserError(
                f"the prompt has {len(ids)} tokens, and the policy reads {self.prompt_tokens}: the robot's state, with "
                "which it ends, would be lost; shorten the instruction"
            )
        return (*ids, self.bos_id)

    def pixels(self, observation: Observation) -> Pixels:
        """See `PreparesPictures`; of all images together."""
        images = observation.of_cameras(self.cameras).values()
        return (torch.stack([padded_picture(image, *self.image_size) for image in images]),)

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Sequence[int],
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        (seen,) = pixels or self.pixels(observation)
        rows = (vision or self.model.image_embeddings)(seen)
        return torch.cat((rows, self.decoder.embed_tokens(to_device(prompt_ids, self.decoder.device))))

    def blank_observation(self) -> Observation:
        """Black images, and a robot at the middle of its training data."""
        black = np.zeros((*self.image_size, 3), np.uint8)
        images = dict.fromkeys(self.cameras, black)
        return Observation(images, "wait", stamp_ns=1, state=np.zeros(self.state_dims))

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.directory),
            "policy": MODEL_TYPE,
            "device": str(self.decoder.device),
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "cameras": ", ".join(self.cameras),
            "state": self.state_dims,
            "horizon": self.codec.horizon,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }


def load_pi0_fast(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    cameras: tuple[str, ...],
    progress: Progress | None,
    **options: Any,
) -> Pi0FastTarget:
    """Loads a pi0-FAST policy from a directory that LeRobot saved.

    Args:
        directory: holds config.json, model.safetensors, the processors with their statistics, tokenizer/ and
            action_tokenizer/.
        device: where the weights go.
        dtype: precision of the weights.
        cameras: those of its cameras that the robot has, or ALL_CAMERAS.
        progress: called with what is being done and the fraction of the tensors read.
        options: of other families, as they are where nobody sets them.

    Raises:
        UserError: anything about the directory or an argument that does not fit, before weights are read if possible.
    """
    refuse_options(directory, options)
    check_directory(directory)
    config = read_config(directory)
    asked = config.cameras if cameras == ALL_CAMERAS else cameras
    unknown = [name for name in asked if name not in config.cameras]
    if unknown:
        raise UserError(f"{directory} has no camera '{unknown[0]}'; its cameras are {', '.join(config.cameras)}")
    shown = tuple(name for name in config.cameras if name in asked)
    tokenizer = _tokenizer(config)
    codec = _codec(directory, config, tokenizer)
    return Pi0FastTarget(
        directory=directory,
        model=load_model(directory, config, len(shown), device, dtype, progress),
        tokenizer=tokenizer,
        codec=codec,
        state=config.state,
        cameras=shown,
        image_size=config.image_size,
        prompt_tokens=config.prompt_tokens,
        bos_id=_only(tokenizer, "<bos>", config.text_tokenizer),
    )


def _tokenizer(config: Pi0FastConfig) -> Tokenizer:
    hint = "copy PaliGemma's tokenizer there (google/paligemma-3b-pt-224)"
    tokenizer = require_tokenizer(config.text_tokenizer, hint)
    # <image> is behind the model's own ids.
    check_tokenizer(tokenizer, config.text_tokenizer / "tokenizer.json", config.decoder.vocab_size + 1)
    return tokenizer


def _only(tokenizer: Tokenizer, text: str, path: Path) -> int:
    found: int | None = tokenizer.token_to_id(text)
    if found is None:
        raise UserError(f"{path} has no token '{text}', which PaliGemma's has; copy it again")
    return found


def _codec(directory: Path, config: Pi0FastConfig, tokenizer: Tokenizer) -> FastCodec:
    if not config.action_tokenizer.is_dir():
        raise UserError(
            f"{config.action_tokenizer} is missing: copy the FAST tokenizer that the policy was trained with there "
            "(physical-intelligence/fast, unless it was fitted)"
        )
    fast = read_fast_tokenizer(config.action_tokenizer)
    first = config.decoder.vocab_size - 1 - config.skipped_ids
    if first < fast.vocab_size:
        raise UserError(f"{config.action_tokenizer} has {fast.vocab_size} ids, and the policy room for {first}")
    return FastCodec(
        tokenizer=fast,
        statistics=config.actions,
        horizon=config.chunk,
        first_id=first,
        end_ids=frozenset({_only(tokenizer, _END, config.text_tokenizer)}),
        limit=config.answer_tokens,
        beginning=tuple(tokenizer.encode(_BEGINNING, add_special_tokens=False).ids),
    )


TARGETS.register(MODEL_TYPE)(load_pi0_fast)
