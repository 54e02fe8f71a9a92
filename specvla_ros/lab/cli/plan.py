# SPDX-License-Identifier: Apache-2.0
"""The commands that plan: `specvla plan` and `bench`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specvla_ros.engine.settings import MAX_STREAMS
from specvla_ros.errors import UserError
from specvla_ros.lab.cli import options
from specvla_ros.lab.files import replace_file
from specvla_ros.lab.planning.device import known_devices
from specvla_ros.models.settings import WeightFormat

app = typer.Typer()

Model = Annotated[
    Path | None,
    typer.Option(help="OpenVLA checkpoint directory; only its config.json is read. Default: OpenVLA-7B's shapes."),
]


@app.command()
def plan(
    device: Annotated[
        str,
        typer.Option(help=f"{', '.join(known_devices())}, or a file that `specvla bench` wrote.", show_default=False),
    ],
    model: Model = None,
    weights: Annotated[
        WeightFormat, typer.Option(help="Format of the decoder's matrices; none: as the device's dtype.")
    ] = WeightFormat.NONE,
    robots: Annotated[
        int, typer.Option(help="Robots whose frames share the forwards; rates are of each.", min=1, max=MAX_STREAMS)
    ] = 1,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens of an answer, where the checkpoint does not say; 0: as it says.", min=0, max=1024),
    ] = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="File for everything that is shown, and more.", show_default=False)
    ] = None,
) -> None:
    """Say what a policy could reach on a device, and with which parameters, before it runs there.

    Counts the bytes and operations of every forward from the shapes, divides
    them by the device's bandwidth and matrix rate, and runs the engine's
    scheduler over that: action rate, observation-to-action latency and memory of
    every mode. These are limits, not measurements: a real engine is slower.
    Neither a GPU nor weights are needed. Exit code 1 where it does not fit.
    """
    from specvla_ros.lab.planning.device import read_device
    from specvla_ros.lab.planning.plan import make_plan, print_plan

    if tokens == 1:
        raise UserError("--tokens 1: an answer of one token leaves nothing to draft; give 2 or more")
    made = make_plan(read_device(device), weights, model, robots, tokens)
    if as_json is not None:
        _write(as_json, made.as_json())
    print_plan(made, Console())
    if not made.fits:
        raise typer.Exit(1)


@app.command()
def bench(
    measure: Annotated[bool, typer.Option("--measure", help="Bandwidth and matrix rates of this device.")] = False,
    out: Annotated[Path, typer.Option(help="The device's JSON file, for `specvla plan --device`.")] = Path(
        "device.json"
    ),
    model: Model = None,
) -> None:
    """Measure this device, so that `specvla plan` need not assume its figures.

    The first GPU in bfloat16, or this CPU in float32, as the engine uses them;
    matrix products in the checkpoint's shapes. About a minute on two cores.
    """
    if not measure:
        raise UserError(
            "say what to measure: `specvla bench --measure` takes this device's bandwidth and matrix rates for "
            "`specvla plan --device FILE`; policies are timed by the scripts in benchmarks/"
        )
    from specvla_ros.lab.planning.cost import OPENVLA_7B
    from specvla_ros.lab.planning.measure import CpuTimes, busy_machine, measure_device
    from specvla_ros.models.families.openvla.config import read_config

    if not out.parent.is_dir():
        raise UserError(f"{out.parent} does not exist; make it before")
    config = OPENVLA_7B if model is None else read_config(model)
    console, before = Console(stderr=True), CpuTimes.now()
    with console.status("measuring") as status:
        measured = measure_device(config.llama, lambda step: status.update(f"measuring {step}"))
    _write(out, measured.as_json())
    rates = ", ".join(f"{rows} rows {rate:.3g}" for rows, rate in measured.tflops_by_rows.items())
    typer.echo(f"{measured.name}: {measured.bandwidth_gb_s:.4g} GB/s; TFLOP/s in {measured.dtype}: {rates}")
    if busy := busy_machine(before, CpuTimes.now()):
        typer.echo(busy, err=True)
    if not measured.capability:
        typer.echo(options.ON_A_CPU, err=True)
    typer.echo(f"now: specvla plan --device {out}" + (f" --model {model}" if model else ""))


def _write(path: Path, value: dict[str, object]) -> None:
    try:
        replace_file(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None
