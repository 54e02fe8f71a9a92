# SPDX-License-Identifier: Apache-2.0
"""An episode ends by silence, by word and by client: what one robot did does not reach another's actions."""

import asyncio
import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from specvla_ros.engine.outcome import Drop, DropReason
from specvla_ros.models.observation import Observation
from specvla_ros.serving import openvla, sessions
from specvla_ros.serving.server import Server
from specvla_ros.serving.sessions import ServeSettings, Session, Sessions
from specvla_ros.serving.wire import dump

PICTURE = np.zeros((4, 4, 3), np.uint8)


class Thread:
    """The engine's, which answers nothing."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def prepared(self, observation: Observation) -> None:
        self.epochs.append(observation.epoch)

    def decode(self, observation: Observation, pictures: None) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(SimpleNamespace(outcome=Drop(observation, DropReason.NOT_AN_ACTION)))
        return done

    def call(self, _: Any) -> None:
        pass


def test_silence_ends_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=lambda: 1, monotonic_ns=int))
    thread = Thread()
    session = Session(thread, "robot", 0.0, 2.0, lasting=True)  # type: ignore[arg-type]
    for gap_s in (0.0, 1.9, 1.9, 2.1, 0.1):
        now_s += gap_s
        asyncio.run(session.act({"image": PICTURE}, "go", None))
    assert thread.epochs == [1, 1, 1, 2, 2]


def server(thread: Thread, ensemble: int) -> Any:
    made = Server.__new__(Server)
    made.settings, made._ignored = ServeSettings(), set()
    made.sessions = Sessions(thread, made.settings, 2.0)  # type: ignore[arg-type]
    made.metrics, made.thread = SimpleNamespace(refused=0), thread  # type: ignore[assignment]
    made.engine = SimpleNamespace(settings=SimpleNamespace(ensemble=ensemble))  # type: ignore[assignment]
    made.policy = SimpleNamespace(cameras=("image",), state_dims=0, unnorm_key="")  # type: ignore[assignment]
    return made


def post(made: Any, robot: str = "", **fields: Any) -> int:
    body = json.dumps({"image": dump(PICTURE), "instruction": "go", **fields}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.sleep(60)

    headers = [(b"x-robot", robot.encode())] if robot else []
    scope = {"type": "http", "method": "POST", "path": "/act", "headers": headers, "client": ("127.0.0.1", 1)}
    return asyncio.run(openvla.act(made, Request(scope, receive))).status_code


@pytest.mark.parametrize(("ensemble", "epochs"), [(8, [2, 3, 1, 1]), (0, [1, 1, 1, 1])])
def test_answers_are_averaged_only_with_those_of_a_robot_that_says_its_name(ensemble: int, epochs: list[int]) -> None:
    thread = Thread()
    made = server(thread, ensemble)
    assert {post(made, robot) for robot in ("", "", "left", "left")} == {422}
    assert thread.epochs == epochs


def test_a_client_may_say_that_an_episode_begins() -> None:
    thread = Thread()
    made = server(thread, 0)
    for fields in ({}, {"reset": True}, {"reset": False}):
        post(made, "left", **fields)
    assert thread.epochs == [1, 2, 2]
