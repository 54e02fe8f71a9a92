"""The command line: `specvla predict`, `replay`, `demo` and `doctor`. Heavy libraries are imported when needed."""

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specvla_ros.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from specvla_ros.engine.outcome import Outcome
    from specvla_ros.models.policy import Policy

app = typer.Typer(
    help="Real-time vision-language-action policies on ROS 2.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class Dtype(str, Enum):
    """Number formats of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Checkpoint = Annotated[Path, typer.Option(help="OpenVLA checkpoint: a Hugging Face directory.", show_default=False)]
UnnormKey = Annotated[str, typer.Option(help="Dataset whose action statistics apply; empty: the only one there is.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[Dtype, typer.Option(help="auto: float32 on a CPU, bfloat16 on a GPU.")]
CenterCrop = Annotated[
    bool, typer.Option("--center-crop", help="Use the middle 90 %, for checkpoints fine-tuned with augmentation.")
]


def main() -> None:
    """Runs the command; a user's error is one message and exit code 2, without a traceback."""
    try:
        app()
    except UserError as error:
        typer.secho(f"specvla: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)


@app.command()
def predict(
    checkpoint: Checkpoint,
    image: Annotated[Path, typer.Option(help="Camera image, any format Pillow reads.", show_default=False)],
    instruction: Annotated[str, typer.Option(help="What the robot shall do.")] = "",
    prompt_ids: Annotated[
        str, typer.Option(help="The prompt as token ids, e.g. '1,512,29901', in place of --instruction.")
    ] = "",
    unnorm_key: UnnormKey = "",
    device: Device = "auto",
    dtype: DtypeOption = Dtype.AUTO,
    center_crop: CenterCrop = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode the action for one image."""
    if bool(instruction) == bool(prompt_ids):
        raise UserError("give either --instruction or --prompt-ids")
    pixels = _read_image(image)
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.observation import Observation
    from specvla_ros.engine.settings import EngineSettings
    from specvla_ros.models.policy import load_policy

    ids = _parse_ids(prompt_ids) if prompt_ids else None
    policy = load_policy(checkpoint, device=device, dtype=dtype.value, unnorm_key=unnorm_key, center_crop=center_crop)
    engine = Engine(policy, EngineSettings())
    engine.warm_up()
    outcome = engine.act(Observation(pixels, instruction, stamp_ns=1, prompt_ids=ids))
    _print_outcome(outcome, policy, as_json=as_json)


def _print_outcome(outcome: "Outcome", policy: "Policy", *, as_json: bool) -> None:
    from specvla_ros.engine.outcome import Drop

    if isinstance(outcome, Drop):
        typer.secho(f"specvla: no action: {outcome.reason.value}: {outcome.detail}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)
    timings = outcome.timings
    seconds = {"vision": timings.vision_s, "prefill": timings.prefill_s, "decode": timings.decode_s}
    if as_json:
        result = {
            "action": dict(zip(outcome.names, outcome.values.tolist(), strict=True)),
            "values": outcome.values.tolist(),
            "tokens": list(outcome.tokens),
            "unnorm_key": policy.unnorm_key,
            "seconds": seconds,
        }
        typer.echo(json.dumps(result))
        return
    for name, value, token in zip(outcome.names, outcome.values, outcome.tokens, strict=True):
        typer.echo(f"{name:>8} {value:+.6f}   token {token}")
    typer.echo(f"unnorm_key {policy.unnorm_key}; " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in seconds.items()))


def _read_image(path: Path) -> "np.ndarray":
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        return np.asarray(Image.open(path).convert("RGB"))
    except FileNotFoundError:
        raise UserError(f"image {path} does not exist") from None
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise UserError(f"image {path} cannot be read ({error}); give a PNG or JPEG file") from None


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise UserError(f"--prompt-ids must be whole numbers separated by commas, got '{text}'") from None


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """Say what is installed, and what to fix. Exit code 1 if something needed is missing."""
    from dataclasses import asdict

    from specvla_ros.doctor import examine

    checks = examine()
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        for check in checks:
            colour = {"ok": typer.colors.GREEN, "missing": typer.colors.RED}.get(check.state, typer.colors.YELLOW)
            typer.echo(f"{typer.style(f'{check.state:8}', fg=colour)}{check.name:15} {check.found}")
            if check.fix:
                typer.echo(f"{'':8}{'':15} -> {check.fix}")
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)
