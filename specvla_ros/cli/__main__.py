# SPDX-License-Identifier: Apache-2.0
"""Where `specvla` and `python -m specvla_ros.cli` begin, also where the libraries of their commands are missing."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Runs the command. On a robot without typer and rich only `specvla doctor` runs; the others say what they need."""
    if find_spec("typer") and find_spec("rich"):
        from specvla_ros.cli.app import main as run

        return run()
    if sys.argv[1:2] == ["doctor"]:
        from specvla_ros.cli.doctor import report

        sys.exit(report(as_json="--json" in sys.argv))
    sys.exit(
        "specvla: this machine has what the nodes need, and `specvla doctor` says whether it is complete. The other "
        "commands need typer and rich: pip install -r requirements/lab.txt (or the extra specvla_ros[lab])"
    )


if __name__ == "__main__":
    main()
