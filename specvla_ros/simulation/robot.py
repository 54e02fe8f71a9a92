"""What a rollout needs of a simulated robot: the table's arm, or LIBERO's."""

from typing import Protocol

import numpy as np


class SimulatedRobot(Protocol):
    """A robot in a world with a task. Belongs to the thread that made it.

    Attributes:
        control_dt: seconds that one `advance` takes in the world.
        action_dt: seconds over which an action's displacements are meant: the period of the training data.
        largest_translation: in the training data, in the unit of the actions; policies of another robot are told by it.
    """

    control_dt: float
    action_dt: float
    largest_translation: float

    @property
    def instruction(self) -> str:
        """What the policy is told in this episode."""

    @property
    def max_steps(self) -> int:
        """Actions of `action_dt` after which the episode has failed."""

    def reset(self, task: str, seed: int) -> None:
        """Begins an episode; the same task and seed give the same start.

        Raises:
            UserError: there is no such task, or the suite has no such initial state.
        """

    def look(self) -> np.ndarray:
        """The camera's picture as the policy expects it, RGB uint8 [height, width, 3]."""

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        """Starts to follow an action; a newer one takes its place.

        Args:
            values: float64 [7], in the units of the policy: displacements from where the arm was in the action's
                picture, meant over `action_dt`; gripper 1 opens, 0 closes.
            age_s: world time that has passed since that picture.
        """

    def advance(self) -> None:
        """Lets `control_dt` pass; without an action to follow the arm holds still.

        Raises:
            SimulationDiverged: the world is not finite any more.
        """

    def succeeded(self) -> bool:
        """Whether the task is done now."""

    def acted_on(self) -> str | None:
        """The thing that was moved most since the reset; None: none, or the world does not tell."""

    def close(self) -> None:
        """Frees what the robot holds."""
