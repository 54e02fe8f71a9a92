# SPDX-License-Identifier: Apache-2.0
"""Entry point of `specvla` and `python -m specvla_ros.cli`; it also runs without the commands' libraries."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Runs the command. Without typer and rich only `specvla doctor` runs; other commands say what to install."""
    if find_spec("typer") and find_spec("rich"):
        from specvla_ros.lab.cli.app import main as run

        return run()
    if sys.argv[1:2] == ["doctor"]:
        from specvla_ros.cli.doctor import report

        sys.exit(report(as_json="--json" in sys.argv))
    sys.exit(
        "specvla: without typer and rich only `specvla doctor` runs; it checks whether the nodes have all they need. "
        "For the other commands: pip install -r requirements/lab.txt (or the extra specvla_ros[lab])"
    )


if __name__ == "__main__":
    main()
