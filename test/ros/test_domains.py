# SPDX-License-Identifier: Apache-2.0
"""Two processes of the tests never hear each other."""

import os
import subprocess
import sys

from support.ros_domain import OWN_DOMAINS


def test_processes_have_domains_of_their_own():
    code = "from support.ros_domain import own_domains; print(own_domains(), flush=True); input()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    starts = {int(os.environ["ROS_DOMAIN_ID"])}
    processes = []
    try:
        for number in range(2, 5):
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            processes.append(process)
            assert process.stdout is not None
            starts.add(int(process.stdout.readline()))
            assert len(starts) == number
    finally:
        for process in processes:
            process.communicate(b"\n")
    assert all(0 < start <= 101 - OWN_DOMAINS and start % OWN_DOMAINS == 1 for start in starts)
