# SPDX-License-Identifier: Apache-2.0
"""The planning commands: `specvla plan` and `specvla bench`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specvla_ros.engine.settings import MAX_STREAMS
from specvla_ros.errors import UserError
from specvla_ros.lab.cli import options
from specvla_ros.lab.files import write_json
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
        WeightFormat, typer.Option(help="Format of the decoder's matrices; none: the device's dtype.")
    ] = WeightFormat.NONE,
    robots: Annotated[
        int, typer.Option(help="Robots whose frames share the forwards; rates are per robot.", min=1, max=MAX_STREAMS)
    ] = 1,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens per answer; 0: the number in the checkpoint.", min=0, max=1024),
    ] = 0,
    as_json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="JSON file with all shown figures and more.",
            show_default=False,
            callback=options.output_file,
        ),
    ] = None,
) -> None:
    """Compute what a policy could reach on a device, and with which parameters, before it runs there.

    Counts the bytes and operations of every forward from the shapes, divides
    them by the device's bandwidth and matrix rate, and simulates the engine's
    scheduler: action rate, observation-to-action latency and memory of every
    mode. These are limits, not measurements: a real engine is slower. In
    brackets: expected times, from eager software to captured graphs. Needs
    neither a GPU nor weights. Exit code 1 if the policy does not fit.
    """
    from specvla_ros.lab.planning.device import read_device
    from specvla_ros.lab.planning.plan_range import make_plans, print_plan

    if tokens == 1:
        raise UserError("--tokens 1: an answer of one token has nothing to draft; give 2 or more")
    made = make_plans(read_device(device), weights, model, robots, tokens)
    if as_json is not None:
        _write(as_json, made.as_json())
    print_plan(made, Console())
    if not made.eager.fits:
        raise typer.Exit(1)


@app.command()
def bench(
    measure: Annotated[bool, typer.Option("--measure", help="Measure bandwidth and matrix rates.")] = False,
    out: Annotated[
        Path,
        typer.Option(help="JSON file of the device, for `specvla plan --device`.", callback=options.output_file),
    ] = Path("device.json"),
    model: Model = None,
) -> None:
    """Measure this device for `specvla plan`, which otherwise assumes its figures.

    Uses the first GPU in bfloat16 or this CPU in float32, as the engine does, with
    matrix products in the checkpoint's shapes. Takes about a minute on two cores.
    """
    if not measure:
        raise UserError(
            "missing --measure: `specvla bench --measure` measures this device's bandwidth and matrix rates for "
            "`specvla plan --device FILE`; the scripts in benchmarks/ time policies"
        )
    from specvla_ros.lab.planning.cost import OPENVLA_7B
    from specvla_ros.lab.planning.measure import CpuTimes, busy_machine, measure_device
    from specvla_ros.models.families.openvla.config import read_config

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
    typer.echo(f"next: specvla plan --device {out}" + (f" --model {model}" if model else ""))


def _write(path: Path, value: dict[str, object]) -> None:
    try:
        write_json(path, value)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None
