# SPDX-License-Identifier: Apache-2.0
"""The interface between engine and models: the protocols of a policy that any engine mode can decode.

The engine accesses a model only through these protocols. A family implements `Target` in its own file or folder and
registers a loader in `TARGETS`, see `specvla_ros.models.checkpoint`; another package uses the entry point group
`specvla_ros.targets`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specvla_kernels.layout import PackedLayout
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.generation import GreedyRules
from specvla_ros.models.observation import Observation
from specvla_ros.settings.registry import Registry

_FAMILIES = ("openvla.target", "qwen_vl.target", "pi0_fast.target", "minivla", "starvla")
TARGETS = Registry("specvla_ros.targets", [f"specvla_ros.models.families.{family}" for family in _FAMILIES])

ImageEmbeddings = Callable[[Tensor], Tensor]
"""Maps host pixels [channels, size, size] to embeddings [image_tokens, hidden], which the next call may overwrite."""
Pixels = tuple[Tensor, ...]
"""Arguments of the successive `image_embeddings` calls for one observation, in host memory."""
ActionHead = Callable[[Tensor], Tensor]
"""Maps the prompt's last hidden states [rows, hidden] to actions float64 [horizon, dims], in the robot's units."""


@dataclass(frozen=True)
class ForwardResult:
    """The result of one packed forward, with its segments in order."""

    logits: Tensor  # float32 [n_wanted, vocab], of the wanted rows
    hidden: Tensor  # [n_rows, hidden], of all rows, after the final norm
    choices: Tensor | None = None  # int64 [n_wanted], `greedy_choice` of the logits, if the forward has computed it
    sent: Tensor | None = None  # int64, the numbers of `ExtraInputs`, if the forward has uploaded them


@dataclass(frozen=True)
class PromptLayout:
    """The rows of an observation's prompt, known on the host before anything is computed."""

    ids: tuple[int, ...]  # the prompt's text as token ids
    # Length of the prompt in rows of the KV cache, including the images' rows and the given start of its answer.
    rows: int
    visual_rows: tuple[range, ...]  # contiguous ranges of image rows, in order
    # int64 [axes, rows], RoPE positions for a model with several per row (M-RoPE); rows after the prompt count up from
    # the largest. None: rows count up from 0.
    positions: np.ndarray | None = None
    causal: bool = True  # each row sees only earlier ones; False: all rows see each other (a prefix language model)

    def positions_of(self, start: int, stop: int) -> np.ndarray | None:
        """RoPE positions of rows of the prompt or of an unbranched answer, int64 [axes, stop - start].

        None: they count up from 0.
        """
        if self.positions is None:
            return None
        behind = np.arange(max(start, self.rows), max(stop, self.rows)) - self.rows + 1 + self.positions.max()
        return np.concatenate((self.positions[:, start:stop], np.tile(behind, (len(self.positions), 1))), axis=1)

    def tree_root_positions(self, row: int, nodes: int) -> np.ndarray | None:
        """The root's RoPE positions, int64 [axes, nodes], of a tree at a row after the prompt; None: the row itself."""
        of_root = self.positions_of(row, row + 1)
        return None if of_root is None else np.repeat(of_root, nodes, axis=1)


class Decoder(Protocol):
    """The language model around the packed forward."""

    @property
    def config(self) -> DecoderShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def embed_tokens(self) -> Callable[[Tensor], Tensor]:
        """Maps token ids [n] to embeddings [n, hidden]."""

    def __call__(
        self, embeddings: Tensor, layout: PackedLayout, wanted_rows: Tensor, keys: Tensor, values: Tensor
    ) -> ForwardResult:
        """One pass of all segments through all layers, see `specvla_ros.engine.batch.packed_forward`."""

    def hidden_states(
        self, embeddings: Tensor, layout: PackedLayout, keys: Tensor, values: Tensor, *, layers: int | None = None
    ) -> Tensor:
        """Runs the first `layers` (None: all) and the final norm, giving [n_rows, hidden]; can be captured."""

    def products(self, x: Tensor) -> Tensor:
        """A layer's products without attention, [n_rows, hidden] to the same shape; timed by number of rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, float32 [n, vocab], of hidden states [n, hidden] after the final norm."""


class VisionModel(Protocol):
    """A model that turns pixels into prompt embeddings."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape of the pixels of one observation; empty for a model without vision."""

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Maps normalised pixels of `pixel_shape` to embeddings [image_tokens, hidden]."""


class PolicyFacts(Protocol):
    """A policy's metadata: cameras, state, action names."""

    @property
    def directory(self) -> Path: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def unnorm_key(self) -> str:
        """Dataset whose action statistics are used; empty if there is no choice."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Camera names in the policy's order; empty: it uses no cameras."""

    @property
    def state_dims(self) -> int:
        """Number of robot state values that the policy reads; 0: it reads none."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state values in the policy's order; empty: the checkpoint does not give them."""

    def describe(self) -> dict[str, Any]:
        """Description of the loaded policy, for diagnostics and results."""


class Target(PolicyFacts, Protocol):
    """A checkpoint, ready to decode. Holds no state between observations."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def model(self) -> VisionModel: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def generation(self) -> GreedyRules: ...
    @property
    def causal_prompt(self) -> bool:
        """True if a prompt row attends only to earlier rows, so that a prefill may be split into chunks."""

    @property
    def head(self) -> ActionHead | None:
        """Computes the actions of a policy that generates no tokens; None: its codec decodes them."""

    @property
    def image_tokens(self) -> int:
        """Number of prompt rows that the images take."""

    @property
    def action_head(self) -> bool:
        """True if the output head computes only the logits of action tokens."""

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        """The rows of an observation's prompt; UserError if instruction, image or state does not fit the policy."""

    def prompt_embeddings(
        self, observation: Observation, prompt_ids: Sequence[int], vision: ImageEmbeddings | None = None
    ) -> Tensor:
        """The prompt as the decoder reads it, [prompt rows, hidden].

        Args:
            prompt_ids: token ids of the prompt's text.
            vision: implementation of the image embeddings; None: the model's own.
        """

    def blank_observation(self) -> Observation:
        """An observation for warm-up that needs neither tokenizer nor camera."""


@runtime_checkable
class PreparesImages(Protocol):
    """Optional: a target whose images can be preprocessed off the engine's thread."""

    def pixels(self, observation: Observation) -> Pixels:
        """Resized and normalised images, as the vision tower reads them; called from any thread."""

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Sequence[int],
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        """See `Target`; `pixels` are the observation's, in any precision. None: they are computed here."""


def answer_layout(target: Target, observation: Observation, *, given: int) -> PromptLayout:
    """The rows of an observation's prompt, and after them those of its answer's `given` first tokens."""
    layout = target.prompt_layout(observation)
    rows = layout.rows + given
    return replace(layout, rows=rows, positions=layout.positions_of(0, rows)) if given else layout
