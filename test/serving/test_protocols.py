# SPDX-License-Identifier: Apache-2.0
"""What each protocol answers, refuses and counts, message by message, without a network."""

import asyncio
import inspect
import json
import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.serving import ASKED, PICTURE, Served, Socket, Thread, actions

from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.lab.cli.app import serve
from specvla_ros.models.observation import Observation
from specvla_ros.serving import openpi, server
from specvla_ros.serving.server import ServeSettings
from specvla_ros.serving.wire import dump, pack, unpack

CHUNK = np.arange(6.0).reshape(3, 2)
TOKEN = "secret"
BODY = json.dumps({"image": dump(PICTURE), "instruction": "go"}).encode()


def counts(served: Served) -> dict[str, int]:
    """What is not zero of the counts of requests."""
    lines = served.server.metrics.text(served.server.sessions).splitlines()
    found = dict(line.removeprefix("specvla_").split() for line in lines if line[0] != "#")
    return {name: int(number) for name, number in found.items() if "_seconds_" not in name and number != "0"}


def test_openpi_is_greeted_and_gets_actions_with_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = iter((10.0, 10.25))
    monkeypatch.setattr(openpi, "time", SimpleNamespace(perf_counter=lambda: next(clock_s)))
    timed = {**vars(time), "perf_counter": iter((5.0, 5.3)).__next__}
    monkeypatch.setattr(server, "time", SimpleNamespace(**timed))
    served = Served(Thread(actions(CHUNK, forwards=4)), horizon=3, dt_s=0.2)

    async def client() -> None:
        async with Socket(served) as socket:
            assert unpack((await socket.hear())["bytes"]) == {
                "cameras": ["image"],
                "state_dims": 0,
                "state_names": [],
                "action_names": ["x", "gripper"],
                "action_horizon": 3,
                "action_dt_s": 0.2,
                "policy": {"mode": "spec"},
            }
            answer = unpack(await socket.ask(pack(ASKED)))
            assert answer["actions"].tolist() == CHUNK.tolist()
            assert answer["server_timing"] == {"infer_ms": 250.0} and answer["policy_timing"] == {"forwards": 4}

    asyncio.run(client())
    text = served.get("/metrics")[1]
    assert 'bucket{le="0.2"} 0' in text and 'bucket{le="0.4"} 1' in text and "seconds_sum 0.300000" in text
    assert "specvla_actions_total 1" in text


def test_openpi_gets_first_actions_if_it_asks_for_them() -> None:
    thread = Thread(actions(CHUNK, forwards=4))
    seen = Observation(PICTURE, "go", 1)
    for rows in (1, 2):
        begun = actions(CHUNK[:rows])(seen)
        assert isinstance(begun, Action)
        thread.first.append(replace(begun, partial=True))
    served = Served(thread, horizon=3)

    async def client() -> None:
        async with Socket(served) as socket:
            await socket.hear()
            answers = [unpack(await socket.ask(pack({**ASKED, "stream": True})))]
            while answers[-1]["partial"]:
                answers.append(unpack((await socket.hear())["bytes"]))
            assert [each["actions"].tolist() for each in answers] == [CHUNK[:n].tolist() for n in (1, 2, 3)]
            for asked in (ASKED, {**ASKED, "stream": False}, {**ASKED, "stream": "yes"}):
                answer = unpack(await socket.ask(pack(asked)))
                assert answer["actions"].tolist() == CHUNK.tolist() and "partial" not in answer
            thread.answer = lambda observation: Drop(observation, DropReason.NOT_AN_ACTION)
            thread.first = []
            assert await socket.ask(pack({**ASKED, "stream": True})) == "not_an_action"

    asyncio.run(client())


def test_openpi_is_told_why_there_is_no_action_and_goes_on() -> None:
    thread = Thread(lambda observation: Drop(observation, DropReason.NOT_FINITE, "of joint 3"))
    served = Served(thread)

    async def client() -> None:
        async with Socket(served) as socket:
            await socket.hear()
            assert (await socket.ask(b"\xc1")).startswith("the message is not valid msgpack")
            assert await socket.ask(pack(ASKED)) == "not_finite: of joint 3"
            thread.answer = lambda observation: Drop(observation, DropReason.STALE)
            assert await socket.ask(pack(ASKED)) == "stale"
            assert counts(served) == {
                "sessions": 1,
                "requests_refused_total": 1,
                'drops_total{reason="not_finite"}': 1,
                'drops_total{reason="stale"}': 1,
            }

    asyncio.run(client())


@pytest.mark.parametrize(
    ("token", "message", "code", "why"),
    [
        ("wrong", None, 4401, "the token is missing or wrong"),
        (TOKEN, None, 1013, "all 1 sessions are in use (--robots): try again later"),
        (TOKEN, "{}", 1003, "expected MessagePack in a binary frame, got a text frame"),
    ],
)
def test_a_socket_is_closed_with_the_reason(token: str, message: str | None, code: int, why: str) -> None:
    served = Served(Thread(), token=TOKEN, sessions=1)
    if code == 1013:
        served.server.sessions.open("another", lasting=True)

    async def client() -> None:
        async with Socket(served, token=token) as socket:
            if message is not None:
                await socket.hear()
                socket.say(message)
            closed = await socket.hear()
            assert (closed["type"], closed["code"], closed["reason"]) == ("websocket.close", code, why)

    asyncio.run(client())
    assert counts(served)["requests_refused_total"] == 1
    assert len(served.server.sessions) == (code == 1013)


def test_each_socket_is_a_session_that_ends_with_it() -> None:
    thread = Thread(actions(CHUNK))
    served = Served(thread, budget_s=0.25, idle_s=-1.0)  # all of those over HTTP would be idle

    async def client() -> None:
        async with Socket(served) as first, Socket(served) as second:
            for socket in (first, second):
                await socket.hear()
                for reset in (False, True):
                    await socket.ask(pack({**ASKED, "reset": reset}))
            assert len(served.server.sessions) == 2

    asyncio.run(client())
    assert [(each.stream, each.epoch) for each in thread.asked] == [
        ("socket 1", 1),
        ("socket 1", 2),
        ("socket 2", 1),
        ("socket 2", 2),
    ]
    assert sorted(thread.closed) == ["socket 1", "socket 2"] and counts(served) == {"actions_total": 4}
    assert [each.kwargs for each in thread.engine.open.call_args_list] == 2 * [{"budget_s": 0.25}]


@pytest.mark.parametrize("ended_here", [False, True])
@pytest.mark.parametrize("path", ["/", "/vla-eval"])
def test_who_leaves_before_the_answer_is_counted_and_then_let_go(path: str, ended_here: bool) -> None:
    thread = Thread(None)
    served = Served(thread)
    message = ASKED if path == "/" else vla_eval("observation", {"images": PICTURE, "task_description": "go"})
    closed: list[tuple[str, int]] = []

    async def client() -> None:
        socket = await Socket(served, path).__aenter__()
        socket.say(pack(message))
        while not thread.asked:
            await asyncio.sleep(0.001)
        await (socket.end() if ended_here else socket.leave())
        assert asyncio.all_tasks() == {asyncio.current_task()}, "something is still waited for"

    with mock.patch.object(thread, "close", lambda name: closed.append((name, served.server.metrics.abandoned))):
        asyncio.run(client())
    assert closed == [("socket 1", 1)] and counts(served) == {"requests_abandoned_total": 1}


def test_what_is_of_no_use_is_warned_of_once_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(Thread())

    async def client() -> None:
        async with Socket(served) as socket:
            await socket.hear()
            for number in [0, 0, *range(40)]:
                await socket.ask(pack({**ASKED, f"extra {number}": 1}))
            await socket.ask(pack(ASKED))

    with caplog.at_level(logging.WARNING):
        asyncio.run(client())
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"a client sends extra {number}, which the policy does not use" for number in range(32)]


@pytest.mark.parametrize(
    ("horizon", "dt_s", "step_s", "silence_s"),
    [
        (1, None, 0.0, 2.0),
        (10, None, 0.0, 2.0),
        (1, 0.2, 0.0, 2.0),
        (10, 0.2, 0.0, 4.0),
        (10, 0.2, 0.5, 10.0),
        (10, None, 0.5, 10.0),
    ],
)
def test_an_episode_ends_by_two_seconds_of_silence_or_two_chunks(
    horizon: int, dt_s: float | None, step_s: float, silence_s: float
) -> None:
    made = Served(Thread(), horizon=horizon, dt_s=dt_s, step_s=step_s).server
    assert made.sessions.open("robot", lasting=False)._silence_s == silence_s


def vla_eval(kind: str, payload: Any, number: Any = 7) -> dict[str, Any]:
    return {"type": kind, "payload": payload, "seq": number, "timestamp": 0.0}


def test_vla_eval_is_answered_under_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = Thread(actions(CHUNK))
    served = Served(thread, horizon=3)
    seen = {"images": PICTURE, "task_description": "go"}

    async def client() -> None:
        async with Socket(served, "/vla-eval") as socket:

            async def ask(*message: Any) -> tuple[str, Any, int]:
                answer = unpack(await socket.ask(pack(vla_eval(*message))))
                assert answer["timestamp"] > 1e9
                return answer["type"], answer["payload"], answer["seq"]

            kind, payload, number = await ask("hello", {"protocol_version": 1}, 5)
            assert (kind, payload["model_server"], number) == ("hello", "specvla", 5)
            for number in (8, 9):
                socket.say(pack(vla_eval("episode_start" if number == 8 else "episode_end", {}, 0)))
                kind, payload, found = await ask("observation", seen, number)
                assert (kind, found) == ("action", number) and payload["actions"].tolist() == [0.0, 1.0]
            thread.answer = lambda observation: Drop(observation, DropReason.STALE)
            assert await ask("observation", seen, 3) == ("error", {"error": "stale"}, 3)
            for message, number, why in (
                (
                    ("hello", {"protocol_version": 2}, 6),
                    0,
                    "vla-eval protocol version 2 is not supported, only version 1",
                ),
                (("action", {}), 0, "'type' must be one of hello, observation, error, episode_start, episode_end"),
                (("observation", []), 0, "an object as 'payload'"),
                (("observation", {}, True), 0, "a whole number as 'seq'"),
                (("observation", {}, 4), 4, "give the task as 'prompt' or 'instruction'"),
            ):
                kind, payload, found = await ask(*message)
                assert (kind, found) == ("error", number) and why in payload["error"]
            socket.say(pack(vla_eval("error", {"message": "of the client"})))  # nothing is to be answered
            assert (await ask("hello", {"protocol_version": 1}))[0] == "hello"

    asyncio.run(client())
    assert thread.epochs == [2, 3, 3] and counts(served)["requests_refused_total"] == 5


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_an_action_over_http_and_where_a_policy_gives_several_all_of_them(horizon: int) -> None:
    served = Served(Thread(actions(CHUNK[:horizon])), horizon=horizon)
    written = dump(CHUNK[0] if horizon == 1 else CHUNK[:horizon])
    assert served.post() == (200, written)
    assert served.post(encoded=BODY.decode()) == (200, json.dumps(written))
    assert served.post_body(BODY[:9], BODY[9:40], BODY[40:]) == (200, written)
    assert counts(served)["actions_total"] == 3


def test_what_is_not_answered_over_http_has_its_status() -> None:
    thread = Thread()
    served = Served(thread, token=TOKEN, sessions=1, max_message_bytes=300, message_s=0.01)
    refused = (
        (served.post(token="wrong"), 401, "the token is missing or wrong"),
        (served.post_body(b"{", token=TOKEN), 400, "the message is not valid JSON"),
        (served.post_body(200 * b" ", 101 * b" ", token=TOKEN), 400, "the message exceeds 300 bytes"),
        (served.post_body(200 * b" ", 100 * b" ", token=TOKEN), 400, "the message is not valid JSON"),
        (served.post_body(b"{", whole=False, token=TOKEN), 408, "the message did not arrive within 0.01 s"),
    )
    for (status, answer), expected, why in refused:
        assert status == expected and why in answer["error"]
    assert counts(served) == {"requests_refused_total": 5}
    assert served.post("left", token=TOKEN) == (422, {"error": "not_an_action"})
    assert served.post("right", token=TOKEN)[0] == 503
    assert counts(served)["requests_refused_total"] == 6, "no action is no refusal"
    assert thread.asked[0].stream == "http left"


def test_what_no_reader_expects_is_refused_over_http() -> None:
    served = Served(Thread())
    picture = dump(CHUNK)
    for body, why in (
        ({"encoded": "\ud800"}, "the message is not valid JSON"),
        ({"instruction": "go", "\ud800": 1}, "the message has ?"),
        ({"instruction": "go", "image": picture | {"dtype": ","}}, "an array has dtype ','"),
        ({"instruction": "go", "image": picture, "unnorm_key": picture}, "'unnorm_key' must be text"),
    ):
        status, answer = served.post_body(json.dumps(body).encode())
        assert status == 400 and why in answer["error"]
    assert counts(served) == {"sessions": 1, "requests_refused_total": 4}


@pytest.mark.parametrize("whole", [False, True])
def test_who_leaves_over_http_is_not_waited_for(whole: bool) -> None:
    """In the middle of the body, or of the answer."""
    served = Served(Thread(None))
    assert served.post_body(BODY, whole=whole, then="http.disconnect") == (499, "")
    assert counts(served) == ({"sessions": 1, "requests_abandoned_total": 1} if whole else {})


def test_a_robot_that_was_silent_for_long_keeps_its_session_while_its_request_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = Thread()
    served = Served(thread, idle_s=0.0)
    sessions, read = served.server.sessions, server.read_observation

    def read_slowly(*given: Any) -> Any:
        assert len(sessions) == 1 and not thread.closed, "another request looks for idle sessions meanwhile"
        return read(*given)

    monkeypatch.setattr(server, "read_observation", read_slowly)
    assert served.post("left") == (422, {"error": "not_an_action"})
    assert len(sessions) == 0 and thread.closed == ["http left"]


def test_a_robot_over_http_is_its_name_or_its_address() -> None:
    thread = Thread()
    served = Served(thread, idle_s=60.0)
    for robot in ("left", "", "left"):
        served.post(robot)
    assert [each.stream for each in thread.asked] == ["http left", "http 10.0.0.7", "http left"]
    assert len(served.server.sessions) == 2


def test_health_needs_no_token_and_counts_do() -> None:
    served = Served(Thread(), token=TOKEN)
    assert served.get("/healthz") == (200, "OK\n")
    assert served.get("/metrics")[0] == 401 and served.get("/metrics", TOKEN)[0] == 200


def test_a_server_whose_device_has_failed_is_not_healthy() -> None:
    served = Served(Thread())
    served.server.engine.fault = "cuda:0 has failed: restart this process"  # type: ignore[misc]
    assert served.get("/healthz") == (503, "cuda:0 has failed: restart this process\n")


def test_the_engine_stops_with_the_application() -> None:
    thread = Thread()

    async def live() -> None:
        async with Served(thread).app.router.lifespan_context(None):
            assert not thread.stopped

    asyncio.run(live())
    assert thread.stopped


def test_the_limits_are_those_that_the_command_states() -> None:
    options = {name: each.default for name, each in inspect.signature(serve).parameters.items()}
    stated, limits = options | {"token": ""}, ServeSettings()
    assert limits == ServeSettings(
        sessions=stated["robots"],
        budget_s=stated["budget"],
        max_message_bytes=round(1e6 * stated["max_message_mb"]),
        max_rate_hz=stated["max_rate"],
        idle_s=stated["idle"],
        message_s=10.0,  # docs/how-to/serve.md
    )
