# SPDX-License-Identifier: Apache-2.0
"""The web application: the websockets of openpi and vla-eval, OpenVLA's `/act`, `/healthz` and `/metrics`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from specvla_ros.engine.engine import Engine
from specvla_ros.serving import openpi, openvla, vla_eval
from specvla_ros.serving.server import NO_TOKEN, Server, ServeSettings


def make_app(engine: Engine, settings: ServeSettings) -> Starlette:
    """Creates the application for a warmed-up engine, which it drives until shutdown."""
    server = Server(engine, settings)

    async def health(_: Request) -> Response:
        if fault := engine.fault:
            return PlainTextResponse(f"{fault}\n", 503)
        return PlainTextResponse("OK\n")

    async def metrics(request: Request) -> Response:
        if not server.allows(request):
            return server.problem(NO_TOKEN, 401)
        return PlainTextResponse(server.metrics.text(server.sessions))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, server.thread.stop)

    return Starlette(
        routes=[
            Route("/healthz", health),
            Route("/metrics", metrics),
            Route("/act", partial(openvla.act, server), methods=["POST"]),
            WebSocketRoute("/", partial(openpi.talk, server)),
            WebSocketRoute("/vla-eval", partial(vla_eval.talk, server)),
        ],
        lifespan=lifespan,
    )
