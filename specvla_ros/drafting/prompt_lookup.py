"""Drafts text by looking its last tokens up in what came before (prompt lookup decoding)."""

from collections.abc import Sequence

_LONGEST = 3


def look_up(context: Sequence[int], tokens: int) -> tuple[int, ...]:
    """What followed the most recent earlier occurrence of the context's last tokens; the longest match of up to three.

    Args:
        context: ids of the prompt and the answer so far.
        tokens: at most so many are drafted.

    Returns:
        Nothing where the last token is new.
    """
    for length in range(min(_LONGEST, len(context) - 1), 0, -1):
        pattern = tuple(context[-length:])
        for start in range(len(context) - length - 1, -1, -1):
            if tuple(context[start : start + length]) == pattern:
                return tuple(context[start + length : start + length + tokens])
    return ()
