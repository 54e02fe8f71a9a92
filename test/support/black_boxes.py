# SPDX-License-Identifier: Apache-2.0
"""Reads what the guard's black box wrote, as users do."""

from collections import Counter
from pathlib import Path
from typing import Any

from rosbags.highlevel import AnyReader


def read_black_box(path: Path) -> tuple[Counter[str], dict[str, Any]]:
    """Messages of each topic, counted, and the last of each, read with the definitions that the file itself holds."""
    counts: Counter[str] = Counter()
    last: dict[str, Any] = {}
    with AnyReader([path]) as reader:
        for connection, _, raw in reader.messages():
            counts[connection.topic] += 1
            last[connection.topic] = reader.deserialize(raw, connection.msgtype)
    return counts, last
