# SPDX-License-Identifier: Apache-2.0
"""What runs only in `make test-all`: cases of a parametrised test, and most examples of a property.

`make test-all` chooses Hypothesis's profile "night"; without it a property is tried on a fifth of its examples.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL_EXAMPLES = 100  # of a property that does not name its own number


def examples(all_of_them: int) -> int:
    """How many examples of a property are tried under the profile that is loaded."""
    return max(3, round(all_of_them * settings().max_examples / ALL_EXAMPLES))


def nightly_but(by_day: Callable[[Any], bool], cases: Iterable[Any], *, of_several: bool = False) -> list[Any]:
    """Cases for `pytest.mark.parametrize`; those for which `by_day` is false are nightly.

    Args:
        by_day: of a case.
        cases: each of one argument, or a tuple of them.
        of_several: a case is a tuple of several arguments.
    """

    def nightly(case: Any) -> Any:
        return pytest.param(*(case if of_several else [case]), marks=pytest.mark.nightly)

    return [case if by_day(case) else nightly(case) for case in cases]
