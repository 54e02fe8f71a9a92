# SPDX-License-Identifier: Apache-2.0
"""Image preprocessing settings of a checkpoint."""

from pathlib import Path

from specvla_ros.models.config import read_checkpoint_json
from specvla_ros.settings.json_file import Fields


def read_image_config(directory: Path) -> Fields:
    """Reads the image settings of processor_config.json, as transformers 5 saves it, else of the older file.

    Raises UserError if neither file has them.
    """
    nested = directory / "processor_config.json"
    if nested.exists():
        given = read_checkpoint_json(nested)
        if given.raw.get("image_processor") is not None:
            return given.inner("image_processor")
    return read_checkpoint_json(directory / "preprocessor_config.json")
