# SPDX-License-Identifier: Apache-2.0
"""Poses compared."""

import numpy as np

from specvla_ros.control.pose import Pose, rotation_vector


def apart(one: Pose, other: Pose) -> tuple[float, float]:
    """Metres and radians between two poses."""
    turn = rotation_vector(other.rotation @ one.rotation.T)
    return float(np.linalg.norm(other.position - one.position)), float(np.linalg.norm(turn))
