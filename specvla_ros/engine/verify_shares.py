"""Behind a forward: what each request commits, by kernels where there are some, else by tensors and the host."""

from collections.abc import Sequence

from torch import Tensor

from specvla_kernels.commit_kv import commit_kv
from specvla_ros.engine.setup import Setup
from specvla_ros.engine.share import Share
from specvla_ros.engine.verify import Commit, verify
from specvla_ros.engine.verify_on_device import Uploaded, verify_on_device


def upload(setup: Setup, shares: Sequence[Share]) -> Uploaded | None:
    """Sends ahead what the acceptance kernel needs, where it is used.

    Args:
        setup: the engine's.
        shares: those that verify.
    """
    if setup.tolerance is None or not shares:
        return None
    requests = [share.request for share in shares]
    places = [setup.answer.place(request.tokens) for request in requests]
    slots, roots = [request.slot for request in requests], [request.root_row for request in requests]
    return Uploaded.from_requests(places, slots, roots, setup.cache.keys.device)


def verify_shares(setup: Setup, logits: Tensor, shares: Sequence[Share], uploaded: Uploaded | None) -> list[Commit]:
    """Chooses what each request commits, and moves its keys and values.

    Args:
        setup: the engine's.
        logits: float32 [nodes of all trees, vocab], shares in order.
        shares: at least one, each with its hidden states.
        uploaded: what `upload` gave before the forward.
    """
    if uploaded is not None and setup.tolerance is not None:
        trees = [share.request.tree for share in shares]
        return verify_on_device(logits, trees, uploaded, setup.tolerance, setup.cache)
    parts = [share.to_verify(setup.answer) for share in shares]
    commits = verify(logits, parts, setup.rule, setup.answer.actions)
    for share, commit in zip(shares, commits, strict=True):
        request = share.request
        commit_kv(setup.cache.keys, setup.cache.values, request.slot, request.root_row, commit.nodes)
    return commits
