# SPDX-License-Identifier: Apache-2.0
"""Reads what the guard's black box wrote, with the readers that users have."""

from collections import Counter
from pathlib import Path
from typing import Any

from mcap.reader import make_reader
from rosbags.typesys import Stores, get_types_from_msg, get_typestore


def read_black_box(path: Path) -> tuple[Counter[str], dict[str, Any]]:
    """Messages of each topic, counted, and the last of each, read with the definitions that the file itself holds."""
    counts: Counter[str] = Counter()
    last: dict[str, Any] = {}
    store = get_typestore(Stores.EMPTY)
    with path.open("rb") as file:
        for schema, channel, message in make_reader(file).iter_messages(log_time_order=False):
            assert schema is not None
            if schema.name not in store.fielddefs:
                found = get_types_from_msg(schema.data.decode(), schema.name)
                store.register({name: fields for name, fields in found.items() if name not in store.fielddefs})
            counts[channel.topic] += 1
            last[channel.topic] = store.deserialize_cdr(message.data, schema.name)
    return counts, last
