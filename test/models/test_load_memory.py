# SPDX-License-Identifier: Apache-2.0
"""Loading reads shard by shard: the peak of host memory stays within 1.3 times the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.random_checkpoint import write_random_checkpoint

_LOAD = """
import json, resource, sys
from pathlib import Path
from specvla_ros.models.checkpoint import load_target
def rss():
    status = Path("/proc/self/status").read_text()
    return {key: int(status.split(key + ":")[1].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")}
load_target(sys.argv[2], device="cpu")  # what the libraries take on first use is not the model's
before = rss()["VmRSS"]
policy = load_target(sys.argv[1], device="cpu", dtype="bfloat16")
model = sum(parameter.nbytes for parameter in policy.model.parameters())
print(json.dumps({"peak": rss()["VmHWM"] - before, "model": model}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")
def test_peak_memory(tmp_path: Path) -> None:
    # A quarter of a gigabyte in float32, loaded as bfloat16: the file mapped whole would be twice the model.
    large, small = tmp_path / "large", tmp_path / "small"
    write_random_checkpoint(large, hidden_size=1024, layers=5)
    write_random_checkpoint(small, hidden_size=64, layers=2)
    assert (large / "model.safetensors").stat().st_size > 250e6

    command = [sys.executable, "-c", _LOAD, str(large), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["peak"] <= 1.3 * measured["model"], measured
