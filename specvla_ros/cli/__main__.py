# SPDX-License-Identifier: Apache-2.0
"""`python -m specvla_ros.cli`, which accelerate launches."""

from specvla_ros.cli.entry import main

if __name__ == "__main__":
    main()
