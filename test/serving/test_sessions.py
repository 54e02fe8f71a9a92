# SPDX-License-Identifier: Apache-2.0
"""A session's stamps, how often it may ask, and when one that says no goodbye is closed; on the tests' own clock."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.serving import PICTURE, Thread, actions

from specvla_ros.engine.outcome import Outcome
from specvla_ros.errors import UserError
from specvla_ros.serving import server
from specvla_ros.serving.server import ServeSettings, Session, Sessions


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.time_ns = 0.0, 0
        told = SimpleNamespace(monotonic=lambda: self.now_s, monotonic_ns=lambda: 7, time_ns=lambda: self.time_ns)
        monkeypatch.setattr(server, "time", told)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def opened(thread: Thread, **limits: Any) -> Sessions:
    return Sessions(thread, ServeSettings(**limits), 1e9)  # type: ignore[arg-type]


def ask(session: Session, instruction: str = "go") -> Outcome:
    return asyncio.run(session.act({"image": PICTURE}, instruction, None))


def test_a_later_picture_has_a_later_stamp_whatever_the_clock_says(clock: Clock) -> None:
    thread = Thread()
    session = opened(thread).open("robot", lasting=False)
    for clock.time_ns in (0, 0, 50, 40, 60):
        ask(session)
    assert [(each.stamp_ns, each.received_ns) for each in thread.asked] == [
        (stamp_ns, 7) for stamp_ns in (1, 2, 50, 51, 60)
    ]


def test_another_instruction_begins_another_episode(clock: Clock) -> None:
    thread = Thread()
    session = opened(thread).open("robot", lasting=False)
    for instruction in ("lift", "lift", "push", "lift", "lift"):
        ask(session, instruction)
    assert thread.epochs == [1, 1, 2, 3, 3]


def test_who_asks_too_often_is_told_how_often_is_not(clock: Clock) -> None:
    session = opened(Thread(), max_rate_hz=4.0).open("robot", lasting=False)
    for clock.now_s, refused in ((0.1, False), (0.34, True), (0.36, False), (0.36, True), (0.6, True), (0.62, False)):
        if refused:
            with pytest.raises(UserError, match="this request exceeds the limit of 4 requests per second"):
                ask(session)
        else:
            ask(session)
    unlimited = opened(Thread()).open("robot", lasting=False)
    for _ in range(3):
        ask(unlimited)


def test_who_says_no_goodbye_is_let_go_when_silent_and_not_while_it_waits(clock: Clock) -> None:
    thread = Thread(actions(PICTURE[0]))
    of = opened(thread, idle_s=10.0, sessions=3)
    lasting, idle, waiting = (of.open(name, lasting=name == "socket") for name in ("socket", "idle", "waiting"))
    clock.now_s = 9.0
    assert len(of) == 3
    ask(idle)
    clock.now_s = 18.0
    assert thread.closed == [] and not waiting.busy

    async def meanwhile() -> None:
        async with waiting._lock:
            assert len(of) == 3 and waiting.busy
            clock.now_s = 19.5
            assert len(of) == 2 and thread.closed == ["idle"]
        assert len(of) == 1 and thread.closed == ["idle", "waiting"]

    asyncio.run(meanwhile())
    assert of.open("socket", lasting=True) is lasting and of.open("idle", lasting=False) is not idle
    of.close(lasting)
    of.close(lasting)
    assert thread.closed == ["idle", "waiting", "socket"]


def test_an_answer_is_a_sign_of_life(clock: Clock) -> None:
    """However long it took."""
    thread = Thread()
    of = opened(thread, idle_s=10.0)
    session = of.open("robot", lasting=False)

    def slowly(observation: Any) -> Any:
        clock.now_s = 50.0
        return actions(PICTURE[0])(observation)

    thread.answer = slowly
    of.count(ask(session))
    clock.now_s = 59.0
    assert len(of) == 1 and of.actions == 1 and not of.drops
