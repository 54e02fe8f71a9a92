# SPDX-License-Identifier: Apache-2.0
"""The robot's state out of a sensor_msgs/JointState, live or recorded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specvla_ros.errors import UserError

JOINT_STATE = "sensor_msgs/msg/JointState"


def read_state(message: Any, names: Sequence[str], dims: int) -> np.ndarray:
    """The positions of a message in the policy's order, float64 [dims].

    Args:
        message: a JointState, of joints or of any named numbers.
        names: the policy's order; empty: the message's own.
        dims: numbers that the policy reads.

    Raises:
        UserError: numbers are missing, too many, or not finite.
    """
    values = list(message.position)
    if names:
        by_name = dict(zip(message.name, values, strict=False))
        missing = [name for name in names if name not in by_name]
        if missing:
            raise UserError(f"it has no '{missing[0]}', which state_names asks for; it has {', '.join(by_name)}")
        values = [by_name[name] for name in names]
    if len(values) != dims:
        hint = "" if names else "; set state_names to those that it reads, in its order"
        raise UserError(f"it has {len(values)} numbers, and the policy reads {dims}{hint}")
    state = np.array(values, dtype=np.float64)
    if not np.isfinite(state).all():
        raise UserError(f"it has a number that is not finite: {values}")
    return state
