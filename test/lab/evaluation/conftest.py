# SPDX-License-Identifier: Apache-2.0
"""A policy, and a way to replay bags through it."""

from pathlib import Path
from typing import Any

import pytest
from support import bags
from support.checkpoints import load_openvla, write_checkpoint
from support.replays import Run, read_frames, warm_engine

from specvla_ros.lab.evaluation.replay import replay
from specvla_ros.lab.evaluation.replay_summary import ReplaySummary
from specvla_ros.models.families.openvla.target import OpenVLATarget


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, seed=5)
    return load_openvla(directory, device="cpu")


@pytest.fixture
def run(policy: OpenVLATarget, tmp_path: Path) -> Run:
    """Replays a bag, or entries of one, and gives summary, frames and output directory."""
    count = 0

    def play(source: Path | list[bags.Entry], **options: Any) -> tuple[ReplaySummary, list[dict[str, Any]], Path]:
        nonlocal count
        count += 1
        path = source if isinstance(source, Path) else bags.write_bag(tmp_path / f"bag_{count}", source)
        out = tmp_path / f"out_{count}"
        summary = replay(warm_engine(policy), path, out, progress=False, **options)
        return summary, read_frames(out), out

    return play
