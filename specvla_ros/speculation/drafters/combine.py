"""All drafters together: one tree per request."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from specvla_kernels.device import to_device
from specvla_kernels.graph_capture import Capture
from specvla_kernels.layout import Ancestry
from specvla_ros.errors import UserError
from specvla_ros.models.llama import LlamaDecoder
from specvla_ros.models.target import Target
from specvla_ros.speculation.drafters.children import WindowMass
from specvla_ros.speculation.drafters.eagle import EagleDrafter
from specvla_ros.speculation.drafters.eagle_head import load_draft_head
from specvla_ros.speculation.drafters.prompt_lookup import look_up
from specvla_ros.speculation.drafters.protocol import DraftInput, DraftWork
from specvla_ros.speculation.drafters.self_draft import SelfDrafter
from specvla_ros.speculation.drafters.temporal import TemporalDrafter
from specvla_ros.speculation.settings import NO_HEAD, DraftSettings
from specvla_ros.speculation.tree import Tree


@dataclass(frozen=True)
class Branches:
    """Chains that begin at the root, with common beginnings joined.

    Args:
        tokens: one per node.
        parents: of each node, as an index into these nodes; -1: the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def from_chains(chains: Sequence[Sequence[int]], *, levels: int, most: int) -> "Branches":
        """Joins chains.

        Args:
            chains: drafted tokens, the first behind the root.
            levels: of each chain, so many tokens are taken.
            most: nodes in all; what comes last is left out.
        """
        places: dict[tuple[int, int], int] = {}
        for chain in chains:
            node = -1
            for token in chain[:levels]:
                if (node, token) not in places:
                    if len(places) >= most:
                        break
                    places[node, token] = len(places)
                node = places[node, token]
        return Branches(tuple(token for _, token in places), tuple(parent for parent, _ in places))

    @property
    def levels(self) -> int:
        """Nodes on the longest branch."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return max(depths, default=0)


def add_branches(tree: Tree, branches: Branches, *, relaxable: bool) -> Tree:
    """The tree with the branches below its root.

    Args:
        tree: of any source.
        branches: to add.
        relaxable: whether they may be taken when they are not the target's own choice.

    What the tree holds is not known to the host, so that a token may be there twice; it is then accepted once. Nothing
    is known of the branches' probability: their log_probs are -inf, the last in a tie.
    """
    if not len(branches):
        return tree
    # With a root in front, which becomes the tree's.
    tokens = to_device((0, *branches.tokens), tree.tokens.device)
    alone = Tree(
        tokens=tokens,
        ancestry=Ancestry.from_parents((-1, *(parent + 1 for parent in branches.parents)), tokens.device),
        log_probs=torch.full_like(tokens, -torch.inf, dtype=tree.log_probs.dtype),
        valid=torch.ones_like(tokens, dtype=torch.bool),
        relaxable=torch.full_like(tokens, relaxable, dtype=torch.bool),
        levels=branches.levels,
    )
    return tree.joined_with(alone)


DRAFT_FOLDER = "draft"


class Drafter:
    """Grows the tree that a request's next forward verifies.

    Args:
        policy: the target.
        settings: None: nothing is drafted, as plain decoding wants it.
        slots: requests in flight at most.
        slot_rows: committed rows of a slot at most.

    Raises:
        UserError: nothing to draft with, or the draft head does not fit the target.
    """

    def __init__(self, policy: Target, settings: DraftSettings | None, *, slots: int, slot_rows: int) -> None:
        self._actions = policy.codec.action_ids
        self._device = policy.decoder.device
        self._action_dim = policy.codec.max_tokens
        self._settings = settings or DraftSettings()
        self._window: WindowMass | None = None
        self._eagle: EagleDrafter | None = None
        self._self: SelfDrafter | None = None
        self._temporal = TemporalDrafter(self._actions) if settings and settings.temporal else None
        self._lookup = settings.prompt_lookup_tokens if settings else 0
        if settings is None:
            return
        directory = _head_directory(policy, settings)
        decoder = cast(LlamaDecoder, policy.decoder)
        if directory is not None:
            head = load_draft_head(directory, decoder)
            if settings.children == "window_mass":
                self._window = WindowMass.from_actions(settings.top_k, self._actions, self._action_dim, self._device)
            self._eagle = EagleDrafter(head, decoder, settings, slots=slots, slot_rows=slot_rows, children=self._window)
        if settings.self_tokens:
            self._self = SelfDrafter(
                decoder,
                image_tokens=policy.image_tokens,
                image_share=settings.self_image_share,
                tokens=settings.self_tokens,
                slots=slots,
                slot_rows=slot_rows,
            )
        if not self.sources:
            raise UserError(
                f"decode.mode spec has nothing to draft with: {policy.directory / DRAFT_FOLDER} is not there; set "
                "draft.head to a draft head's directory (specvla train-draft makes one), or draft.temporal to true; a "
                "policy that writes text may also draft for itself (draft.self_tokens)"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of what drafts."""
        named = {
            "head": self._eagle,
            "temporal": self._temporal,
            "prompt_lookup": self._lookup,
            "self": self._self,
        }
        return tuple(name for name, source in named.items() if source)

    @property
    def work(self) -> DraftWork:
        """Forwards for drafting so far."""
        return DraftWork(
            head_forwards=self._eagle.forwards if self._eagle is not None else 0,
            self_forwards=self._self.forwards if self._self is not None else 0,
            self_rows=self._self.fed_rows if self._self is not None else 0,
        )

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        """Tells what acceptance will tolerate, in bins per action dimension."""
        if self._window is not None:
            self._window.tolerate(bins)

    def capture(self, capture: Capture) -> int:
        """See Capturable: the draft head's trees."""
        # The first forward behind a prompt commits a token, and each of the others commits its own last one.
        return self._eagle.capture(capture, self._action_dim - 2) if self._eagle is not None else 0

    def release(self) -> None:
        """See Capturable."""
        if self._eagle is not None:
            self._eagle.release()

    def draft(self, inputs: Sequence[DraftInput]) -> list[Tree]:
        """One tree per request, of at most `draft.nodes` nodes."""
        nodes = self._settings.nodes
        earlier = [
            Branches.from_chains(
                self._earlier(each.epoch, each.place, each.answer, in_text=each.in_text),
                levels=each.levels,
                most=nodes - 1,
            )
            for each in inputs
        ]
        looked_up = [
            Branches.from_chains(self._looked_up(each), levels=each.levels, most=nodes - 1 - len(taken))
            for each, taken in zip(inputs, earlier, strict=True)
        ]
        trees = self._by_model(
            inputs, [nodes - len(one) - len(other) for one, other in zip(earlier, looked_up, strict=True)]
        )
        # The last action is near the next one by its nature: taken because it is near, it would be repeated for ever.
        trees = [add_branches(tree, each, relaxable=False) for tree, each in zip(trees, earlier, strict=True)]
        return [add_branches(tree, each, relaxable=True) for tree, each in zip(trees, looked_up, strict=True)]

    def _by_model(self, inputs: Sequence[DraftInput], nodes: Sequence[int]) -> list[Tree]:
        """What the target drafts itself, and beside it the draft head's tree.

        Args:
            nodes: of each request's tree, the root included.
        """
        if self._self is None:
            return self._eagle.draft(inputs, nodes) if self._eagle else [Tree.of_root(each.root) for each in inputs]
        chains = self._self.draft(inputs, [each - 1 for each in nodes])
        if self._eagle is None:
            return chains
        left = [each - chain.levels for each, chain in zip(nodes, chains, strict=True)]
        grown = self._eagle.draft(inputs, left)
        return [tree.joined_with(chain) for tree, chain in zip(grown, chains, strict=True)]

    def behind_prompt(self, epoch: int, *, levels: int, in_text: bool) -> Tree:
        """What a prompt's own forward may verify: the previous answer costs no hidden states.

        The root stands for the prompt's last row; its token is not read.

        Args:
            epoch: the instruction epoch.
            levels: tokens of the longest answer.
            in_text: the answer may begin with text.
        """
        root = Tree.of_root(torch.zeros(1, dtype=torch.int64, device=self._device))
        branches = Branches.from_chains(
            self._earlier(epoch, 0, (), in_text=in_text), levels=levels, most=self._settings.nodes - 1
        )
        return add_branches(root, branches, relaxable=False)

    def observe(self, epoch: int, answer: tuple[int, ...], action: tuple[int, ...]) -> None:
        """Takes a finished answer and the action that it ends in."""
        if self._temporal is not None:
            self._temporal.observe(epoch, answer, action)

    def forget(self) -> None:
        """Forgets earlier actions."""
        if self._temporal is not None:
            self._temporal.forget()

    def _earlier(self, epoch: int, place: int, answer: Sequence[int], *, in_text: bool) -> list[tuple[int, ...]]:
        if self._temporal is None:
            return []
        if not in_text:
            return self._temporal.chains(epoch, place)
        # Behind a prompt nothing else drafts; later, text leaves half of the nodes to the others.
        alone = not answer or self.sources == ("temporal",)
        return [self._temporal.text(epoch, answer, self._settings.nodes // (1 if alone else 2))]

    def _looked_up(self, request: DraftInput) -> list[tuple[int, ...]]:
        context = (*request.prompt, *request.answer)
        return [look_up(context, context, self._lookup)] if self._lookup else []


def _head_directory(policy: Target, settings: DraftSettings) -> Path | None:
    if settings.head == NO_HEAD:
        return None
    if settings.head:
        return Path(settings.head).expanduser()
    beside = policy.directory / DRAFT_FOLDER
    return beside if beside.is_dir() else None
