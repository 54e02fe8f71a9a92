# SPDX-License-Identifier: Apache-2.0
"""An episode ends by silence, by word and by client: what one robot did does not reach another's actions."""

import asyncio
from types import SimpleNamespace

import pytest
from support.serving import PICTURE, Served, Thread

from specvla_ros.serving import server
from specvla_ros.serving.server import Session


def test_silence_ends_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=lambda: 1, monotonic_ns=int))
    thread = Thread()
    session = Session(thread, "robot", 0.0, 2.0, lasting=True)  # type: ignore[arg-type]
    for gap_s in (0.0, 1.9, 1.9, 2.1, 0.1):
        now_s += gap_s
        asyncio.run(session.act({"image": PICTURE}, "go", None))
    assert thread.epochs == [1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("ensemble", "epochs"), [(8, [2, 3, 1, 1]), (2, [2, 3, 1, 1]), (1, [1, 1, 1, 1]), (0, [1, 1, 1, 1])]
)
def test_answers_are_averaged_only_with_those_of_a_robot_that_says_its_name(ensemble: int, epochs: list[int]) -> None:
    thread = Thread()
    served = Served(thread, ensemble=ensemble)
    assert {served.post(robot)[0] for robot in ("", "", "left", "left")} == {422}
    assert thread.epochs == epochs


def test_a_client_may_say_that_an_episode_begins() -> None:
    thread = Thread()
    served = Served(thread)
    for reset in (None, True, False):
        served.post("left", reset=reset)
    assert thread.epochs == [1, 2, 2]
