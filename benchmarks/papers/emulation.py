# SPDX-License-Identifier: Apache-2.0
"""The emulated devices held against what others measured on them.

python -m benchmarks.papers.emulation

Nothing runs here: each published figure (benchmarks/papers/published.json) stands beside what the device's table
(specvla_ros/lab/planning/devices) gives for the same work, with the error of the time.
"""

import typer

from benchmarks.harness import Out, finish, result_head
from benchmarks.papers.published import published
from benchmarks.results_page import RESULTS
from specvla_ros.lab.planning.device import known_devices, read_device


def main(context: typer.Context, out: Out = RESULTS / "emulation.json") -> None:
    """Emulates every published figure."""
    figures = [figure.as_json() for figure in published()]
    devices = {name: read_device(name) for name in known_devices()}
    reached = {
        name: {
            "name": device.name,
            "efficiency": device.efficiency.as_json(),
            "sources": {key: text for key, text in device.sources.items() if key.startswith("efficiency")},
        }
        for name, device in devices.items()
    }
    finish(result_head(context) | {"devices": reached, "figures": figures}, out)


if __name__ == "__main__":
    typer.run(main)
