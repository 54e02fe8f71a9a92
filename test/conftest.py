# SPDX-License-Identifier: Apache-2.0
"""Settings of every test."""

import os

# Tests must neither hear nor reach robots on the network, nor each other. Read when ROS is initialised.
os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
os.environ["ROS_DOMAIN_ID"] = str(1 + os.getpid() % 101)  # higher ones share ports with outgoing connections
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models only wait for each other's threads

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Read when Triton is imported: kernels then run on the CPU. Nothing else in the tests asks for it.
    os.environ["TRITON_INTERPRET"] = "1"

import specvla_ros.simulation  # noqa: F401  MuJoCo chooses its OpenGL when it is first imported, whoever does it

# A busy machine makes examples slow, not wrong.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

torch.set_num_threads(1)
