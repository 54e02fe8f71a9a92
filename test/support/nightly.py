# SPDX-License-Identifier: Apache-2.0
"""Marks the cases of a parametrised test that run only in `make test-all`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def nightly_but(by_day: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`; those for which `by_day` is false are nightly."""
    return [case if by_day(case) else pytest.param(case, marks=pytest.mark.nightly) for case in cases]
