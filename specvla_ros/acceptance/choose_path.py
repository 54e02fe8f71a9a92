"""From a rule's word on each node to the one path that is committed."""

import torch
from torch import Tensor

from specvla_ros.acceptance.verification import (
    NO_NODE,
    NOT_A_NUMBER,
    Acceptance,
    AcceptanceRule,
    Verification,
    Why,
)


def accept(rule: AcceptanceRule, verification: Verification) -> Acceptance:
    """Commits the longest path that the rule allows.

    Ties go to the path nearest to the target's own choices (sum of bin distances), then to the likelier draft, then to
    the first node. The published Spec-VLA code takes the first of the longest paths, even where an exact sibling of its
    last token exists.

    No path goes past a row of logits with a NaN, whatever the rule: it ends there, with NOT_A_NUMBER as its last token.

    Shapes depend on the tree's shape alone and nothing is read back, so that the step can be part of a CUDA graph.
    """
    tree, on_path = verification.tree, verification.on_path
    depths, is_root = tree.ancestry.depths, tree.ancestry.parents < 0
    judgement = rule.judge(verification)
    # A loose rule would commit what was drafted behind a NaN, and with it hide the NaN from whoever reads the tokens.
    allowed = tree.valid & (tree.relaxable | verification.exact) & (verification.wanted != NOT_A_NUMBER)
    kept = (judgement.keeps & allowed) | is_root
    candidates = (kept | ~on_path).all(dim=1)
    distance = (on_path * verification.bins_off).sum(dim=1)
    likelihood = torch.nan_to_num(tree.log_probs, nan=-torch.inf, neginf=-torch.inf)
    for merit in (depths, -distance, likelihood):
        merit = torch.where(candidates, merit.to(torch.float64), -torch.inf)
        candidates = candidates & (merit == merit.max())
    nodes = torch.arange(len(tree), device=depths.device)
    # Of one element and not none: indexing with a number reads it back.
    end = torch.where(candidates, nodes, len(tree)).amin().reshape(1)
    return _committed(verification, judgement.why, end)


def _committed(verification: Verification, why: Tensor, end: Tensor) -> Acceptance:
    tree = verification.tree
    depths = tree.ancestry.depths
    places = torch.arange(tree.levels + 1, device=depths.device)
    node_ids = torch.arange(len(tree), device=depths.device)
    at = (depths == places[:, None]) & verification.on_path[end]  # [levels + 1, n], one node per place of the path
    nodes = torch.where(at, node_ids, NO_NODE).amax(dim=1)
    behind = torch.cat((nodes[1:], torch.full_like(nodes[:1], NO_NODE)))
    is_last = places == depths[end]
    drafted = behind >= 0
    node = behind.clamp(min=0)
    tokens = torch.where(drafted, tree.tokens[node], NOT_A_NUMBER)
    return Acceptance(
        nodes=nodes,
        tokens=torch.where(is_last, verification.choices[end], tokens),
        bins_off=torch.where(drafted, verification.bins_off[node], 0),
        why=torch.where(drafted, why[node], int(Why.TARGET)),
        count=depths[end].reshape(()) + 1,
    )
