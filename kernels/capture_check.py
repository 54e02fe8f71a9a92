"""Whether captured work gives what the same work gives without capture."""

import torch
from torch import Tensor

# Of a row's length. Another size sums in another order, in every layer; a row that is wrong is off by its whole length.
_TOLERANCES = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.2}
_EXACT = 1e-6


def fill_at_random(keys: Tensor, values: Tensor) -> None:
    """Gives every row of an unused store finite keys and values, for the work of a check to look at."""
    generator = torch.Generator(keys.device).manual_seed(0)
    for store in (keys, values):
        store.normal_(generator=generator)


def check_rows(found: Tensor, expected: Tensor, *, what: str, dtype: torch.dtype | None = None) -> None:
    """Compares results row by row; waits for the device.

    Args:
        found: [n, size], of captured work.
        expected: like found, without capture.
        what: the captured work, for the error.
        dtype: that it is computed in; None: that of what is expected.

    Raises:
        RuntimeError: they are not finite, or differ by more than rounding.
    """
    tolerance = _TOLERANCES.get(dtype or expected.dtype, _EXACT)
    expected = expected.double()
    off = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    worst = float(off.max()) if bool(off.isfinite().all()) else torch.nan
    if not worst <= tolerance:
        raise RuntimeError(f"{what} is off by {worst:.2g} of a row's length")
