# SPDX-License-Identifier: Apache-2.0
"""The command line `specvla`. Heavy libraries are imported when needed."""

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specvla_ros import __version__
from specvla_ros.cli import serve as cli_serve
from specvla_ros.cli.ending import one_line_endings
from specvla_ros.cli.laboratory import add_laboratory
from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import shown

if TYPE_CHECKING:
    import numpy as np

    from specvla_ros.engine.outcome import Outcome
    from specvla_ros.models.target import Target

# Pillow knows some forty more, one of which starts an interpreter; an image of a few kB may claim gigabytes.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
_MAX_PIXELS = 36_000_000

app = typer.Typer(
    help="Real-time vision-language-action policies on ROS 2.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_serve.app)
add_laboratory(app)


def main() -> None:
    """Runs the command; whatever goes wrong is one message and an exit code, without a traceback."""
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
    """Real-time vision-language-action policies on ROS 2."""


@app.command()
@takes_policy()
def predict(
    chosen: PolicyOptions,
    image: Annotated[
        list[Path],
        typer.Option(
            help="Camera image: PNG, JPEG, WebP, BMP, PPM, TIFF or GIF. Again for each camera, in the policy's order.",
            show_default=False,
        ),
    ],
    instruction: Annotated[str, typer.Option(help="What the robot shall do.")] = "",
    prompt_ids: Annotated[
        str, typer.Option(help="The prompt as token ids, e.g. '1,512,29901', in place of --instruction.")
    ] = "",
    state: Annotated[
        str, typer.Option(help="The robot's state, e.g. '0.1,-0.4,1.2', for a policy that reads it.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode the action for one image, or one of each camera."""
    if bool(instruction) == bool(prompt_ids):
        raise UserError("give either --instruction or --prompt-ids")
    pictures = [_read_image(path) for path in image]
    from specvla_ros.engine.engine import Engine
    from specvla_ros.models.observation import Observation

    ids = _parse_ids(prompt_ids) if prompt_ids else None
    robot = _parse_state(state) if state else None
    policy = chosen.load()
    if len(pictures) != len(policy.cameras):
        raise UserError(
            f"{len(pictures)} images are given, and the policy has {len(policy.cameras)} cameras: give --image once "
            f"for each, in this order: {', '.join(policy.cameras)}"
        )
    images = dict(zip(policy.cameras, pictures, strict=True))
    asked = Observation(images, instruction, stamp_ns=1, prompt_ids=ids, state=robot)
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
    timings = outcome.timings
    text = text_of(policy.tokenizer, outcome.text_tokens)
    seconds = {"vision": timings.vision_s, "prefill": timings.prefill_s, "decode": timings.decode_s}
    if as_json:
        result = {
            "action": dict(zip(outcome.names, outcome.values.tolist(), strict=True)),
            "values": outcome.actions.tolist(),
            "tokens": [*outcome.text_tokens, *outcome.tokens],
            "text": text,
            "unnorm_key": policy.unnorm_key,
            "seconds": seconds,
        }
        typer.echo(json.dumps(result))
        return
    if text:
        typer.echo(text)
    for name, column in zip(outcome.names, outcome.actions.T, strict=True):
        typer.echo(f"{name:>8} " + " ".join(f"{value:+.6f}" for value in column))
    typer.echo("  tokens " + " ".join(map(str, outcome.tokens)))
    typer.echo(f"unnorm_key {policy.unnorm_key}; " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in seconds.items()))


def _read_image(path: Path) -> "np.ndarray":
    import numpy as np
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our limit is lower
    try:
        with Image.open(path, formats=_IMAGE_FORMATS) as picture:
            if picture.width * picture.height > _MAX_PIXELS:
                raise UserError(
                    f"image {path} has {picture.width} x {picture.height} pixels, at most {_MAX_PIXELS // 10**6} "
                    "million are read; scale it down"
                )
            return np.asarray(picture.convert("RGB"))
    except FileNotFoundError:
        raise UserError(f"image {path} does not exist") from None
    except UserError:
        raise
    except Exception as error:  # whatever a decoder makes of damaged bytes, or Pillow of a bomb
        raise UserError(f"image {path} cannot be read ({error}); give a PNG or JPEG file") from None


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise UserError(f"--prompt-ids must be whole numbers separated by commas, got {shown(text)}") from None


def _parse_state(text: str) -> "np.ndarray":
    import numpy as np

    try:
        return np.array([float(part) for part in text.replace(",", " ").split()])
    except ValueError:
        raise UserError(f"--state must be numbers separated by commas, got {shown(text)}") from None


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """Say what is installed, and what to fix. Exit code 1 if something needed is missing."""
    from specvla_ros.cli.doctor import report

    raise typer.Exit(report(as_json=as_json))


if __name__ == "__main__":
    main()
