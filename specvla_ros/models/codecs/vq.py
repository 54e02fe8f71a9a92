# SPDX-License-Identifier: Apache-2.0
"""Actions as codes of a residual VQ-VAE (VQ-BeT, arXiv 2403.03181), as MiniVLA writes them: a chunk in a few tokens.

A token selects one vector of its layer's codebook; an MLP decodes the sum of all layers' vectors to the chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.config import MAX_WIDTH
from specvla_ros.models.pickled_weights import read_pickled, tensors_in
from specvla_ros.settings.json_file import read_fields

_LAYERS = ("encoder.0", "encoder.2", "fc")
Mlp = tuple[tuple[np.ndarray, np.ndarray], ...]
"""Weight [out, in] and bias [out] of each layer, ReLU between them."""


@dataclass(frozen=True)
class VqVae:
    """Converts codes to normalised chunks and back, in float32 as in the original."""

    codebooks: np.ndarray  # [layers, codes, latent]
    encoder: Mlp  # a chunk to a latent vector
    decoder: Mlp  # a latent vector to a chunk
    horizon: int  # actions per chunk
    scale: float  # factor of the decoder's output

    @property
    def dims(self) -> int:
        return len(self.decoder[-1][1]) // self.horizon

    def decode(self, codes: Sequence[int]) -> np.ndarray:
        """Decodes one code per layer to normalised actions [horizon, dims], not clipped."""
        latent = self.codebooks[np.arange(len(codes)), list(codes)].sum(axis=0)
        return _through(self.decoder, latent).reshape(self.horizon, -1) * np.float32(self.scale)

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        """Encodes normalised actions [horizon, dims]: each layer's code nearest to the residual of earlier layers."""
        left = _through(self.encoder, (actions / self.scale).astype(np.float32).reshape(-1))
        codes = []
        for codebook in self.codebooks:
            nearest = int(((codebook - left) ** 2).sum(axis=1).argmin())
            codes.append(nearest)
            left = left - codebook[nearest]
        return tuple(codes)


def _through(layers: Mlp, values: np.ndarray) -> np.ndarray:
    for weight, bias in layers[:-1]:
        values = np.maximum(weight @ values + bias, 0)
    weight, bias = layers[-1]
    out: np.ndarray = weight @ values + bias
    return out


def read_vq_vae(directory: Path) -> VqVae:
    """Reads `config.json` and `checkpoints/model.pt`, as saved by vq_bet_official.

    Raises UserError if a file is missing or damaged, or the two do not match.
    """
    fields = read_fields(directory / "config.json", missing="copy the VQ-VAE's whole folder", hint="; copy it again")
    horizon, dims = (fields.whole(name, minimum=1, maximum=1 << 10) for name in ("input_dim_h", "input_dim_w"))
    latent = fields.whole("n_latent_dims", minimum=1, maximum=MAX_WIDTH)
    codes, layers = (fields.whole(name, minimum=1, maximum=1 << 16) for name in ("vqvae_n_embed", "vqvae_groups"))
    path = directory / "checkpoints" / "model.pt"
    saved = read_pickled(path)
    parts = {name: tensors_in(saved.get(name), path, name) for name in ("encoder", "decoder", "vq_embedding")}

    def array(part: str, name: str, *shape: int) -> np.ndarray:
        found: Tensor | None = parts[part].get(name)
        if (
            found is None
            or found.dim() != len(shape)
            or any(n and n != k for n, k in zip(shape, found.shape, strict=True))
        ):
            wanted = " x ".join(str(n) if n else "any" for n in shape)
            raise UserError(f"{path}: {part}.{name} must have shape {wanted}, as config.json says; copy both again")
        return found.float().numpy()

    def mlp(part: str, inputs: int, outputs: int) -> Mlp:
        widths, made = [inputs, 0, 0, outputs], []
        for i, name in enumerate(_LAYERS):
            weight = array(part, f"{name}.weight", widths[i + 1], widths[i])
            widths[i + 1] = len(weight)
            made.append((weight, array(part, f"{name}.bias", len(weight))))
        return tuple(made)

    books = [array("vq_embedding", f"layers.{i}._codebook.embed", 1, codes, latent)[0] for i in range(layers)]
    return VqVae(
        codebooks=np.stack(books),
        encoder=mlp("encoder", horizon * dims, latent),
        decoder=mlp("decoder", latent, horizon * dims),
        horizon=horizon,
        scale=fields.number("act_scale", 1.0, above=0.0),
    )


@dataclass(frozen=True)
class VqCodec(Codec):
    """Codec of answers with one code per layer and nothing else. See `Codec`.

    The original clips an id that is not a code to the first or the last one; here it is refused. Relaxed acceptance
    has no bound: neighbouring codes are not similar.
    """

    WRITES: ClassVar[str] = "codes of a VQ-VAE"

    vae: VqVae  # codes to normalised chunks
    statistics: ActionStatistics  # normalised values to the robot's units
    stop_id: int  # one past the token of code 0; codes count down from it
    dt_s: float | None = None  # see `Codec`

    @property
    def horizon(self) -> int:
        return self.vae.horizon

    @property
    def ids(self) -> range:
        return range(self.stop_id - self.vae.codebooks.shape[1], self.stop_id)

    @property
    def max_tokens(self) -> int:
        return len(self.vae.codebooks)

    def legal_ids(self, tokens: Sequence[int]) -> range:
        return self.ids

    def problem(self, tokens: Sequence[int]) -> str:
        other = (token for token in tokens if token not in self.ids)
        return "".join(f"token {token} is not an action token" for token in islice(other, 1))

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        chunk = self.vae.decode([self.stop_id - 1 - token for token in tokens]).astype(np.float64)
        return np.stack([self.statistics.unnormalise(row) for row in chunk])

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        return tuple(self.stop_id - 1 - code for code in self.vae.encode(self.normalise(actions)))
