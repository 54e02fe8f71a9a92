"""Drafts an action from those before it: no forward, no training."""

from specvla_ros.acceptance.verification import ActionIds


class TemporalDrafter:
    """Remembers the last two actions of an instruction epoch.

    A robot's actions change little from frame to frame, so that the last one, held, or the line through the last two is
    often right, above all in the dimensions that rest. These drafts are for strict acceptance only, see Drafter.

    Args:
        actions: which ids are actions.
    """

    def __init__(self, actions: ActionIds) -> None:
        self._actions = actions
        self._epoch = 0
        self._last: tuple[int, ...] = ()
        self._before: tuple[int, ...] = ()

    def observe(self, epoch: int, tokens: tuple[int, ...]) -> None:
        """Takes a finished action."""
        self._before = self._last if epoch == self._epoch else ()
        self._epoch, self._last = epoch, tokens

    def forget(self) -> None:
        """As before the first action."""
        self._last = self._before = ()

    def chains(self, epoch: int, place: int) -> list[tuple[int, ...]]:
        """What the action tokens from dimension `place` on might be: held, then extrapolated where that differs."""
        if not self._last or epoch != self._epoch:
            return []
        held = self._last[place:]
        chains = [held] if held else []
        if self._before:
            line = tuple(map(self._beyond, self._before[place:], held))
            chains += [line] if line != held else []
        return chains

    def _beyond(self, before: int, last: int) -> int:
        token = 2 * last - before  # ids fall by one from bin to bin
        return max(self._actions.first, min(self._actions.stop - 1, token))
