"""Makes the engine that a node's parameters describe."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from specvla_ros.errors import UserError
from specvla_ros.ros.policy.parameters import PolicyParameters

if TYPE_CHECKING:
    from specvla_ros.engine.engine import Engine


def load_engine(
    parameters: PolicyParameters, now_ns: Callable[[], int], progress: Callable[[str, float], None]
) -> Engine:
    """Loads the checkpoint. Takes minutes for a large one; imports torch.

    Args:
        parameters: which checkpoint, and how it shall run.
        now_ns: the clock of the images' stamps.
        progress: called with what is being done and the fraction done.

    Raises:
        UserError: a Python package is missing, or the checkpoint or a parameter is wrong.
    """
    progress("importing torch", 0.0)
    try:
        from specvla_ros.engine.engine import Engine
        from specvla_ros.models.checkpoint import load_target
    except ModuleNotFoundError as error:
        raise UserError(
            f"the Python package '{error.name}' is missing; install it with `pip install -r requirements/runtime.txt` "
            "(on a Jetson take torch from NVIDIA's wheels); `specvla doctor` lists everything that is missing"
        ) from None
    _leave_a_core_to_ros()
    policy = load_target(
        parameters.checkpoint,
        **vars(parameters.model),
        progress=progress,
    )
    return Engine(policy, parameters.engine, now_ns=now_ns)


def _leave_a_core_to_ros() -> None:
    """On a CPU, torch's threads wait for each other: one that must share its core with DDS slows all of them.

    On two busy cores a 12 ms action took 190 ms and more before. OMP_NUM_THREADS, if set, has the last word.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
