# SPDX-License-Identifier: Apache-2.0
"""The base class of all families' targets; a family adds its pixels, prompt and answers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.generation import NO_RULES, GreedyRules
from specvla_ros.models.lora import adapter_of
from specvla_ros.models.observation import Observation
from specvla_ros.models.quantization import parameter_count
from specvla_ros.models.target import ActionHead, ImageEmbeddings, Pixels, PromptLayout
from specvla_ros.models.tokenizer import check_prompt_ids

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

_BLANK = (64, 64)  # pixels of a warm-up image


class VisionLanguageTarget:
    """A checkpoint, ready to decode. Holds no state between observations. See `Target`.

    A family is a frozen dataclass with `pixels` and `written`, and with `layout` and `assemble` if its prompt is not
    BOS | images | rest of the text. Its `model` is a `VisionModel` and a torch module around a `PackedDecoder`.
    """

    FAMILY: ClassVar[str]
    if TYPE_CHECKING:  # fields in some families, properties in others

        @property
        def directory(self) -> Path: ...
        @property
        def model(self) -> Any: ...
        @property
        def codec(self) -> Codec: ...
        @property
        def tokenizer(self) -> Tokenizer | None: ...
        @property
        def cameras(self) -> tuple[str, ...]: ...
        @property
        def image_tokens(self) -> int: ...
        @property
        def image_processor(self) -> Callable[[np.ndarray], Tensor]: ...

    @property
    def decoder(self) -> PackedDecoder:
        decoder: PackedDecoder = self.model.decoder
        return decoder

    @property
    def unnorm_key(self) -> str:
        return self.codec.unnorm_key

    @property
    def causal_prompt(self) -> bool:
        return True

    @property
    def action_head(self) -> bool:
        return False

    @property
    def state_dims(self) -> int:
        return 0

    @property
    def state_names(self) -> tuple[str, ...]:
        return ()

    @property
    def generation(self) -> GreedyRules:
        return NO_RULES

    @property
    def head(self) -> ActionHead | None:
        return None

    def ids(self, observation: Observation) -> tuple[int, ...]:
        """Token ids of the prompt's text; UserError if the instruction or the state does not fit the policy."""
        given = observation.prompt_ids
        if given is None:
            return self.written(observation)
        check_prompt_ids(given, self.decoder.config.vocab_size)
        return tuple(given)

    def written(self, observation: Observation) -> tuple[int, ...]:
        """Token ids of the prompt's text, used if the observation gives no ids."""
        raise NotImplementedError

    def pixels(self, observation: Observation) -> Pixels:
        """See `PreparesImages`; one entry per image, since a captured tower takes a single image."""
        return tuple(map(self.image_processor, observation.of_cameras(self.cameras).values()))

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        observation.of_cameras(self.cameras)
        return self.layout(self.ids(observation))

    def layout(self, ids: tuple[int, ...]) -> PromptLayout:
        return PromptLayout(ids, len(ids) + self.image_tokens, (range(1, 1 + self.image_tokens),))

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Sequence[int],
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        embed = vision or self.model.image_embeddings
        first, *others = pixels or self.pixels(observation)
        images = torch.cat([embed(each).clone() for each in (first, *others)]) if others else embed(first)
        return self.assemble(observation, prompt_ids, images)

    def assemble(self, observation: Observation, prompt_ids: Sequence[int], images: Tensor) -> Tensor:
        """The whole prompt [rows, hidden] from the images' embeddings [image_tokens, hidden] and the text."""
        text = self.embedded(prompt_ids)
        return torch.cat((text[:1], images, text[1:]))

    def embedded(self, ids: Sequence[int]) -> Tensor:
        rows: Tensor = self.decoder.embed_tokens(to_device(ids, self.decoder.device))
        return rows

    def blank_observation(self) -> Observation:
        """Black images, a state of zeros, and an instruction of one word."""
        black = np.zeros((*_BLANK, 3), np.uint8)
        return Observation(dict.fromkeys(self.cameras, black), "wait", stamp_ns=1, state=np.zeros(self.state_dims))

    def describe(self) -> dict[str, Any]:
        adapter = adapter_of(self.directory)
        return {
            "checkpoint": str(self.directory),
            **({"adapter": adapter} if adapter else {}),
            "policy": self.FAMILY,
            "unnorm_key": self.unnorm_key,
            "device": str(self.decoder.device),
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "cameras": ", ".join(self.cameras),
            "state": self.state_dims,
            "horizon": self.codec.horizon,
            "parameters": parameter_count(self.model),
        }
