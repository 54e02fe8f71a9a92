# SPDX-License-Identifier: Apache-2.0
"""One checkpoint for all node tests."""

from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=11)
