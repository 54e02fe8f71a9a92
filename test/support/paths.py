# SPDX-License-Identifier: Apache-2.0
"""Reference data beside the repository; tests that need it are skipped where it is absent."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"
ORACLES = SHARED / "oracles"
BAGS = SHARED / "bags"


def needs(path: Path) -> pytest.MarkDecorator:
    """Skips a test where the reference data is not there, and says so."""
    return pytest.mark.skipif(not path.exists(), reason=f"reference data {path} is not here")
