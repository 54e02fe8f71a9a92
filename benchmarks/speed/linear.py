# SPDX-License-Identifier: Apache-2.0
"""Times linear layers over numbers of rows on this CPU: torch's product and that of specvla_kernels.

python -m benchmarks.speed.linear
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from benchmarks.harness import Out, finish, result_head, take_turns
from specvla_kernels.fused_linear import linear

# Of a 1B Llama, and of the nano policy.
SHAPES = {"gate and up": (11264, 2048), "output head": (32064, 2048), "gate and up, nano": (960, 192)}
ROWS = (1, 2, 5, 16, 64, 290)  # of a decode step, levels of a draft tree, trees, a prompt
BYTES = 1 << 30  # of all matrices of a shape: larger than the caches
TURNS = 7


def main(context: typer.Context, out: Out = None) -> None:
    """Measures the rates of both products for every shape and number of rows."""
    cases = [case(name, shape, rows) for name, shape in SHAPES.items() for rows in ROWS]
    finish(result_head(context) | {"torch": torch.__version__, "cases": cases}, out)


@torch.inference_mode()
def case(name: str, shape: tuple[int, int], rows: int) -> dict[str, object]:
    """Times both products of a shape in turns, over all matrices."""
    weights = [torch.randn(shape) for _ in range(BYTES // (shape[0] * shape[1] * 4))]
    x = torch.randn(rows, shape[1])

    def over_all(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                product(x, weight)

        return run

    medians = take_turns({"torch": over_all(F.linear), "ours": over_all(linear)}, TURNS, "cpu")
    size = sum(weight.nbytes for weight in weights)
    return {
        "matrix": name,
        "shape": shape,
        "rows": rows,
        "gb_per_s": {name: size / median / 1e9 for name, median in medians.items()},
        "speedup": medians["torch"] / medians["ours"],
    }


if __name__ == "__main__":
    typer.run(main)
