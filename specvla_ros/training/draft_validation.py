"""How many tokens a draft head would have committed per forward, on answers that it has not seen."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from specvla_ros.drafting.draft_input import DraftInput
from specvla_ros.drafting.eagle_drafter import EagleDrafter
from specvla_ros.drafting.eagle_head import EagleHead
from specvla_ros.drafting.settings import DraftSettings
from specvla_ros.drafting.tree import Tree
from specvla_ros.models.policy import Policy
from specvla_ros.training.draft_features import Sample

_MOST_SAMPLES = 256


@dataclass(frozen=True)
class DraftValidation:
    """What strict acceptance would have made of the head's trees on held-out answers.

    Args:
        epoch: passes over the features before it.
        tau: tokens committed per verification forward.
        accept_length_by_place: mean accepted drafts by the place of the first drafted token (Spec-VLA, Table 3).
        samples: answers that were drafted.
    """

    epoch: int
    tau: float
    accept_length_by_place: tuple[tuple[int, float], ...]
    samples: int

    @staticmethod
    def of(raw: dict[str, Any]) -> "DraftValidation":
        """From what `dataclasses.asdict` gave, read back."""
        places = tuple((int(place), float(length)) for place, length in raw["accept_length_by_place"])
        return DraftValidation(raw["epoch"], raw["tau"], places, raw["samples"])


@torch.inference_mode()
def validate_draft(policy: Policy, head: EagleHead, samples: Iterable[Sample], *, epoch: int) -> DraftValidation:
    """Drafts the target's own answers again, token by token as strict acceptance would let it.

    The target need not run: with strict acceptance only its own tokens are committed, and those are known.

    Args:
        policy: the target.
        head: the draft head.
        samples: held-out answers; the first few hundred are used.
        epoch: for the record.
    """
    settings = DraftSettings()
    head = copy.deepcopy(head).to(policy.decoder.dtype)  # as it will run
    drafter: EagleDrafter | None = None
    found: dict[int, list[int]] = {}
    done = 0
    for sample in samples:
        rows = len(sample.prompt) + len(sample.tokens)
        if drafter is None or drafter.committed_rows < rows:
            drafter = EagleDrafter(head, policy.decoder, settings, slots=1, slot_rows=rows)
        for place, accepted in _replay(policy, drafter, sample):
            found.setdefault(place, []).append(accepted)
        done += 1
        if done == _MOST_SAMPLES:
            break
    lengths = [length for each in found.values() for length in each]
    return DraftValidation(
        epoch=epoch,
        tau=1 + sum(lengths) / len(lengths) if lengths else 0.0,
        accept_length_by_place=tuple((place, sum(each) / len(each)) for place, each in sorted(found.items())),
        samples=done,
    )


def _replay(policy: Policy, drafter: EagleDrafter, sample: Sample) -> list[tuple[int, int]]:
    """(place of the first drafted token, accept length) of each verification."""
    decoder = policy.decoder
    device, dtype = decoder.device, decoder.dtype
    hidden = sample.hidden.to(device, dtype)
    tokens = sample.tokens.to(device)
    embedded = decoder.embed_tokens(tokens)
    following = torch.cat((sample.prompt.to(device, dtype)[1:], embedded))
    prompt, answer = len(sample.prompt), len(tokens)
    goal = tokens.tolist()
    fed, place, results = 0, 1, []
    while place < answer:
        prefix = prompt + place - 1
        tree = drafter.draft(
            [
                DraftInput(
                    slot=0,
                    prefix_len=prefix,
                    hidden=hidden[fed:prefix],
                    following=following[fed:prefix],
                    root=tokens[place - 1],
                    levels=answer - place - 1,
                    place=place,
                )
            ]
        )[0]
        accepted = _longest_match(tree, goal[place:])
        if answer - place > 1:  # where nothing can be drafted there is nothing to judge
            results.append((place, accepted))
        fed, place = prefix, place + accepted + 1
    return results


def _longest_match(tree: Tree, goal: list[int]) -> int:
    """Drafted tokens on the path that agrees with the goal."""
    parents, tokens = tree.ancestry.parents.tolist(), tree.tokens.tolist()
    valid: list[bool] = tree.valid.tolist()
    node, depth = 0, 0
    while depth < len(goal):
        children = [i for i, parent in enumerate(parents) if parent == node and valid[i] and tokens[i] == goal[depth]]
        if not children:
            break
        node, depth = children[0], depth + 1
    return depth
