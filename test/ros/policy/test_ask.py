# SPDX-License-Identifier: Apache-2.0
"""Questions over real DDS: `ros2 action send_goal /policy/ask` while the policy acts."""

from pathlib import Path
from typing import Any

import pytest
from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient
from support.checkpoints import edit_json, write_checkpoint
from support.ros import Robot, rgb_image, robot

from specvla_ros.action import Ask
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Question
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.messages.image_message import rgb_from_image
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.observation import Observation
from specvla_ros.models.tokenizer import text_of
from specvla_ros.ros.policy import ask_server

INSTRUCTION = "put carrot on plate"
QUESTION = "is the carrot lifted?"
ASKED: dict[str, Any] = {"decode.ask_tokens": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("asked"), seed=11)
    edit_json(directory / "config.json", lambda raw: raw.update(eos_token_id=2))
    return directory


class Asker:
    """A client of the action."""

    def __init__(self, r: Robot) -> None:
        self.r = r
        self.client: Any = ActionClient(r.user, Ask, "/policy/ask")
        self.feedback: list[str] = []
        r.until(self.client.server_is_ready)

    def ask(self, question: str = QUESTION) -> Any:
        """A goal's handle, once it is accepted."""
        heard = lambda message: self.feedback.append(message.feedback.answer)  # noqa: E731
        sent = self.client.send_goal_async(Ask.Goal(question=question), feedback_callback=heard)
        self.r.until(sent.done)
        return sent.result()

    def end(self, goal: Any) -> tuple[int, Ask.Result]:
        """Its status and result."""
        result = goal.get_result_async()
        self.r.until(result.done)
        return result.result().status, result.result().result


def test_a_question_is_answered_about_the_picture_that_is_acted_on(checkpoint: Path) -> None:
    target = load_target(checkpoint, device="cpu")
    with robot(checkpoint, instruction=INSTRUCTION, **ASKED) as r:
        r.start()
        before = r.act(rgb_image(r.now_ns(), seed=3))
        asker = Asker(r)
        goal = asker.ask()
        r.spin(0.2)
        image = rgb_image(r.now_ns(), seed=3)
        action = r.act(image)
        status, result = asker.end(goal)
    assert status == GoalStatus.STATUS_SUCCEEDED and not result.message
    assert result.header == image.header and action.header.stamp == image.header.stamp
    assert list(action.tokens) == list(before.tokens) and action.seq == before.seq + 1
    engine, question = Engine(target, EngineSettings(ask_tokens=16)), Question(QUESTION)
    engine.ask(question)
    engine.act(Observation(rgb_from_image(image), INSTRUCTION, stamp_ns=1))
    while engine.busy:
        engine.tick()
    assert result.answer == text_of(target.tokenizer, question.tokens)
    assert result.tokens == len(question.tokens) > 0 and result.forwards >= result.tokens
    assert asker.feedback == sorted(asker.feedback, key=len)


def test_what_is_not_answered_is_aborted_with_the_reason(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_server, "_PICTURE_S", 0.5)
    with robot(checkpoint, instruction=INSTRUCTION, **ASKED) as r:
        asker = Asker(r)
        assert asker.end(asker.ask())[1].message == "the policy is not active"
        r.start()
        cases = [("   ", "the question is empty"), ("</s>", "special"), (QUESTION, "no picture to answer about")]
        for text, why in cases:
            status, result = asker.end(asker.ask(text))
            assert status == GoalStatus.STATUS_ABORTED and why in result.message
            assert not result.answer and not result.header.frame_id
        first, second = asker.ask(), asker.ask()
        assert "another question" in asker.end(second)[1].message
        cancelled = first.cancel_goal_async()
        r.until(cancelled.done)
        status, result = asker.end(first)
        assert status == GoalStatus.STATUS_CANCELED and result.message == "canceled"
        goal = asker.ask()
        r.policy.trigger_deactivate()
        assert asker.end(goal)[1].message == "the policy was deactivated"
        r.activate()
        r.act(rgb_image(r.now_ns()))


def test_a_policy_that_is_not_set_to_be_asked_says_how(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        asker = Asker(r)
        status, result = asker.end(asker.ask())
        assert status == GoalStatus.STATUS_ABORTED and "set decode.ask_tokens" in result.message
