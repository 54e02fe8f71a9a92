# SPDX-License-Identifier: Apache-2.0
"""Records of the simulated arm's true motion: one row per control step, in a file that survives a kill.

A JSON header line names the robot and its joints; rows of fixed size follow. An incomplete last row is ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from specvla_ros.control.pose import quaternion
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arm import Arm, joint_indices
from specvla_ros.lab.simulation.arms import choose_arm
from specvla_ros.lab.simulation.world import World

_FORMAT = "specvla motion record 1"
_FLUSH_ROWS = 100
# Bits of `touching`.
TOUCHES_TABLE, TOUCHES_THING, TOUCHES_ITSELF = 1, 2, 4


def _columns(arm: Arm) -> np.dtype[Any]:
    joints = (len(arm.joints),)
    return np.dtype(
        [
            ("time_s", "<f8"),  # on /clock, at the end of the step
            ("episode", "<i4"),
            ("running", "u1"),  # 1 while the episode is judged
            ("position", "<f8", (3,)),  # tool in the base frame, metres
            ("quaternion", "<f8", (4,)),  # tool, w x y z
            ("velocity", "<f8", (6,)),  # tool: m/s and rad/s, base frame
            ("joint_position", "<f8", joints),  # radians
            ("joint_velocity", "<f8", joints),  # rad/s
            ("joint_torque", "<f4", joints),  # motors, N m
            ("opening", "<f4"),  # distance between the fingers, metres
            ("touching", "u1"),  # contacts of arm and gripper: TOUCHES_…
            ("contact_force", "<f4"),  # largest normal force on arm and gripper, N
        ]
    )


class MotionRecorder:
    """Writes a record of a world's arm, replacing an existing file; a kill loses at most the last second.

    Raises UserError if the file cannot be written.
    """

    def __init__(self, path: Path, world: World) -> None:
        self._path, self._world = path, world
        arm = world.arm
        self._rows = np.zeros(_FLUSH_ROWS, _columns(arm))
        self._filled = 0
        model = world.model
        self._site = model.site("pinch").id
        self._motors = [model.actuator(name).id for name in arm.motors]
        self._qpos, self._dofs = joint_indices(model, arm.joints)
        self._kinds = _geom_kinds(model)
        self._velocity, self._force = np.zeros(6), np.zeros(6)
        head = {"format": _FORMAT, "robot": arm.name, "joints": list(arm.joints), "speed_limits": list(arm.speed)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
            self._file.write(json.dumps(head).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"the record {path} cannot be written: {error.strerror}") from None

    def add(self, time_s: float, episode: int, running: bool) -> None:
        """Records the current state; raises UserError if the file cannot be written."""
        data, row = self._world.data, self._rows[self._filled]
        mujoco.mj_objectVelocity(self._world.model, data, mujoco.mjtObj.mjOBJ_SITE, self._site, self._velocity, 0)
        row["time_s"], row["episode"], row["running"] = time_s, episode, running
        row["position"] = data.site_xpos[self._site]
        row["quaternion"] = quaternion(data.site_xmat[self._site].reshape(3, 3))
        row["velocity"] = np.roll(self._velocity, 3)  # MuJoCo has the rotation first
        row["joint_position"] = data.qpos[self._qpos]
        row["joint_velocity"] = data.qvel[self._dofs]
        row["joint_torque"] = data.actuator_force[self._motors]
        row["opening"] = self._world.opening()
        row["touching"], row["contact_force"] = self._contacts()
        self._filled += 1
        if self._filled == _FLUSH_ROWS:
            self._flush()

    def _contacts(self) -> tuple[int, float]:
        data = self._world.data
        kinds = self._kinds[data.contact.geom[: data.ncon]]
        touching, largest = 0, 0.0
        for index in np.flatnonzero((kinds == _ARM).any(axis=1)):
            mujoco.mj_contactForce(self._world.model, data, index, self._force)
            if self._force[0] <= 0.0:  # close, but not yet touching
                continue
            largest = max(largest, float(self._force[0]))
            touching |= _TOUCHES[int(kinds[index].sum())]
        return touching, largest

    def _flush(self) -> None:
        try:
            self._file.write(self._rows[: self._filled].tobytes())
            self._file.flush()
        except OSError as error:
            raise UserError(f"the record {self._path} can no longer be written: {error.strerror}") from None
        self._filled = 0

    def close(self) -> None:
        if not self._file.closed:
            self._flush()
            self._file.close()


_ARM, _STATIC, _THING = 1, 10, 100
_TOUCHES = {2 * _ARM: TOUCHES_ITSELF, _ARM + _STATIC: TOUCHES_TABLE, _ARM + _THING: TOUCHES_THING}


def _geom_kinds(model: mujoco.MjModel) -> np.ndarray:
    """The kind of each geom's body, int [geoms]; free bodies are things, all other moving bodies are the arm's."""
    kinds = np.full(model.ngeom, _STATIC)
    for geom, body in enumerate(model.geom_bodyid):
        root = model.body_rootid[body]
        if model.body_jntnum[root] and model.jnt_type[model.body_jntadr[root]] == mujoco.mjtJoint.mjJNT_FREE:
            kinds[geom] = _THING
        elif root and model.body(root).name != "block":
            kinds[geom] = _ARM
    return kinds


@dataclass(frozen=True)
class MotionRecord:
    """A motion record read from a file."""

    arm: Arm
    rows: np.ndarray  # structured, one row per control step; see `_columns`


def read_motion_record(path: Path) -> MotionRecord:
    """Reads a record, even if its writer was killed; raises UserError if the file is not a record."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    first, _, rest = content.partition(b"\n")
    try:
        head = json.loads(first)
        arm = choose_arm(head["robot"]) if head["format"] == _FORMAT else None
    except (ValueError, KeyError, TypeError):
        arm = None
    if arm is None:
        raise UserError(f"{path} is not a record of a simulated arm's motion")
    columns = _columns(arm)
    whole = len(rest) // columns.itemsize * columns.itemsize
    return MotionRecord(arm, np.frombuffer(rest[:whole], columns))
