# SPDX-License-Identifier: Apache-2.0
"""A node that is interrupted while its libraries are imported ends without a traceback; one that runs, as it likes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKS = "import signal\n\ndef main():\n    signal.raise_signal(signal.SIGINT)\n"


@pytest.mark.parametrize("slow", ["import signal\nsignal.raise_signal(signal.SIGINT)\n", WORKS])
def test_ctrl_c_during_the_imports_leaves_no_traceback(tmp_path: Path, slow: str) -> None:
    (tmp_path / "slow.py").write_text(slow)
    code = "import sys; sys.path.append(sys.argv[1]); from specvla_ros.ros import start; start('slow')"
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT
    assert ("KeyboardInterrupt" in ended.stderr) is (slow is WORKS)
