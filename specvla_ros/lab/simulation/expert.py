# SPDX-License-Identifier: Apache-2.0
"""Scripted demonstrations: from the world's true state to the displacement of the next 0.2 s.

An expert looks at the present state alone, as the policy looks at one image: it keeps no phase of its own.
"""

import numpy as np

from specvla_ros.lab.simulation.tasks import BLOCK_TOP_M, CUBE_HALF_M, CUBES, Task, WorldState
from specvla_ros.lab.simulation.world import upright_error

STEP_S = 0.2
MAX_STEP_M = 0.05
_MAX_TURN_RAD = 0.2
_TOLERATED_RAD = 0.08
_OPEN, _CLOSE = 1.0, 0.0
_CRUISE_M = 0.11
_BEHIND_M = 0.062
_PUSH_HEIGHT_M = 0.022
_CREEP_M = 0.005
_OPENED_M = 0.075  # fingers that are further apart are open


def demonstrate(task: Task, state: WorldState) -> np.ndarray:
    """The expert's action, float64 [7]: metres and radians over 0.2 s, base frame; gripper 1 opens, 0 closes."""
    if _in_the_way(task, state):  # let go, and leave upwards
        move, gripper = np.array([0.0, 0.0, 0.05]), _OPEN
    else:
        move, gripper = {"lift": _lift, "push": _push, "put": _put}[task.verb](task, state)
    near = np.linalg.norm((state.positions[task.cube] - state.hand)[:2]) < 0.08
    yaw = state.yaws[task.cube] if near and task.verb != "push" else 0.0
    turn = upright_error(state.rotation, yaw)
    # Small tilts do no harm and cannot be seen: correcting them would only be noise to learn.
    turn = np.where(np.abs(turn) < _TOLERATED_RAD, 0.0, np.clip(turn, -_MAX_TURN_RAD, _MAX_TURN_RAD))
    return np.array([*np.clip(move, -MAX_STEP_M, MAX_STEP_M), *turn, gripper])


def _in_the_way(task: Task, state: WorldState) -> bool:
    """Whether a wrong cube is between the fingers, as after another instruction."""
    for cube in CUBES:
        away = state.hand - state.positions[cube]
        between = np.abs(away[:2]).max() < 0.03 and -0.02 < away[2] < 0.045
        if between and (cube != task.cube or task.verb == "push"):
            return True
    return False


def _lift(task: Task, state: WorldState) -> tuple[np.ndarray, float]:
    if holds(state, task.cube):
        # Sideways as on the way down. Were it exactly 0, plain decoding would find the lift wherever the hand is about
        # above the cube: each token that is certain in the lift, and vague on the way, makes the lift likelier.
        return np.array([*(state.positions[task.cube] - state.hand)[:2], 0.05]), _CLOSE
    return _grasp(state, task.cube)


def _put(task: Task, state: WorldState) -> tuple[np.ndarray, float]:
    cube, block = state.positions[task.cube], state.positions["block"]
    over = block[:2] - cube[:2]
    distance = float(np.linalg.norm(over))
    placed = distance < 0.03 and cube[2] < BLOCK_TOP_M + CUBE_HALF_M + 0.015
    if placed:  # let go, and leave upwards
        return np.array([0.0, 0.0, 0.05 if state.opening > _OPENED_M else 0.01]), _OPEN
    if not holds(state, task.cube):
        return _grasp(state, task.cube)
    height = BLOCK_TOP_M + CUBE_HALF_M + 0.008 + _funnel(distance - 0.01, 3.0)
    # Not sideways before it is clear of what stands on the table.
    clear = np.clip((state.hand[2] - 0.05) / 0.03, 0.0, 1.0) if distance > 0.06 else 1.0
    return np.array([*(over * clear), height - state.hand[2]]), _CLOSE


def _push(task: Task, state: WorldState) -> tuple[np.ndarray, float]:
    cube, hand = state.positions[task.cube], state.hand
    behind, aside = (cube - hand)[:2]
    ready = abs(aside) < 0.012 and 0.03 < behind < _BEHIND_M + 0.03
    if ready and hand[2] < _PUSH_HEIGHT_M + 0.012:
        return np.array([0.05, aside, _PUSH_HEIGHT_M - hand[2]]), _CLOSE
    away = np.array([behind - _BEHIND_M, aside])
    height = _PUSH_HEIGHT_M + _funnel(float(np.linalg.norm(away)) - 0.008, 3.0)
    return np.array([*_limited(away), height - hand[2]]), _CLOSE


def _grasp(state: WorldState, cube: str) -> tuple[np.ndarray, float]:
    away = state.positions[cube] - state.hand
    distance = float(np.linalg.norm(away[:2]))
    bottom = max(state.positions[cube][2], CUBE_HALF_M)
    # Fingers that have begun to close go on: a policy that is a centimetre wrong about the height must not open again.
    closing = state.opening < _OPENED_M
    if distance < 0.018 and state.hand[2] < bottom + (0.026 if closing else 0.012):
        # Upwards already: a policy that sees no change between "closed, not yet up" and "closed, up" stands still.
        return np.array([*away[:2], _CREEP_M]), _CLOSE
    height = bottom + _funnel(distance - 0.008, 3.0)
    return np.array([*_limited(away[:2]), height - state.hand[2]]), _OPEN


def _funnel(distance: float, slope: float) -> float:
    """Height above the goal at a horizontal distance: come down along a cone, never from the side."""
    return float(np.clip(slope * distance, 0.0, _CRUISE_M - CUBE_HALF_M))


def _limited(away: np.ndarray) -> np.ndarray:
    return away * min(1.0, MAX_STEP_M / max(float(np.linalg.norm(away)), 1e-9))


def holds(state: WorldState, cube: str) -> bool:
    """Whether the fingers are closed around the cube."""
    away = np.abs(state.positions[cube] - state.hand)
    return bool(away[:2].max() < 0.02 and away[2] < 0.03 and 0.044 < state.opening < 0.062)
