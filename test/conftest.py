# SPDX-License-Identifier: Apache-2.0
"""Settings of every test, and what several rooms share."""

import gc
import os
import sys
from collections.abc import Iterator

from support.ros_domain import own_domains

# Tests must neither hear nor reach robots on the network, nor each other. Read when ROS is initialised.
os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
os.environ["ROS_DOMAIN_ID"] = str(own_domains())
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models only wait for each other's threads
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # takes longer than most tests; test_compiled_layers turns it on

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from support.nightly import ALL_EXAMPLES

if not torch.cuda.is_available():
    # Read when Triton is imported: kernels then run on the CPU. Nothing else in the tests asks for it.
    os.environ["TRITON_INTERPRET"] = "1"

import specvla_ros.lab.simulation  # noqa: F401  MuJoCo chooses its OpenGL when it is first imported, whoever does it

# A busy machine makes examples slow, not wrong.
settings.register_profile(
    "night", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=ALL_EXAMPLES
)
settings.register_profile("day", settings.get_profile("night"), max_examples=ALL_EXAMPLES // 5)
# A mutant is to be noticed, not to be explained: soon, and by the same examples in every run.
settings.register_profile(
    "mutants",
    settings.get_profile("day"),
    max_examples=ALL_EXAMPLES // 10,
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    database=None,
)
settings.load_profile("day")

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray cluster on this machine; one for all tests, since starting it takes longer than they do."""
    ray = pytest.importorskip("ray", reason="pip install -r requirements/ray.txt")
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init("local", num_cpus=2, runtime_env=here, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
