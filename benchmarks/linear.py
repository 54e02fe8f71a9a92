"""Times a few rows through a linear layer: torch's against specvla_kernels', on this CPU.

python benchmarks/linear.py
"""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from speed_benchmark import hardware, write_result
from timing import take_turns
from torch import Tensor

from specvla_kernels.linear import linear

SHAPES = {"gate and up": (11264, 2048), "output head": (32064, 2048)}  # of a 1B Llama
ROWS = (1, 2, 5, 8)
BYTES = 1 << 30  # of all matrices of a shape, so that no cache holds them
TURNS = 7
OUT = Path(__file__).resolve().parent / "results" / "linear_cpu.json"


def main() -> None:
    """Prints the rates and writes them to benchmarks/results/linear_cpu.json."""
    result = {
        "benchmark": "linear",
        "command": "python benchmarks/linear.py",
        "date": date.today().isoformat(),
        "hardware": hardware("cpu"),
        "torch": torch.__version__,
        "cases": [case(name, shape, rows) for name, shape in SHAPES.items() for rows in ROWS],
    }
    write_result(result, OUT)
    print(json.dumps(result, indent=2))


@torch.inference_mode()
def case(name: str, shape: tuple[int, int], rows: int) -> dict[str, object]:
    """Both products of one shape in turns, each over every matrix."""
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
    main()
