"""Whether a captured draft gives what the same draft gives without capture."""

import torch

from specvla_kernels.capture_check import check_rows
from specvla_ros.drafting.draft_input import DraftInput
from specvla_ros.drafting.dynamic_tree import GrownTrees
from specvla_ros.drafting.static_draft import MOST_ROWS
from specvla_ros.models.llama import LlamaDecoder

_UNLIKELY = -50.0  # in place of -inf, which has no distance


def check_inputs(decoder: LlamaDecoder, requests: int, levels: int, *, prefix_len: int) -> list[DraftInput]:
    """Requests with random rows, of different numbers, each with a level less than the one before.

    Args:
        decoder: the target.
        requests: how many; they have the first slots.
        levels: of the highest tree.
        prefix_len: committed rows of each slot, at least one.
    """
    generator = torch.Generator().manual_seed(requests)
    config, device = decoder.config, decoder.device
    inputs = []
    for slot in range(requests):
        rows = min(prefix_len, 1 + (slot + levels) % MOST_ROWS)
        hidden = torch.randn(rows, config.hidden_size, generator=generator)
        tokens = torch.randint(config.vocab_size, (rows,), generator=generator).to(device)
        inputs.append(
            DraftInput(
                slot=slot,
                prefix_len=prefix_len,
                hidden=hidden.to(device, decoder.dtype),
                following=decoder.embed_tokens(tokens),
                root=tokens[-1],
                levels=max(1, levels - slot),
                place=1,
            )
        )
    return inputs


def check_trees(found: GrownTrees, expected: GrownTrees, *, what: str, dtype: torch.dtype) -> None:
    """Compares roots, and how the draft's probability is spread over a tree; which of two like nodes it holds is open.

    Raises:
        RuntimeError: they differ by more than rounding, or nothing was drafted.
    """
    if not bool((expected.log_probs[:, 1:] > -torch.inf).any(dim=1).all()):
        raise RuntimeError(f"{what} has no drafts")
    if not found.numbers[0, :, 0].equal(expected.numbers[0, :, 0]):
        raise RuntimeError(f"{what} has other roots")
    ours, others = (each.log_probs.clamp(min=_UNLIKELY).sort(dim=1).values for each in (found, expected))
    check_rows(ours, others, what=what, dtype=dtype)
