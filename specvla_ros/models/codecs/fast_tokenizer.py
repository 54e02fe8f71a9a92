# SPDX-License-Identifier: Apache-2.0
"""FAST's tokenizer (Pertsch et al., arXiv 2501.09747): the byte-pair encoding of a chunk's cosine transform.

Each dimension's values over the chunk are transformed (DCT-II, orthonormal), scaled and rounded; the coefficients, row
by row, are characters of a string that byte-level BPE shortens. Answers of one policy therefore differ in length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import CODEC_FILE
from specvla_ros.models.codecs.statistics import MAX_VALUE
from specvla_ros.models.tokenizer import read_tokenizer
from specvla_ros.settings.json_file import read_fields

_TOKENIZER = "tokenizer.json"
HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from a lone half of a two-byte character
_MAX_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)  # code points that are not characters


@dataclass(frozen=True)
class FastTokenizer:
    """The published tokenizer, which converts chunks of normalised actions to ids below `vocab_size`, and back.

    Chunks that the original repairs (it pads a wrong number of coefficients with zeros, and reads half a character as
    the coefficient 65533 less its offset) are refused, and so are actions that encoding would lose.
    """

    bpe: Tokenizer  # its byte-level BPE
    scale: float  # factor of the coefficients before they are rounded
    min_token: int  # the coefficient that is character 0

    @property
    def vocab_size(self) -> int:
        return self.bpe.get_vocab_size()

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        """Encodes normalised actions [horizon, dims], about [-1, 1], as ids.

        Raises UserError if they are not finite, or too far outside the range that the tokenizer was fitted on.
        """
        text = "".join(map(self._character, to_coefficients(actions, self.scale).flatten().tolist()))
        ids: tuple[int, ...] = tuple(self.bpe.encode(text).ids)
        if self.bpe.decode(list(ids), skip_special_tokens=False) != text:
            raise UserError(
                "an action is outside the range that this FAST tokenizer was fitted on and would be lost: normalise "
                "it, or fit the tokenizer on similar actions"
            )
        return ids

    def _character(self, coefficient: int) -> str:
        code = coefficient - self.min_token
        if not 0 <= code <= _MAX_CODE or code in _SURROGATES:
            raise UserError(
                f"an action has a coefficient of {coefficient}, but this FAST tokenizer begins at {self.min_token}: "
                "normalise it, or fit the tokenizer on similar actions"
            )
        return chr(code)

    def problem(self, ids: Sequence[int], horizon: int, dims: int) -> str:
        """Reason why ids do not decode to a chunk; empty if they do."""
        other = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if other is not None:
            return f"{other} is not a FAST token"
        text = self._text(ids)
        if HALF in text:
            return "a FAST character is cut in half"
        if len(text) != horizon * dims:
            return f"{len(text)} FAST coefficients instead of {horizon} x {dims}"
        return ""

    def decode(self, ids: Sequence[int], horizon: int, dims: int) -> np.ndarray:
        """Decodes ids to normalised actions, float64 [horizon, dims]; UserError if they do not give such a chunk."""
        problem = self.problem(ids, horizon, dims)
        if problem:
            raise UserError(problem)
        coefficients = np.array([ord(character) + self.min_token for character in self._text(ids)], dtype=np.float64)
        actions: np.ndarray = cosines(horizon).T @ (coefficients.reshape(horizon, dims) / self.scale)
        return actions

    def _text(self, ids: Sequence[int]) -> str:
        # All at once, since a character may be two tokens. Without the clean-up of spaces that the released files ask
        # for, since it removes characters that encode coefficients.
        text: str = self.bpe.decode(list(ids), skip_special_tokens=False)
        return text

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The UTF-8 bytes of each id."""
        bytes_of = {symbol: byte for byte, symbol in _byte_symbols().items()}
        texts = (self.bpe.id_to_token(i) or "" for i in range(self.vocab_size))
        return tuple(
            bytes(bytes_of[symbol] for symbol in text) if bytes_of.keys() >= set(text) else text.encode()
            for text in texts
        )

    @cached_property
    def characters_begun(self) -> tuple[int, ...]:
        """Number of characters that begin in each id's bytes."""
        return tuple(sum(byte & 0xC0 != 0x80 for byte in token) for token in self.token_bytes)


def _byte_symbols() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al. 2019, GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def to_coefficients(actions: np.ndarray, scale: float) -> np.ndarray:
    """Scaled and rounded coefficients of actions [horizon, dims], int64 of the same shape."""
    if actions.ndim != 2 or not np.isfinite(actions).all() or np.abs(actions).max(initial=0.0) > MAX_VALUE:
        raise UserError("FAST encodes chunks [horizon, dims] of finite, normalised actions")
    return np.around(cosines(len(actions)) @ actions * scale).astype(np.int64)


def cosines(horizon: int) -> np.ndarray:
    """The orthonormal DCT-II as a matrix, float64 [horizon, horizon]; its transpose is the inverse."""
    frequency, time = np.arange(horizon)[:, None], np.arange(horizon)
    matrix = np.sqrt(2 / horizon) * np.cos(np.pi * frequency * (2 * time + 1) / (2 * horizon))
    matrix[0] /= np.sqrt(2)
    return matrix


def read_fast_tokenizer(directory: Path) -> FastTokenizer:
    """Reads a tokenizer in the released layout or in LeRobot's, which has a folder for its BPE.

    Raises UserError if a file is missing or malformed.
    """
    fields = read_fields(
        directory / CODEC_FILE,
        missing=f"{directory} must contain the policy's FAST tokenizer, with {CODEC_FILE} and {_TOKENIZER}",
        hint="; copy it again",
    )
    nested = directory / "bpe_tokenizer" / _TOKENIZER
    path = nested if nested.exists() else directory / _TOKENIZER
    if not path.exists():
        raise UserError(f"{path} is missing; copy the FAST tokenizer from the source of the weights")
    return FastTokenizer(
        bpe=read_tokenizer(path),
        scale=fields.number("scale", above=0.0),
        min_token=fields.whole("min_token", minimum=-_MAX_CODE, maximum=_MAX_CODE),
    )
