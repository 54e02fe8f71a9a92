"""How fast the world really goes. No ROS here."""

_WINDOW_S = 5.0


class Pace:
    """Counts simulated time against the wall clock."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._simulated_s = 0.0

    def step(self, now_s: float, step_s: float) -> float | None:
        """Counts a step.

        Args:
            now_s: wall clock.
            step_s: simulated time that passed.

        Returns:
            Simulated over wall seconds, once in 5 wall seconds; None in between.
        """
        if self._began_s is None:
            self._began_s = now_s
            return None
        self._simulated_s += step_s
        elapsed_s = now_s - self._began_s
        if elapsed_s < _WINDOW_S:
            return None
        factor = self._simulated_s / elapsed_s
        self._began_s, self._simulated_s = now_s, 0.0
        return factor
