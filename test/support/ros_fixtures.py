# SPDX-License-Identifier: Apache-2.0
"""One checkpoint for all node tests, and no DDS participant of an earlier test."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=11)


@pytest.fixture(scope="session")
def imported_objects_frozen() -> None:
    """The libraries' objects need not be looked through after each test."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_participant_left(imported_objects_frozen: None) -> Iterator[None]:
    """Ends the DDS participants of a test with it.

    A context that is shut down keeps its participant until its reference cycles are collected. Fast DDS looks for at
    most 32 participants on one machine: behind so many of earlier tests no other process is ever discovered.
    """
    yield
    gc.collect()
