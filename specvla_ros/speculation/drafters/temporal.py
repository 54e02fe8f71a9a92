"""Drafts an answer from those before it: no forward, no training."""

from collections.abc import Sequence

from specvla_ros.speculation.accept import ActionIds
from specvla_ros.speculation.drafters.prompt_lookup import look_up


class TemporalDrafter:
    """Remembers the last two actions of an instruction epoch, and the text before the last.

    A robot's actions change little from frame to frame, so that the last one, held, or the line through the last two is
    often right, above all in the dimensions that rest; and most of what a policy writes before it acts, it wrote one
    image ago. These drafts are for strict acceptance only, see Drafter.

    Args:
        actions: which ids are actions.
    """

    def __init__(self, actions: ActionIds) -> None:
        self._actions = actions
        self._epoch = 0
        self._last: tuple[int, ...] = ()
        self._before: tuple[int, ...] = ()
        self._answer: tuple[int, ...] = ()

    def observe(self, epoch: int, answer: tuple[int, ...], action: tuple[int, ...]) -> None:
        """Takes a finished answer and the action that it ends in."""
        self._before = self._last if epoch == self._epoch else ()
        self._epoch, self._last, self._answer = epoch, action, answer

    def forget(self) -> None:
        """As before the first action."""
        self._last = self._before = self._answer = ()

    def text(self, epoch: int, answer: Sequence[int], tokens: int) -> tuple[int, ...]:
        """What followed in the last answer: its beginning, or what came behind the last tokens of this one.

        Args:
            epoch: of this answer.
            answer: its tokens so far.
            tokens: at most so many are drafted.
        """
        if epoch != self._epoch:
            return ()
        return look_up(self._answer, answer, tokens) if answer else self._answer[:tokens]

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
