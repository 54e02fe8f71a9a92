# SPDX-License-Identifier: Apache-2.0
"""Drafts text by looking up its last tokens in the prompt and the answer so far (prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, DraftInput, drafter
from specvla_ros.speculation.tree import Branches

_LONGEST = 3


@dataclass(frozen=True)
class PromptLookupSettings:
    """Length of the drafts that are copied from prompt and answer."""

    tokens: int = parameter(
        0,
        "Tokens drafted by looking up the last ones in prompt and answer; 0: none. For policies that write text.",
        unit="tokens",
        minimum=0,
        maximum=63,
        name="prompt_lookup_tokens",
    )


class PromptLookup(Drafter):
    """Drafts the tokens that followed an earlier occurrence of the last tokens in the prompt or the answer."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Branches]:
        drafts = []
        for request, limit in zip(inputs, nodes, strict=True):
            text = (*request.prompt, *request.answer)
            chains = [look_up(text, text, self._tokens)]
            drafts.append(Branches.from_chains(chains, max_depth=request.max_depth, max_nodes=limit - 1))
        return drafts


@drafter("prompt_lookup", settings=PromptLookupSettings, order=20)
def _prompt_lookup(context: DraftContext) -> Drafter | None:
    own: PromptLookupSettings = context.own("prompt_lookup")
    return PromptLookup(own.tokens) if own.tokens else None


def look_up(text: Sequence[int], tail: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The tokens after the most recent occurrence of the last tokens of `tail` in a text.

    Takes the longest match, of up to three tokens; empty if the last token is new. `tail` may be the text itself.
    """
    for length in range(min(_LONGEST, len(tail)), 0, -1):
        pattern = tuple(tail[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if tuple(text[start : start + length]) == pattern:
                return tuple(text[start + length : start + length + tokens])
    return ()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
