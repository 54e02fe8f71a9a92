# SPDX-License-Identifier: Apache-2.0
"""The command that answers other people's clients: `serve`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.cli.terminal import progress
from specvla_ros.engine.settings import MAX_STREAMS
from specvla_ros.errors import UserError, missing_package

app = typer.Typer()

TOKEN_VARIABLE = "SPECVLA_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PING_S = 20.0
# A simulator that loads a scene answers no ping meanwhile, which takes a minute. A robot that vanishes keeps its
# session as long; who closes the connection gives it back at once.
_PING_TIMEOUT_S = 180.0
_ENDING_S = 5  # in which what is under way may be answered before the server ends


@app.command()
@takes_policy()
def serve(
    chosen: PolicyOptions,
    port: Annotated[int, typer.Option(help="TCP port.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: at all of the machine's.")] = "127.0.0.1",
    robots: Annotated[
        int, typer.Option(help="Sessions at once; their frames share forwards.", min=1, max=MAX_STREAMS)
    ] = 4,
    budget: Annotated[float, typer.Option(help="Seconds in which a request should be answered.", min=0.0)] = 0.5,
    max_message_mb: Annotated[float, typer.Option(help="Maximum of a request, in MB.", min=0.001)] = 32.0,
    max_rate: Annotated[float, typer.Option(help="Requests per second of a session; 0: no limit.", min=0.0)] = 0.0,
    idle: Annotated[float, typer.Option(help="Seconds until a silent session over HTTP is closed.", min=0.0)] = 60.0,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token that clients must show; or the variable {TOKEN_VARIABLE}.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
) -> None:
    """Serve a policy to openpi's and vla-eval's clients (websockets) and OpenVLA's (POST /act), with /metrics."""
    try:
        import uvicorn

        from specvla_ros.serving.app import make_app
        from specvla_ros.serving.sessions import ServeSettings
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
    from specvla_ros.engine.engine import Engine
    from specvla_ros.models.checkpoint import leave_a_core, load_target

    if (certificate is None) != (key is None):
        raise UserError("TLS needs both: --certificate FILE and --key FILE")
    for path in (certificate, key, token_file):
        if path is not None and not path.is_file():
            raise UserError(f"{path} does not exist")
    token = token_file.read_text(encoding="utf-8").strip() if token_file else os.environ.get(TOKEN_VARIABLE, "")
    if token_file is not None and not token:
        raise UserError(f"{token_file} is empty: write a token into it, such as that of `openssl rand -hex 32`")
    leave_a_core()
    with progress("loading the policy") as advance:
        target = load_target(
            chosen.checkpoint,
            **vars(chosen.model),
            progress=lambda what, fraction: advance(round(100 * fraction), 100, what),
        )
    engine = Engine(target, replace(chosen.engine, streams=robots))
    engine.warm_up()
    settings = ServeSettings(
        sessions=robots,
        token=token,
        budget_s=budget,
        max_message_bytes=round(max_message_mb * 1e6),
        max_rate_hz=max_rate,
        idle_s=idle,
    )
    if not token and host not in _LOOPBACK:
        typer.echo(f"anybody who reaches {host} may use the policy: set {TOKEN_VARIABLE} or --token-file", err=True)
    letter = "s" if certificate is not None else ""
    typer.echo(
        f"serving {chosen.checkpoint.name} to {robots} robots at once: ws{letter}://{host}:{port} (openpi), "
        f"ws{letter}://{host}:{port}/vla-eval (vla-eval), http{letter}://{host}:{port}/act (OpenVLA)"
    )
    uvicorn.run(
        make_app(engine, settings),
        host=host,
        port=port,
        log_level="warning",
        ws_max_size=settings.max_message_bytes,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=_PING_TIMEOUT_S,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=_ENDING_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
