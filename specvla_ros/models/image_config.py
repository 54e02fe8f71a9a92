# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint says how its images are prepared."""

from pathlib import Path

from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.settings.json_file import Fields


def read_image_config(directory: Path) -> Fields:
    """How images are prepared: of processor_config.json, as transformers 5 saves it, else of the older file.

    UserError if neither says it.
    """
    nested = directory / "processor_config.json"
    if nested.exists():
        given = read_checkpoint_json(nested)
        if given.raw.get("image_processor") is not None:
            return given.inner("image_processor")
    return read_checkpoint_json(directory / "preprocessor_config.json")
