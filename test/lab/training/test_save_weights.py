# SPDX-License-Identifier: Apache-2.0
"""Weights are written as a whole, or not at all."""

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from specvla_ros.lab.training.artifacts import save_weights

_LIMITED = """
import resource, sys, torch
sys.dont_write_bytecode = True
from pathlib import Path
from specvla_ros.errors import UserError
from specvla_ros.lab.training.artifacts import save_weights
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_weights(Path(sys.argv[1]), {"a": torch.zeros(10_000)})
except UserError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_older_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(path, {"a": torch.ones(3)})
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, timeout=120)
    assert "model.safetensors cannot be written" in done.stdout, done.stderr
    assert torch.equal(load_file(path)["a"], torch.ones(3))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
