# SPDX-License-Identifier: Apache-2.0
"""The commands on the user's own robot, `specvla robot …`."""

from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.cli.terminal import print_table

app = typer.Typer(name="robot", help="What your own robot does, from what the guard recorded.", no_args_is_help=True)


@app.command()
def stops(
    black_boxes: Annotated[
        list[str],
        typer.Argument(metavar="BLACKBOX", help="Files of the guard's black box, folders or globs of them."),
    ],
    robot: Annotated[
        Path | None,
        typer.Option(help="The robot's parameter file, with limits. Else shares are of the largest speed seen."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for stops.json and report.html. Default: none.")] = None,
) -> None:
    """Tabulate how long and how far your robot took to stop, by cause, speed and reach, from the guard's black box.

    Median and worst case, in the form of the annex on stopping of ISO 10218-1. Exit code 1 when no file tells of a stop
    of a moving robot.
    """
    from specvla_ros.lab.evaluation import stops_page
    from specvla_ros.lab.evaluation.stops import find_black_boxes, measure_stops

    limit_m_s = stops_page.linear_speed(robot) if robot is not None else None
    found = measure_stops(find_black_boxes(black_boxes))
    table = stops_page.tabulate(found, limit_m_s)
    if table.rows:
        print_table(stops_page.TABLE_HEAD, [row.cells for row in table.rows])
        typer.echo(table.caption)
    typer.echo(f"{len(found.measured)} stops measured, {len(found.left_out)} files left out")
    for each in found.left_out:
        typer.echo(f"  {each.file}: {each.why}")
    if out is not None:
        stops_page.write_stops(out, found, table)
        typer.echo(f"see {out / 'report.html'}")
    if not found.measured:
        raise typer.Exit(1)
