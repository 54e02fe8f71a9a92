# SPDX-License-Identifier: Apache-2.0
"""Who may ask: the server's token and no other, however it is shown."""

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import pytest

from specvla_ros.serving import app
from specvla_ros.serving.server import Server, ServeSettings

TOKEN = "a7d0-kept-secret"


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"robot:{password}".encode()).decode()


def allowed(token: str, **headers: str) -> bool:
    made = Server.__new__(Server)
    made.settings = ServeSettings(token=token)
    client: Any = SimpleNamespace(headers=headers)
    return made.allows(client)


@pytest.mark.parametrize("shown", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Api-Key {TOKEN}", basic(TOKEN)])
def test_the_token_opens(shown: str) -> None:
    assert allowed(TOKEN, authorization=shown)


@pytest.mark.parametrize("other", [TOKEN[::-1], TOKEN.upper(), TOKEN[:-1], f"{TOKEN}x", "", "é" * len(TOKEN)])
def test_another_token_does_not_whatever_its_length(other: str) -> None:
    for shown in (f"Bearer {other}", f"Api-Key {other}", basic(other)):
        assert not allowed(TOKEN, authorization=shown)


@pytest.mark.parametrize("shown", ["", TOKEN, f" {TOKEN}", f"Digest {TOKEN}", "Basic !", f"Basic {TOKEN}"])
def test_nor_does_the_token_shown_in_another_way(shown: str) -> None:
    assert not allowed(TOKEN, authorization=shown) and not allowed(TOKEN)


@pytest.mark.parametrize(
    ("path", "shown", "status"),
    [
        *((path, shown, 401) for path in ("/metrics", "/act") for shown in ("", f"Bearer {TOKEN[::-1]}")),
        ("/metrics", f"Bearer {TOKEN}", 200),
    ],
)
def test_neither_counts_nor_actions_are_given_without_it(
    monkeypatch: pytest.MonkeyPatch, path: str, shown: str, status: int
) -> None:
    made: Any = Server.__new__(Server)
    made.settings, made.metrics = ServeSettings(token=TOKEN), SimpleNamespace(refused=0, text=lambda _: "counts")
    made.sessions = None
    monkeypatch.setattr(app, "Server", lambda *_: made)
    routes: list[Any] = app.make_app(made, made.settings).routes
    (endpoint,) = (each.endpoint for each in routes if each.path == path)
    answer = asyncio.run(endpoint(SimpleNamespace(headers={"authorization": shown})))
    assert answer.status_code == status and made.metrics.refused == (status == 401)
    assert (b"counts" in answer.body) == (status == 200)


def test_a_server_without_a_token_asks_for_none() -> None:
    assert allowed("") and allowed("", authorization="Bearer any")
