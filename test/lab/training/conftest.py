# SPDX-License-Identifier: Apache-2.0
"""Each training begins as in its own process: accelerate keeps one state for all, mixed precision included."""

import pytest


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
