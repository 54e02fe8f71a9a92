# SPDX-License-Identifier: Apache-2.0
"""The command line `specvla`. Its commands import their libraries when they run, and name the extra to install."""

import json
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from specvla_ros import __version__
from specvla_ros.engine.settings import MAX_STREAMS
from specvla_ros.errors import UserError
from specvla_ros.lab.cli import experiments, plan, recordings, robot, training
from specvla_ros.lab.cli.parameter_options import PolicyOptions, takes_policy
from specvla_ros.lab.terminal import one_line_endings, progress
from specvla_ros.settings.json_file import shown

if TYPE_CHECKING:
    from specvla_ros.engine.outcome import Outcome
    from specvla_ros.models.target import Target

_Number = TypeVar("_Number", int, float)

TOKEN_VARIABLE = "SPECVLA_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# A simulator does not answer pings while it loads a scene, which takes a minute. A vanished robot keeps its session for
# as long; one that closes its connection frees it at once.
_PING_TIMEOUT_S = 180.0

_SUMMARY = "Real-time vision-language-action policies on ROS 2."
# `\b` keeps the lines as they are.
_FIRST_STEPS = """\b
Start here:
  specvla doctor                   what is installed, and what to install
  specvla demo                     watch a policy drive a simulated arm
  specvla plan --device orin       what a policy could reach on a device
  specvla replay BAG --policy DIR  judge a policy on a recording
  specvla robot check FILE         check a robot's parameters before it moves
"""
_RUN = "Run a policy"
_PANELS = {  # of the help, by module of commands
    experiments: "Simulation",
    recordings: "Recordings",
    robot: "Your robot",
    plan: "Devices",
    training: "Training",
}


class _Commands(TyperGroup):
    """The commands; a wrong option is refused without the words of the library that found it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    cls=_Commands,
    help=f"{_SUMMARY}\n\n{_FIRST_STEPS}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module, _panel in _PANELS.items():
    for _command in (*_module.app.registered_commands, *_module.app.registered_groups):
        _command.rich_help_panel = _panel
    app.add_typer(_module.app)


def main() -> None:
    """Runs the command; every error becomes a single message and an exit code, without a traceback."""
    with one_line_endings():
        app()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"specvla {__version__}")
        raise typer.Exit


@app.callback()
def _specvla(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=_RUN)
@takes_policy()
def serve(
    chosen: PolicyOptions,
    port: Annotated[int, typer.Option(help="TCP port.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    robots: Annotated[
        int, typer.Option(help="Maximum number of sessions; their frames share forwards.", min=1, max=MAX_STREAMS)
    ] = 4,
    budget: Annotated[float, typer.Option(help="Deadline for answering a request, in seconds.", min=0.0)] = 0.5,
    max_message_mb: Annotated[float, typer.Option(help="Maximum size of a request, in MB.", min=0.001)] = 32.0,
    max_rate: Annotated[
        float, typer.Option(help="Maximum requests per second of a session; 0: no limit.", min=0.0)
    ] = 0.0,
    idle: Annotated[
        float, typer.Option(help="Seconds without a request after which an HTTP session is closed.", min=0.0)
    ] = 60.0,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token required of clients; or set {TOKEN_VARIABLE}.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
) -> None:
    """Serve a policy to clients of openpi and vla-eval (websockets) and OpenVLA (POST /act), with /metrics."""
    import uvicorn

    from specvla_ros.engine.engine import Engine
    from specvla_ros.serving.app import make_app
    from specvla_ros.serving.server import ServeSettings

    if (certificate is None) != (key is None):
        raise UserError("TLS needs both: --certificate FILE and --key FILE")
    for option, path in (("--certificate", certificate), ("--key", key), ("--token-file", token_file)):
        if path is not None and not path.is_file():
            raise UserError(f"{option} {path} does not exist")
    token = token_file.read_text(encoding="utf-8").strip() if token_file else os.environ.get(TOKEN_VARIABLE, "")
    if token_file is not None and not token:
        raise UserError(f"{token_file} is empty: write a token into it, for example from `openssl rand -hex 32`")
    _check_certificate(certificate, key)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    with progress("loading the policy") as advance:

        def shown(what: str, fraction: float) -> None:
            advance(round(100 * fraction), 100, what)

        target = chosen.load_with_text(shown)
        engine = Engine(target, replace(chosen.engine, streams=robots))
        engine.warm_up(shown)
    limit = round(max_message_mb * 1e6)
    settings = ServeSettings(
        sessions=robots, token=token, budget_s=budget, max_message_bytes=limit, max_rate_hz=max_rate, idle_s=idle
    )
    if not token and host not in _LOOPBACK:
        typer.echo(f"any client on the network can use the policy: set {TOKEN_VARIABLE} or --token-file", err=True)
    letter = "s" if certificate is not None else ""
    typer.echo(
        f"serving {chosen.checkpoint.name} to up to {robots} robots: ws{letter}://{host}:{port} (openpi), "
        f"ws{letter}://{host}:{port}/vla-eval (vla-eval), http{letter}://{host}:{port}/act (OpenVLA)"
    )
    served = uvicorn.Config(
        make_app(engine, settings),
        log_level="warning",
        ws_max_size=limit,
        ws_ping_interval=20.0,
        ws_ping_timeout=_PING_TIMEOUT_S,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=5,  # seconds, for requests in progress
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(served)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    if not server.started:
        raise UserError("the server could not start: see above")


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise UserError(f"{certificate} and {key} are not a PEM certificate and its key ({error})") from None


def _listen(host: str, port: int) -> socket.socket:
    """Binds the port, before a policy is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or an address of this machine "
            "as --host"
        ) from None
    return listening


@app.command(rich_help_panel=_RUN)
@takes_policy()
def predict(
    chosen: PolicyOptions,
    image: Annotated[
        list[Path],
        typer.Option(
            help="Camera image: PNG, JPEG, WebP, BMP, PPM, TIFF or GIF. Repeat for each camera, in the policy's order.",
            show_default=False,
        ),
    ],
    instruction: Annotated[str, typer.Option(help="The robot's task.")] = "",
    prompt_ids: Annotated[
        str, typer.Option(help="The prompt as token ids, e.g. '1,512,29901', instead of --instruction.")
    ] = "",
    state: Annotated[
        str, typer.Option(help="The robot's state, e.g. '0.1,-0.4,1.2', for a policy that reads it.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode the action for one image, or one image per camera."""
    if not (instruction or prompt_ids):
        instruction = chosen.in_file.get("instruction", "")
    if bool(instruction.strip()) == bool(prompt_ids):
        raise UserError("give either --instruction or --prompt-ids")
    import numpy as np

    from specvla_ros.engine.engine import Engine
    from specvla_ros.messages.image_file import read_image
    from specvla_ros.models.observation import Observation

    pictures = [read_image(path) for path in image]
    ids = _numbers(prompt_ids, int, "--prompt-ids must be whole numbers") if prompt_ids else None
    state_values = np.array(_numbers(state, float, "--state must be numbers")) if state else None
    policy = chosen.load_with_text() if ids is None else chosen.load()
    if len(pictures) != len(policy.cameras):
        raise UserError(
            f"got {len(pictures)} images, but the policy has {len(policy.cameras)} cameras: give --image once for "
            f"each, in this order: {', '.join(policy.cameras)}"
        )
    if state_values is not None and not policy.state_dims:
        raise UserError("the policy does not read the robot's state: omit --state")
    images = dict(zip(policy.cameras, pictures, strict=True))
    asked = Observation(images, instruction, stamp_ns=1, prompt_ids=ids, state=state_values)
    engine = Engine(policy, chosen.engine)
    if ids is None:
        engine.check_instruction(instruction)
    policy.prompt_layout(asked)
    engine.warm_up()
    outcome = engine.act(asked)
    _print_outcome(outcome, policy, as_json=as_json)


def _print_outcome(outcome: "Outcome", policy: "Target", *, as_json: bool) -> None:
    from specvla_ros.engine.outcome import Drop
    from specvla_ros.models.tokenizer import text_of

    if isinstance(outcome, Drop):
        typer.secho(f"specvla: no action: {outcome.reason.value}: {outcome.detail}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)
    text = text_of(policy.tokenizer, outcome.text_tokens)
    seconds = {stage: getattr(outcome.timings, f"{stage}_s") for stage in ("vision", "prefill", "decode")}
    if as_json:
        result = {
            "action": dict(zip(outcome.names, outcome.values.tolist(), strict=True)),
            "values": outcome.actions.tolist(),
            "tokens": [*outcome.text_tokens, *outcome.tokens],
            "text": text,
            "unnorm_key": policy.unnorm_key,
            "adapter": policy.describe().get("adapter", ""),
            "seconds": seconds,
        }
        typer.echo(json.dumps(result))
        return
    if text:
        typer.echo(text)
    for name, column in zip(outcome.names, outcome.actions.T, strict=True):
        typer.echo(f"{name:>8} " + " ".join(f"{value:+.6f}" for value in column))
    typer.echo("  tokens " + " ".join(map(str, outcome.tokens)))
    key = f"unnorm_key {policy.unnorm_key}; " if policy.unnorm_key else ""
    typer.echo(key + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in seconds.items()))


def _numbers(text: str, kind: Callable[[str], _Number], words: str) -> tuple[_Number, ...]:
    try:
        return tuple(kind(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise UserError(f"{words} separated by commas, got {shown(text)}") from None


@app.command(rich_help_panel=_RUN)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """Report what is installed and what to fix. Exit code 1 if something required is missing."""
    from specvla_ros.cli.doctor import report

    raise typer.Exit(report(as_json=as_json))
