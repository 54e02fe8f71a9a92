"""Times one row through a linear layer: torch's against specvla_kernels', on this CPU.

python benchmarks/linear.py
"""

import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.linear import linear

SHAPE = (11264, 2048)  # gate and up of a 1B Llama
MATRICES = 22  # 2 GB in all, so that no cache holds them
TURNS = 9
OUT = Path(__file__).resolve().parent / "results" / "linear_cpu.json"


def main() -> None:
    """Prints the rates and writes them to benchmarks/results/linear_cpu.json."""
    weights = [torch.randn(SHAPE) for _ in range(MATRICES)]
    row = torch.randn(1, SHAPE[1])
    contestants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": F.linear, "ours": linear}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    with torch.inference_mode():
        for _ in range(TURNS + 1):  # the first turn is warm-up
            for name, product in contestants.items():
                started = time.perf_counter()
                for weight in weights:
                    product(row, weight)
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    size = sum(weight.nbytes for weight in weights)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "CPU")
    result = {
        "benchmark": "linear",
        "command": "python benchmarks/linear.py",
        "date": date.today().isoformat(),
        "hardware": f"{cpu}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "shape": SHAPE,
        "gb_per_s": {name: size / median / 1e9 for name, median in medians.items()},
        "speedup": medians["torch"] / medians["ours"],
    }
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
