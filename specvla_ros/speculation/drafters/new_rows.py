# SPDX-License-Identifier: Apache-2.0
"""What a request committed since its last draft, where the forward left it: nothing is moved before somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specvla_kernels.device import to_device

_NONE = torch.empty(0, 0)


@dataclass(frozen=True)
class NewRows:
    """Rows of a slot: some whose following rows are known, as those of a prompt, then some that a tree's nodes wrote.

    Args:
        known_hidden: [k, hidden], the target's last hidden states at the first rows.
        known_following: [k, hidden], embedding of what comes after each.
        states: [n, hidden], last hidden states of a forward; that of other requests' rows too.
        nodes: rows of `states`, for the rows behind the known ones.
        tokens: what comes after each of those.
        embed: token ids to embeddings; needed where there are tokens.
    """

    known_hidden: Tensor = _NONE
    known_following: Tensor = _NONE
    states: Tensor = _NONE
    nodes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    embed: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.known_hidden) + len(self.nodes)

    @cached_property
    def hidden(self) -> Tensor:
        """[rows, hidden], the target's last hidden states."""
        if not self.nodes:
            return self.known_hidden
        found = self.states[to_device(self.nodes, self.states.device)]
        return torch.cat((self.known_hidden, found)) if len(self.known_hidden) else found

    @cached_property
    def following(self) -> Tensor:
        """[rows, hidden], embedding of what comes after each row."""
        if not self.nodes:
            return self.known_following
        assert self.embed is not None
        found = self.embed(to_device(self.tokens, self.states.device))
        return torch.cat((self.known_following, found)) if len(self.known_following) else found

    def newest(self, n: int) -> NewRows:
        """The last rows, at most n, of those that nodes wrote."""
        cut = max(0, len(self.nodes) - n)
        return replace(
            self, known_hidden=_NONE, known_following=_NONE, nodes=self.nodes[cut:], tokens=self.tokens[cut:]
        )

    def before_newest(self, n: int) -> NewRows:
        """The others."""
        cut = max(0, len(self.nodes) - n)
        return replace(self, nodes=self.nodes[:cut], tokens=self.tokens[:cut])


def of_one_forward(several: Sequence[NewRows]) -> tuple[Tensor, list[list[int]]]:
    """The states [n, hidden] that nodes of several requests are rows of, and these rows, request by request."""
    forwards = list({id(each.states): each.states for each in several}.values())
    starts: dict[int, int] = {}
    start = 0
    for states in forwards:
        starts[id(states)] = start
        start += len(states)
    rows = [[starts[id(each.states)] + node for node in each.nodes] for each in several]
    return forwards[0] if len(forwards) == 1 else torch.cat(forwards), rows
