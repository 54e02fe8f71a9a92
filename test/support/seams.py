# SPDX-License-Identifier: Apache-2.0
"""Another package, installed for the length of a test: its rule and its drafter are files of `other_package`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specvla_ros.speculation.drafters.registry import DRAFTERS
from specvla_ros.speculation.rules.registry import RULES

_PACKAGE = Path(__file__).parent / "other_package"


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (RULES, DRAFTERS):
        monkeypatch.setattr(registry, "_entries", dict(registry.entries()))
        monkeypatch.setattr(registry, "_complete", False)
    monkeypatch.syspath_prepend(_PACKAGE)
    yield
    for file in _PACKAGE.glob("*.py"):
        sys.modules.pop(file.stem, None)
