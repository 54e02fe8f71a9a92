# SPDX-License-Identifier: Apache-2.0
"""The text policy: what it is taught to write, and that training leaves a checkpoint that writes before it acts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import load_openvla
from support.gl import needs_gl

from benchmarks.speculation.text_policy import LONGEST_TEXT, main, reasoning
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.simulation.tasks import TASKS, WorldState
from specvla_ros.models.observation import Observation

TASK = {task.name: task for task in TASKS}


def state(hand: tuple[float, float, float]) -> WorldState:
    """A red cube in cell (2, 5), a green one in cell (0, 0), and an open hand."""
    positions = {
        name: np.array(at)
        for name, at in (("red_cube", (0.38, 0.0, 0.02)), ("green_cube", (0.3, -0.2, 0.02)), ("block", (0.5, 0.2, 0.0)))
    }
    return WorldState(np.array(hand), np.eye(3), 0.08, positions, dict.fromkeys(positions, 0.0))


@pytest.mark.parametrize(
    ("task", "hand", "now"),
    [
        ("lift_red", (0.5, 0.1, 0.3), "reach the red cube"),
        ("lift_red", (0.38, 0.0, 0.04), "close the hand"),
        ("put_red", (0.5, 0.1, 0.3), "reach the red cube"),
        ("push_green", (0.5, 0.1, 0.3), "get behind the green cube"),
        ("push_green", (0.3, -0.2, 0.04), "push the green cube into the white zone"),
    ],
)
def test_the_text_says_the_plan_the_cell_and_the_next_step(
    task: str, hand: tuple[float, float, float], now: str
) -> None:
    words = reasoning(TASK[task], state(hand))
    cell = "row 0 , column 0" if "green" in task else "row 2 , column 5"
    assert words.startswith("plan : ")
    assert f"is at {cell} ." in words
    assert words.endswith(f"now {now} :")
    assert "{" not in words


@needs_gl
def test_training_writes_a_checkpoint_with_a_word_for_every_text(tmp_path: Path) -> None:
    main(tmp_path / "text", episodes=1, steps=1, batch=2)
    card = json.loads((tmp_path / "text" / "card.json").read_text(encoding="utf-8"))
    assert 7 < card["longest_answer"] <= LONGEST_TEXT + 7
    assert 0 <= card["held_out_token_accuracy"] <= 1
    policy = load_openvla(tmp_path / "text", device="cpu")
    assert policy.tokenizer is not None
    for word in ("plan", "reach", "column", "9"):
        assert policy.tokenizer.token_to_id(word) is not None
    engine = Engine(policy, EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT))
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    outcome = engine.act(Observation(image, TASKS[0].instruction, stamp_ns=1))
    assert isinstance(outcome, Action) or outcome.reason is DropReason.NOT_AN_ACTION
    assert torch.isfinite(policy.decoder.lm_head.weight).all()
