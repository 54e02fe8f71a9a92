"""Makes the engine that a node's parameters describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specvla_ros.errors import UserError
from specvla_ros.nodes.policy_parameters import PolicyParameters

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
        from specvla_ros.models.policy import load_policy
    except ModuleNotFoundError as error:
        raise UserError(
            f"the Python package '{error.name}' is missing; install it with `pip install -r requirements/runtime.txt` "
            "(on a Jetson take torch from NVIDIA's wheels); `specvla doctor` lists everything that is missing"
        ) from None
    policy = load_policy(
        parameters.checkpoint,
        device=parameters.device,
        dtype=parameters.dtype,
        unnorm_key=parameters.unnorm_key,
        center_crop=parameters.center_crop,
        progress=progress,
    )
    return Engine(policy, parameters.engine_settings(), now_ns=now_ns)
