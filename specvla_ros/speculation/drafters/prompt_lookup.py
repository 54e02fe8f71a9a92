"""Drafts text by looking its last tokens up in what came before (prompt lookup decoding)."""

from collections.abc import Sequence

_LONGEST = 3


def look_up(text: Sequence[int], tail: Sequence[int], tokens: int) -> tuple[int, ...]:
    """What follows the most recent occurrence in a text of another's last tokens; the longest match of up to three.

    Args:
        text: ids to look in: prompt and answer so far, or an earlier answer.
        tail: ids whose end is looked up; may be the text itself.
        tokens: at most so many are drafted.

    Returns:
        Nothing where the last token is new.
    """
    for length in range(min(_LONGEST, len(tail)), 0, -1):
        pattern = tuple(tail[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if tuple(text[start : start + length]) == pattern:
                return tuple(text[start + length : start + length + tokens])
    return ()
