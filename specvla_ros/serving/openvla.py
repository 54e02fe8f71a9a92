# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's protocol (vla-scripts/deploy.py): the client posts an image and an instruction and gets the action."""

import asyncio
import json

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.serving.server import NO_TOKEN, NoRoomError, Server, cancel, unless_gone, why
from specvla_ros.serving.wire import dump, parse

_CLIENT_LEFT = 499  # nginx's code; the client no longer reads it


async def act(server: Server, request: Request) -> Response:
    """Answers one request; all requests of a robot belong to one session."""
    if not server.allows(request):
        return server.problem(NO_TOKEN, 401)
    client = request.headers.get("x-robot") or (request.client.host if request.client else "")
    limit_s = server.settings.message_s
    try:
        message = await asyncio.wait_for(_body(request, server.settings.max_message_bytes), limit_s)
        twice = "encoded" in (given := parse(message))  # OpenVLA's clients may encode the object twice
        # As json reads bytes; strict encoding would raise for invalid Unicode.
        given = parse(str(given["encoded"]).encode(errors="surrogatepass")) if twice else given
        session = server.sessions.open(f"http {client}", lasting=False)
        if "x-robot" not in request.headers and server.engine.settings.ensemble > 1:
            session.begin_episode()  # one machine may serve several robots, whose actions must not be averaged
        with session.claimed():
            left = asyncio.ensure_future(_left(request))
            try:
                outcome = await unless_gone(server.decode(session, given), left)
            finally:
                await cancel(left)
    except ClientDisconnect:
        return Response(status_code=_CLIENT_LEFT)
    except asyncio.TimeoutError:
        return server.problem(f"the message did not arrive within {limit_s:g} s", 408)
    except NoRoomError as error:
        return server.problem(str(error), 503)
    except UserError as error:
        return server.problem(str(error), 400)
    if not isinstance(outcome, Action):
        return server.problem(why(outcome), 422)
    written = dump(outcome.actions if server.policy.codec.horizon > 1 else outcome.actions[0])
    return JSONResponse(json.dumps(written) if twice else written)


async def _body(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise UserError(
                f"the message exceeds {limit} bytes: send smaller images (the policy scales them down anyway), or "
                "start the server with a larger --max-message-mb"
            )
        parts.append(part)
    return b"".join(parts)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
