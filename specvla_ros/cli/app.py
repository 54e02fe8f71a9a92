"""The command line `specvla`. Heavy libraries are imported when needed."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specvla_ros.cli import plan as cli_plan
from specvla_ros.cli import simulation as cli_simulation
from specvla_ros.cli import speculation as cli_draft
from specvla_ros.cli.options import (
    CenterCrop,
    Device,
    Dtype,
    DtypeOption,
    Quantization,
    QuantizationOption,
    Tasks,
    UnnormKey,
)
from specvla_ros.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from specvla_ros.engine.outcome import Outcome
    from specvla_ros.models.checkpoint import Target

app = typer.Typer(
    help="Real-time vision-language-action policies on ROS 2.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cli_simulation.app)
app.add_typer(cli_draft.app)
app.add_typer(cli_plan.app)


Checkpoint = Annotated[Path, typer.Option(help="OpenVLA checkpoint: a Hugging Face directory.", show_default=False)]


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
    quantization: QuantizationOption = Quantization.NONE,
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
    from specvla_ros.models.checkpoint import load_target

    ids = _parse_ids(prompt_ids) if prompt_ids else None
    policy = load_target(
        checkpoint,
        device=device,
        dtype=dtype.value,
        unnorm_key=unnorm_key,
        center_crop=center_crop,
        quantization=quantization.value,
    )
    engine = Engine(policy, EngineSettings())
    if ids is None:
        engine.check_instruction(instruction)
    else:
        ids = policy.prompt.complete(ids)
    engine.warm_up()
    outcome = engine.act(Observation(pixels, instruction, stamp_ns=1, prompt_ids=ids))
    _print_outcome(outcome, policy, as_json=as_json)


def _print_outcome(outcome: "Outcome", policy: "Target", *, as_json: bool) -> None:
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
def replay(
    bag: Annotated[Path, typer.Argument(help="ROS 2 bag: a directory, or an .mcap or .db3 file.", show_default=False)],
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="Directory for the results; must hold none yet.", show_default=False)],
    image_topic: Annotated[str, typer.Option(help="Empty: /camera/image_raw, or the only one.")] = "",
    instruction_topic: Annotated[str, typer.Option(help="Empty: /instruction.")] = "",
    instruction: Annotated[str, typer.Option(help="In place of the bag's instruction topic.")] = "",
    action_topic: Annotated[
        str, typer.Option(help="Recorded actions; empty: /ground_truth/action if it is there.")
    ] = "",
    action_dt: Annotated[float, typer.Option(help="Seconds that an action's displacements take.", min=0.001)] = 0.2,
    max_p95_latency_s: Annotated[float | None, typer.Option(help="Limit: 95 % of the frames answer in time.")] = None,
    max_drop_fraction: Annotated[float | None, typer.Option(help="Limit: frames without an action, 0 to 1.")] = None,
    max_bin_distance: Annotated[
        float | None, typer.Option(help="Limit: mean distance to the recorded action, in bins: 255 to a dimension.")
    ] = None,
    min_action_rate_hz: Annotated[float | None, typer.Option(help="Limit: actions per second of decoding.")] = None,
    unnorm_key: UnnormKey = "",
    device: Device = "auto",
    dtype: DtypeOption = Dtype.AUTO,
    quantization: QuantizationOption = Quantization.NONE,
    center_crop: CenterCrop = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Decode an action for every image of a bag: frames.jsonl, summary.json, report.html and a bag of the actions.

    Exit code 1 when a limit is broken or the bag could not be replayed to its end, 2 when something given is wrong.
    """
    from specvla_ros.bags.frames import TopicChoice
    from specvla_ros.engine.settings import EngineSettings
    from specvla_ros.evaluation.replay import check_replay, replay
    from specvla_ros.evaluation.replay_summary import Thresholds
    from specvla_ros.models.checkpoint import load_target

    thresholds = Thresholds(
        max_p95_latency_s=max_p95_latency_s,
        max_drop_fraction=max_drop_fraction,
        max_bin_distance=max_bin_distance,
        min_action_rate_hz=min_action_rate_hz,
    )
    topics = TopicChoice(
        image_topic=image_topic or None,
        instruction_topic=instruction_topic or None,
        instruction=instruction or None,
        action_topic=action_topic or None,
    )
    check_replay(bag, out, topics)
    policy = load_target(
        checkpoint,
        device=device,
        dtype=dtype.value,
        unnorm_key=unnorm_key,
        center_crop=center_crop,
        quantization=quantization.value,
    )
    summary = replay(
        policy, EngineSettings(), bag, out, topics=topics, action_dt=action_dt, thresholds=thresholds, progress=progress
    )
    total = summary.latency_s.get("total", {})
    latency = f", p95 {total['p95'] * 1e3:.1f} ms, {summary.action_rate_hz:.1f} actions/s" if total else ""
    typer.echo(f"{summary.actions} of {summary.frames} frames answered{latency}; see {out / 'report.html'}")
    for failure in summary.failures:
        typer.secho(f"specvla: {failure}", fg=typer.colors.RED, err=True)
    if summary.failures:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for films and report; remade each time.")] = Path("demo"),
    policy: Annotated[
        Path | None, typer.Option(help="Checkpoint directory. Default: the nano policy of this package.")
    ] = None,
    task: Tasks = None,
    episodes: Annotated[int, typer.Option(help="Per task.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the first episode's start.", min=0)] = 0,
) -> None:
    """Watch a trained policy drive a simulated arm over ROS 2 topics; type another instruction while it runs."""
    try:
        from specvla_ros.ros.demo.run import run_demo
    except ImportError as error:
        raise UserError(f"ROS 2 is not usable here ({error}); `specvla doctor` says what to fix") from None
    from specvla_ros.policies.bundled import nano_policy

    raise typer.Exit(run_demo(out, policy or nano_policy(), tasks=list(task or ()), episodes=episodes, seed=seed))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """Say what is installed, and what to fix. Exit code 1 if something needed is missing."""
    from dataclasses import asdict

    from specvla_ros.cli.doctor import examine

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


if __name__ == "__main__":
    main()
