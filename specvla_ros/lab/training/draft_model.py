# SPDX-License-Identifier: Apache-2.0
"""The draft head in training: its forward over batches, and what it is worth on held-out answers."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from specvla_ros.lab.training.batched_forward import attend, mlp, queries_keys_values
from specvla_ros.lab.training.draft_features import Sample
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tree import Tree


def draft_features(
    head: EagleHead,
    following: Tensor,
    hidden: Tensor,
    padding: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    answer: int,
    steps: int,
) -> list[Tensor]:
    """Predicted hidden states of the answer's rows, fed with the target's own and then with the head's.

    Row i takes the embedding of the token after it and the hidden state at it, and predicts the hidden state after it.
    In step 1 the input state is the target's. In step s the s-1 newest states of a row's history are the head's own, as
    they are when it drafts the s-th token of a tree (training-time test: HASS, EAGLE-3). Earlier rows are seen as the
    target made them. A parallel head's rows are masks from step 2 on, in place of token and state.

    Args:
        following: [batch, rows, hidden], embeddings of the following tokens.
        hidden: [batch, rows, hidden], the target's hidden states.
        padding: int64 [batch], number of padding rows at the left end.
        cos: float32 [rows, head_dim / 2]; attention depends on differences of positions, so padding shifts nothing.
        sin: float32 [rows, head_dim / 2].
        answer: number of rows at the right end that are the answer's.
        steps: number of steps, 1 to `answer`.

    Returns:
        Per step s (from 1), [batch, answer - s + 1, hidden]: the answer's rows from the s-th on.
    """
    rows = following.shape[1]
    row = torch.arange(rows, device=following.device)
    seen = (row[:, None] >= row) & (row >= padding[:, None, None])
    # A row of padding sees itself: a softmax over nothing is NaN.
    seen = seen | torch.eye(rows, dtype=torch.bool, device=seen.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def predict(x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
        q, k, v = queries_keys_values(head.layer, x, cos, sin)
        keys.append(k)
        values.append(v)
        x = attend(head.layer, x, q, torch.cat(keys, dim=2), torch.cat(values, dim=2), visible[:, None])
        return mlp(head.layer, x)

    results = [predict(head.fuse(following, hidden), cos, sin, seen)[:, -answer:]]
    cos, sin, following = cos[-answer:], sin[-answer:], following[:, -answer:]
    for step in range(1, steps):
        visible = _visible(padding, rows, answer, step)
        if head.parallel_depth > 1:
            fed = head.mask_rows[step - 1].expand(len(padding), answer - step, -1)
        else:  # row a of the answer is fed with what row a-1 predicted in the step before
            fed = head.fuse(following[:, step:], results[-1][:, :-1])
        results.append(predict(fed, cos[step:], sin[step:], visible))
    return results


def _visible(padding: Tensor, rows: int, answer: int, step: int) -> Tensor:
    """Which keys of all steps a row sees: the target's up to `step` rows before it, then one of each step since.

    Bool [batch, answer - step, keys].
    """
    device = padding.device
    row = torch.arange(rows - answer + step, rows, device=device)[:, None]
    column = torch.arange(rows, device=device)
    masks = [(column <= row - step) & (column >= padding[:, None, None])]
    for earlier in range(1, step + 1):
        column = torch.arange(rows - answer + earlier, rows, device=device)
        masks.append((column == row - (step - earlier)).expand(len(padding), -1, -1))
    return torch.cat(masks, dim=2)


_MAX_SAMPLES = 256


@dataclass(frozen=True)
class DraftValidation:
    """What strict acceptance would have made of the head's trees on held-out answers."""

    epoch: int  # number of passes over the features before it
    tau: float  # tokens committed per verification forward
    # Mean accepted drafts by the place of the first drafted token in the answer (Spec-VLA, Table 3).
    accept_length_by_place: tuple[tuple[int, float], ...]
    samples: int  # answers that were drafted


@torch.inference_mode()
def validate_draft(policy: OpenVLATarget, head: EagleHead, samples: Iterable[Sample], *, epoch: int) -> DraftValidation:
    """Drafts the target's own answers again, token by token as strict acceptance would let it.

    The target need not run: with strict acceptance only its own tokens are committed, and those are known. Of the
    samples, held-out answers, the first few hundred are used.
    """
    settings = DraftSettings()
    if head.parallel_depth > 1:
        settings = replace(settings, depth=min(settings.depth, head.parallel_depth))
    head = copy.deepcopy(head).to(policy.decoder.dtype)  # as it will run
    drafter: EagleDrafter | None = None
    found: dict[int, list[int]] = {}
    done = 0
    for sample in islice(samples, _MAX_SAMPLES):
        rows = len(sample.prompt) + len(sample.tokens)
        if drafter is None or drafter.committed_rows < rows:
            drafter = EagleDrafter(head, policy.decoder, settings, slots=1, slot_rows=rows)
        for dim, accepted in _replay(policy, drafter, sample):
            found.setdefault(dim, []).append(accepted)
        done += 1
    lengths = [length for of_dim in found.values() for length in of_dim]
    return DraftValidation(
        epoch=epoch,
        tau=1 + sum(lengths) / len(lengths) if lengths else 0.0,
        accept_length_by_place=tuple((dim, sum(of_dim) / len(of_dim)) for dim, of_dim in sorted(found.items())),
        samples=done,
    )


def _replay(policy: OpenVLATarget, drafter: EagleDrafter, sample: Sample) -> list[tuple[int, int]]:
    """(dimension of the first drafted token, accept length) of each verification."""
    decoder = policy.decoder
    device, dtype = decoder.device, decoder.dtype
    hidden = sample.hidden.to(device, dtype)
    tokens = sample.tokens.to(device)
    embedded = decoder.embed_tokens(tokens)
    following = torch.cat((sample.prompt.to(device, dtype)[1:], embedded))
    prompt, answer = len(sample.prompt), len(tokens)
    goal = tokens.tolist()
    fed, dim, results = 0, 1, []
    while dim < answer:
        prefix = prompt + dim - 1
        tree = drafter.draft(
            [
                DraftInput(
                    slot=0,
                    prefix_len=prefix,
                    new=NewRows(hidden[fed:prefix], following[fed:prefix]),
                    root=tokens[dim - 1],
                    max_depth=answer - dim - 1,
                    position=policy.codec.position(goal[:dim]),
                    in_text=policy.codec.in_text(goal[:dim]),
                )
            ]
        )[0]
        accepted = _longest_match(tree, goal[dim:])
        if answer - dim > 1:  # where nothing can be drafted there is nothing to measure
            results.append((dim, accepted))
        fed, dim = prefix, dim + accepted + 1
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
