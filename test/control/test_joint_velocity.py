# SPDX-License-Identifier: Apache-2.0
"""Velocities keep an arm at its targets, and correct nothing that is not measured."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specvla_ros.control.joint_velocity import JointTracking

MAX_ACCELERATION = np.array([5.0, 10.0])
STEP_S = 0.01
MOVES: Any = SimpleNamespace(moving=True)
RESTS: Any = SimpleNamespace(moving=False)


class Targets:
    """Commanded positions and velocities of the joints."""

    joints, max_speed, max_acceleration = ("a", "b"), np.array([1.0, 2.0]), MAX_ACCELERATION

    def __init__(self) -> None:
        self.positions, self.velocities = np.zeros(2), np.zeros(2)

    def follow(self, target: Any) -> tuple[np.ndarray, np.ndarray]:
        return self.positions, self.velocities


@pytest.fixture
def targets() -> Any:
    return Targets()


def named(positions: np.ndarray) -> dict[str, float]:
    return {"b": float(positions[1]), "a": float(positions[0]), "other": 9.0}


def test_an_arm_that_is_slower_than_commanded_stays_at_its_targets(targets: Any) -> None:
    tracking, here = JointTracking(targets), np.zeros(2)
    for _ in range(400):
        targets.velocities = np.array([0.2, -0.3])
        targets.positions = targets.positions + targets.velocities * STEP_S
        here = here + 0.8 * STEP_S * tracking.next(MOVES, named(here), STEP_S)
    assert np.abs(here - targets.positions).max() < 0.02
    targets.velocities = np.full(2, 1e-4)  # creeps
    for _ in range(200):
        sent = tracking.next(RESTS, named(here), STEP_S)
        here = here + 0.8 * STEP_S * sent
    assert not sent.any() and np.abs(here - targets.positions).max() < 1e-3


def test_the_correction_keeps_the_limits_of_speed_and_acceleration(targets: Any) -> None:
    targets.positions = np.array([3.0, -3.0])
    tracking, sent = JointTracking(targets), np.zeros(2)
    for _ in range(30):
        before, sent = sent, tracking.next(MOVES, named(np.zeros(2)), STEP_S)
        assert (np.abs(sent - before) <= MAX_ACCELERATION * STEP_S + 1e-12).all()
    assert sent == pytest.approx([1.0, -2.0])


def test_what_is_not_measured_corrects_nothing_and_the_rest_fades_within_the_accelerations(targets: Any) -> None:
    tracking = JointTracking(targets)
    targets.positions = np.array([0.1, 0.1])
    before = tracking.next(RESTS, named(np.zeros(2)), STEP_S)
    for _ in range(20):
        after = tracking.next(RESTS, None, STEP_S)
        assert (np.abs(after - before) <= MAX_ACCELERATION * STEP_S + 1e-12).all()
        before = after
    assert not after.any()
