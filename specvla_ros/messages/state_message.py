# SPDX-License-Identifier: Apache-2.0
"""Reads the robot's state from live or recorded JointStates by joint name. Needs no ROS."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from specvla_ros.control.joint_parts import TOLERANCE_S, JointParts, positions_by_name
from specvla_ros.control.state_units import StateUnits
from specvla_ros.errors import UserError

_log = logging.getLogger(__name__)


class StateReader:
    """Reads states by name, whatever a message's order, and merges partial states of several publishers.

    Args:
        names: names of the values in the policy's order; empty: taken from the first message.
        dims: number of values the policy reads; 0: all.
        tolerance_s: maximum difference between the stamps of merged parts.
        units: conversion of the named values; None: they are read as published.
    """

    def __init__(
        self,
        names: Sequence[str],
        dims: int = 0,
        tolerance_s: float = TOLERANCE_S,
        units: StateUnits | None = None,
    ) -> None:
        self._units = units
        self._parts, self._dims, self._tolerance_s = JointParts(names, tolerance_s), dims, tolerance_s
        self.stamp_ns = 0  # stamp of the newest part of the last complete state
        self.refused = 0  # messages
        self.first_refusal = ""  # its reason
        if names and dims and len(names) != dims:
            raise UserError(f"state_names has {len(names)} names, but the policy reads {dims} values")

    @property
    def names(self) -> tuple[str, ...]:
        return self._parts.names

    @property
    def lacking(self) -> str:
        """Reason why the last message did not complete a state; empty if it did."""
        return f"{self._parts.lacking}: see state_names" if self._parts.lacking else ""

    def start_over(self) -> None:
        """Forgets the parts of earlier messages, as after a clock jump: their stamps may come again."""
        self._parts = JointParts(self.names, self._tolerance_s)

    def read(self, message: Any, stamp_ns: int) -> np.ndarray | None:
        """Returns the complete state, float64 [dims], after a message; None if parts are missing, see `lacking`.

        Raises UserError if the number of names or values is wrong, or a value that the policy reads is not finite.
        """
        try:
            return self._read(message, stamp_ns)
        except UserError as error:
            self.refused += 1
            self.first_refusal = self.first_refusal or str(error)
            raise

    def _read(self, message: Any, stamp_ns: int) -> np.ndarray | None:
        self.stamp_ns = stamp_ns
        if not message.name and not self.names:
            return self._checked(list(message.position))
        given = positions_by_name(message.name, message.position)  # refuses broken messages of any part
        if not self.names:
            self._checked([*given.values()])
            self._parts = JointParts(tuple(given), self._tolerance_s)
            if self._dims:
                order = ", ".join(self.names)
                _log.warning("the state is read in the first message's order, %s: set state_names to fix it", order)
        if not self._parts.add(message.name, message.position, stamp_ns):
            return None
        self.stamp_ns = max(self._parts.stamps())
        state = np.array(self._parts.values())
        return state if self._units is None else self._units.converted(state)

    def _checked(self, values: list[float]) -> np.ndarray:
        if self._dims and len(values) != self._dims:
            raise UserError(
                f"it has {len(values)} values, but the policy reads {self._dims}; set state_names to the names that "
                "the policy reads, in its order"
            )
        state = np.array(values, dtype=np.float64)
        if not np.isfinite(state).all():
            raise UserError(f"it has a value that is not finite: {state.tolist()}")
        return state
