# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's protocol (vla-scripts/deploy.py): an image and an instruction are posted and answered with the action."""

import asyncio
import json

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.serving.server import NO_TOKEN, NoRoomError, Server, cancel, unless_gone, why
from specvla_ros.serving.wire import dump, parse

_CLIENT_LEFT = 499  # nobody reads it; what nginx notes


async def act(server: Server, request: Request) -> Response:
    """Answers one request; a robot's later ones belong to the same session."""
    if not server.allows(request):
        return server.problem(NO_TOKEN, 401)
    client = request.headers.get("x-robot") or (request.client.host if request.client else "")
    limit_s = server.settings.message_s
    try:
        message = await asyncio.wait_for(_body(request, server.settings.max_message_bytes), limit_s)
        twice = "encoded" in (given := parse(message))  # its clients may encode the object once more
        given = parse(str(given["encoded"]).encode()) if twice else given
        session = server.sessions.open(f"http {client}", lasting=False)
        if "x-robot" not in request.headers and server.engine.settings.ensemble > 1:
            session.begin_episode()  # two clients of one machine may be two robots, whose answers are not averaged
        left = asyncio.ensure_future(_left(request))
        try:
            outcome = await unless_gone(server.decode(session, given), left)
        finally:
            await cancel(left)
    except ClientDisconnect:
        return Response(status_code=_CLIENT_LEFT)
    except asyncio.TimeoutError:
        return server.problem(f"the message was not there after {limit_s:g} s", 408)
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
                f"a message may have {limit} bytes: send smaller pictures, the policy makes them small anyway, or "
                "start the server with a larger --max-message-mb"
            )
        parts.append(part)
    return b"".join(parts)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
