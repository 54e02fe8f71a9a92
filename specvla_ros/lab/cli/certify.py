# SPDX-License-Identifier: Apache-2.0
"""The command that says, and checks, that a setting changes nothing: `certify`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.cli.terminal import progress
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.options import Cameras, StateNames, StateTopic, sensors_of

app = typer.Typer()


@app.command()
@takes_policy()
def certify(
    chosen: PolicyOptions,
    data: Annotated[list[Path], typer.Option(help="Bags, or directories of bags; again for more.")],
    out: Annotated[Path, typer.Option(help="The certificate.")] = Path("certificate.json"),
    verify: Annotated[
        Path | None, typer.Option(help="A certificate: repeat what it says, with its settings, and compare.")
    ] = None,
    instruction: Annotated[str, typer.Option(help="In place of the bags' own.")] = "",
    camera: Cameras = None,
    state_topic: StateTopic = "",
    state_names: StateNames = "",
) -> None:
    """Compare a setting with plain decoding over bags, token for token, and write what was found as a certificate.

    Exit code 1 when strict answers differ, a picture is answered by one alone, or a certificate does not hold again.
    """
    from specvla_ros.lab.evaluation import certificate
    from specvla_ros.lab.evaluation.frame_sources import find_bags
    from specvla_ros.lab.evaluation.replay import check_senses
    from specvla_ros.models.checkpoint import leave_a_core

    given = certificate.read_certificate(verify) if verify is not None else None
    if given is None and chosen.engine.mode == "ar":
        raise UserError("plain decoding is what a setting is compared with: give one, such as --mode spec")
    bags = find_bags(data)
    if given is not None and instruction:
        raise UserError("--verify asks as the certificate says: leave --instruction out")
    asked = instruction if given is None else given.content["instruction"]
    sensors = replace(sensors_of(camera, state_topic, state_names), instruction=asked)
    leave_a_core()
    policy = chosen.load()
    check_senses(policy, sensors.cameras, sensors.state_topic)
    settings = chosen.engine if given is None else certificate.settings_of(given)
    pictures = certificate.count_pictures(bags, sensors)
    with progress("answering") as advance:
        found = certificate.certify(policy, settings, bags, sensors, lambda done: advance(done, pictures, "answering"))
    result = found.content["result"]
    typer.echo(
        f"{result['actions']} of {result['frames']} pictures of {len(bags)} bags answered, {result['tokens']} tokens: "
        f"{result['differing']} answers differ from plain decoding's"
    )
    for what, reasons in (("plain decoding", result["unanswered"]), ("the setting", result["lost"])):
        for reason, number in reasons.items():
            typer.echo(f"no action by {what} for {number}: {reason}")
    far = result["deviation"]
    if result["differing"] and far is not None:
        apart = f"{far['p95_mm']:.2f} mm and {far['p95_deg']:.2f} degrees (95th percentile)"
        most = f"{far['largest_mm']:.2f} mm and {far['largest_deg']:.2f} degrees at most"
        typer.echo(f"apart by {apart}, {most}; another gripper in {far['gripper_share']:.1%}")
    if result["closest"] is not None:
        ties = f"{result['near_ties']} tokens are nearly ties (below {found.content['tie']:g})"
        typer.echo(f"{ties}; the closest two logits are {result['closest']:.3g} apart")
    failures = found.failures
    if given is None:
        found.write(out)
        typer.echo(
            f"the certificate is in {out}, a page beside it; check it: specvla certify --verify {out} with the same "
            "policy and bags"
        )
    else:
        failures += certificate.differences(given, found)
        if not failures:
            typer.echo(f"{verify} holds")
    for failure in failures:
        typer.echo(failure, err=True)
    if failures:
        raise typer.Exit(1)
