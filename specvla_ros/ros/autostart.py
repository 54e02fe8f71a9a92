# SPDX-License-Identifier: Apache-2.0
"""When a launch file changes a lifecycle node's state, and when it leaves that to others. Needs no launch."""

from enum import Enum


class Step(Enum):
    """What the launch file does next."""

    NOTHING = "nothing"
    CONFIGURE = "configure"
    ACTIVATE = "activate"
    FAILED = "failed"  # tell it, or end the launch


class Autostart:
    """Configures and activates a node once for each start of its process; whoever changes its state later has it alone.

    A node that was shut down by hand stays unconfigured when its process starts again.
    """

    def __init__(self) -> None:
        self._configuring = False  # for the launch, not by hand
        self._begun = False
        self._shut_down = False

    @property
    def waiting(self) -> bool:
        """Whether `configure` was requested, and the node has not begun with it."""
        return self._configuring and not self._begun

    def process_started(self) -> Step:
        """Its process runs, for the first time or again."""
        if self._shut_down:
            return Step.NOTHING
        self._configuring, self._begun = True, False
        return Step.CONFIGURE

    def state_changed(self, start: str, goal: str) -> Step:
        """The node went from one state to another; names as in lifecycle_msgs/State."""
        self._begun |= goal == "configuring"
        self._shut_down |= goal == "finalized"
        if start != "configuring" or not self._configuring:
            return Step.NOTHING
        self._configuring = False
        return Step.ACTIVATE if goal == "inactive" else Step.FAILED

    def process_ended(self, code: int) -> Step:
        """Its process ended with an exit code."""
        starting, self._configuring = self._configuring, False
        return Step.FAILED if code and starting else Step.NOTHING
