"""The walk of an accepted path through each request's tree, strict or within a tolerance in bins."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl

NO_NODE = -1  # pads a path; also what is no token
LEAST_NODES, LEAST_PLACES = 16, 8  # one compilation for all smaller trees, and shorter paths
TARGET, EXACT, NEAR = 0, 1, 2  # why a token was committed: the target's own, drafted and the same, drafted and near


@dataclass(frozen=True)
class Trees:
    """The trees of several requests behind their forward, padded to the same number of nodes.

    Padding is invalid and has a parent; the rest of it is not looked at.

    Args:
        tokens: int64 [requests, n], drafted; node 0 is the root. n is 64 at most.
        parents: int64 [requests, n]; only the root's is -1.
        depths: int64 [requests, n].
        ancestors: int64 [requests, n]; bit j set: node j is an ancestor or the node itself.
        log_probs: float32 [requests, n], of the path to the node.
        valid: bool [requests, n]; False: padding, never accepted.
        relaxable: bool [requests, n]; False: accepted only if it is the target's own choice.
        choices: int64 [requests, n], the target's greedy choice behind each node; -1 where its logits hold a NaN.
        places: int64 [requests], action tokens committed so far, the root included: the dimension of the next one.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    log_probs: Tensor
    valid: Tensor
    relaxable: Tensor
    choices: Tensor
    places: Tensor


@dataclass(frozen=True)
class Tolerance:
    """How far a drafted action token may be from the target's choice in its place.

    Args:
        bins: int64 [dimensions + 1], per action dimension; the last is for every dimension beyond. Negative: only the
            target's own token, even where another id decodes alike.
        first: the lowest action id.
        stop: one past the highest action id.
        distinct: bins; the ids `first` and `first + 1` decode alike.
    """

    bins: Tensor
    first: int
    stop: int
    distinct: int

    @staticmethod
    def from_bins(
        bins: Sequence[int] | None, first: int, stop: int, distinct: int, device: torch.device | str = "cpu"
    ) -> "Tolerance":
        """Bins per dimension, 0 beyond them; None: strict."""
        numbers = [-1] if bins is None else [*bins, 0]
        return Tolerance(torch.tensor(numbers, dtype=torch.int64, device=device), first, stop, distinct)


def accept_tree(trees: Trees, tolerance: Tolerance, levels: int) -> Tensor:
    """Chooses the path that each request commits: the longest that may be.

    A node is kept if it is the target's own choice behind its parent, or if both are action tokens no further apart
    than the tolerance (Spec-VLA, arXiv 2507.22424, eq. 5). Ties go to the path nearest to the target's choices (sum of
    bins), then to the likelier draft, then to the first node. No path goes past a choice of -1.

    Args:
        levels: no node is deeper than this.

    Returns:
        int64 [requests, 4 * (levels + 1) + 1]: the path's nodes, the root first, then NO_NODE; the token committed
        behind each of them, the last one the target's own; how many bins each is from the target's choice; why each was
        committed (TARGET, EXACT or NEAR); and the number of nodes, which is also that of tokens. Behind the path's end
        the tokens are -1, the bins 0.
    """
    run = accept_tree_triton if has_kernels(trees.log_probs) else accept_tree_reference
    return run(trees, tolerance, levels)


def accept_tree_reference(trees: Trees, tolerance: Tolerance, levels: int) -> Tensor:
    """`accept_tree` in PyTorch."""
    nodes = torch.arange(trees.tokens.shape[1], device=trees.tokens.device)
    on_path = (trees.ancestors[:, :, None] >> nodes) & 1 == 1  # [requests, n, n]
    is_root = trees.parents < 0
    wanted = torch.where(is_root, NO_NODE, trees.choices.gather(1, trees.parents.clamp(min=0)))
    exact = (trees.tokens == wanted) & ~is_root
    off, both = _bins_off(trees.tokens, wanted, tolerance)
    off = torch.where(is_root, 0, off)
    near = both & (off <= _tolerance_of(trees, tolerance, on_path, is_root))
    allowed = trees.valid & (trees.relaxable | exact) & (wanted != NO_NODE)
    kept = ((exact | near) & allowed) | is_root
    candidates = kept & (kept[:, None] | ~on_path).all(dim=2)
    distance = (on_path * off[:, None]).sum(dim=2)
    likelihood = torch.nan_to_num(trees.log_probs, nan=-torch.inf, neginf=-torch.inf)
    for merit in (trees.depths, -distance, likelihood):
        merit = torch.where(candidates, merit.to(torch.float64), -torch.inf)
        candidates = candidates & (merit == merit.amax(dim=1, keepdim=True))
    end = torch.where(candidates, nodes, len(nodes)).amin(dim=1, keepdim=True)
    why = torch.where(exact, EXACT, NEAR)
    return _walked(trees, off, why, end, levels)


def _bins_off(tokens: Tensor, wanted: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
    """Bins between each token and what was wanted, and whether both are actions; text counts as `Verification` says."""
    first, stop = tolerance.first, tolerance.stop
    is_action, wants_action = ((ids >= first) & (ids < stop) for ids in (tokens, wanted))
    token_bin, wanted_bin = ((stop - 1 - ids).clamp(0, tolerance.distinct - 1) for ids in (tokens, wanted))
    text = torch.where(is_action ^ wants_action, tolerance.distinct, (tokens != wanted).to(torch.int64))
    both = is_action & wants_action
    return torch.where(both, (token_bin - wanted_bin).abs(), text), both


def _tolerance_of(trees: Trees, tolerance: Tolerance, on_path: Tensor, is_root: Tensor) -> Tensor:
    is_action = (trees.tokens >= tolerance.first) & (trees.tokens < tolerance.stop) & ~is_root
    before = (on_path & is_action[:, None]).sum(dim=2) - is_action.to(torch.int64)
    dimension = trees.places[:, None] + before
    return tolerance.bins[dimension.clamp(max=len(tolerance.bins) - 1)]


def _walked(trees: Trees, off: Tensor, why: Tensor, end: Tensor, levels: int) -> Tensor:
    n_nodes = trees.tokens.shape[1]
    nodes = torch.arange(n_nodes, device=end.device)
    places = torch.arange(levels + 1, device=end.device)
    is_on = (trees.ancestors.gather(1, end) >> nodes) & 1 == 1
    at = (trees.depths[:, None] == places[:, None]) & is_on[:, None]  # [requests, levels + 1, n]
    path = torch.where(at, nodes, NO_NODE).amax(dim=2)
    behind = torch.cat((path[:, 1:], torch.full_like(path[:, :1], NO_NODE)), dim=1)
    drafted, node = behind >= 0, behind.clamp(min=0)
    depth = trees.depths.gather(1, end)
    tokens = torch.where(drafted, trees.tokens.gather(1, node), NO_NODE)
    tokens = torch.where(places == depth, trees.choices.gather(1, end), tokens)
    off = torch.where(drafted, off.gather(1, node), 0)
    why = torch.where(drafted, why.gather(1, node), TARGET)
    return torch.cat((path, tokens, off, why, depth + 1), dim=1)


def accept_tree_triton(trees: Trees, tolerance: Tolerance, levels: int) -> Tensor:
    """`accept_tree` as one launch, a program per request."""
    requests, n = trees.tokens.shape
    out = trees.tokens.new_empty(requests, 4 * (levels + 1) + 1)
    columns = [getattr(trees, field.name).contiguous() for field in fields(trees)]  # the kernel's order
    _accept_tree[(requests,)](
        *columns, tolerance.bins, out, tolerance.first, tolerance.stop, tolerance.distinct, len(tolerance.bins) - 1,
        n, levels + 1,
        BLOCK=power_of_two(n, LEAST_NODES), BLOCK_PLACES=power_of_two(levels + 1, LEAST_PLACES), num_warps=4,
    )  # fmt: skip
    return out


@jit(
    do_not_specialize=["beyond", "n_nodes", "n_places"],
    do_not_specialize_on_alignment=[*(field.name for field in fields(Trees)), "bins", "out"],
)
def _accept_tree(  # type: ignore[no-untyped-def]
    tokens, parents, depths, ancestors, log_probs, valid, relaxable, choices, places, bins, out,
    first_id, stop_id, distinct, beyond, n_nodes, n_places,
    BLOCK: tl.constexpr, BLOCK_PLACES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    there, at = n < n_nodes, request * n_nodes + n
    token, depth = tl.load(tokens + at, there, other=-1), tl.load(depths + at, there, other=-1)
    parent, path = tl.load(parents + at, there, other=0), tl.load(ancestors + at, there, other=0)
    is_root = there & (parent < 0)
    wanted = tl.load(choices + request * n_nodes + tl.maximum(parent, 0), there & ~is_root, other=-1)
    exact = (token == wanted) & ~is_root

    is_action = (token >= first_id) & (token < stop_id) & ~is_root
    wants_action = (wanted >= first_id) & (wanted < stop_id)
    text = tl.where(is_action != wants_action, distinct, (token != wanted).to(tl.int32)).to(tl.int64)
    token_bin = tl.minimum(tl.maximum(stop_id - 1 - token, 0), distinct - 1)
    wanted_bin = tl.minimum(tl.maximum(stop_id - 1 - wanted, 0), distinct - 1)
    off = tl.where(is_root, 0, tl.where(is_action & wants_action, tl.abs(token_bin - wanted_bin), text))

    on_path = ((path[:, None] >> n[None, :].to(tl.int64)) & 1) == 1  # row e, column j: j is an ancestor of e, or e
    counts = tl.sum((on_path & is_action[None, :]).to(tl.int32), 1) - is_action.to(tl.int32)
    dimension = tl.load(places + request) + counts
    tolerated = tl.load(bins + tl.minimum(dimension, beyond), there, other=-1)
    near = is_action & wants_action & (off <= tolerated)
    is_valid = tl.load(valid + at, there, other=0) != 0
    is_relaxable = tl.load(relaxable + at, there, other=0) != 0
    kept = ((exact | near) & is_valid & (is_relaxable | exact) & (wanted != -1)) | is_root

    candidate = kept & (tl.sum((on_path & ~kept[None, :]).to(tl.int32), 1) == 0)
    candidate = candidate & (depth == tl.max(tl.where(candidate, depth, -1), 0))
    distance = tl.sum(tl.where(on_path, off[None, :], 0), 1)
    candidate = candidate & (distance == tl.min(tl.where(candidate, distance, 1 << 40), 0))
    likelihood = tl.load(log_probs + at, there, other=float("-inf"))
    likelihood = tl.where(likelihood != likelihood, float("-inf"), tl.minimum(likelihood, 3.4028234663852886e38))
    candidate = candidate & (likelihood == tl.max(tl.where(candidate, likelihood, float("-inf")), 0))
    end = tl.min(tl.where(candidate, n, BLOCK), 0)

    # The path's nodes, and what lies one place further on it: drafts behind each node.
    is_end = n == end
    end_path = tl.sum(tl.where(is_end, path, 0), 0)
    end_depth = tl.sum(tl.where(is_end, depth, 0), 0)
    chosen = tl.load(choices + request * n_nodes + end)
    place = tl.arange(0, BLOCK_PLACES)
    is_on = ((end_path >> n.to(tl.int64)) & 1) == 1
    here = is_on[None, :] & (depth[None, :] == place[:, None])
    behind = is_on[None, :] & (depth[None, :] == place[:, None] + 1)
    node = tl.max(tl.where(here, n[None, :], -1), 1).to(tl.int64)
    drafted = tl.sum(tl.where(behind, token[None, :] + 1, 0), 1) - 1  # -1 where nothing is
    committed = tl.where(place == end_depth, chosen, drafted)
    bins_off = tl.sum(tl.where(behind, off[None, :], 0), 1)
    why = tl.sum(tl.where(behind, tl.where(exact, 1, 2)[None, :], 0), 1).to(tl.int64)
    row = out + request * (4 * n_places + 1)
    written = place < n_places
    tl.store(row + place, node, written)
    tl.store(row + n_places + place, committed, written)
    tl.store(row + 2 * n_places + place, bins_off, written)
    tl.store(row + 3 * n_places + place, why, written)
    tl.store(row + 4 * n_places, end_depth + 1)
