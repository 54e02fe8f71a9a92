# SPDX-License-Identifier: Apache-2.0
"""OpenVLA-OFT's pictures that are not of its size: as TensorFlow makes them."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from support.oft_pictures import EVERY, EXPECTED, SIZE, picture

from specvla_ros.models.families.openvla.oft import resized, through_jpeg


@pytest.mark.parametrize("expected", json.loads(EXPECTED.read_text())["pictures"], ids=lambda each: str(each["shape"]))
def test_they_are_those_of_tensorflow(expected: dict[str, Any]) -> None:
    decoded = through_jpeg(picture(*expected["shape"]))
    assert hashlib.sha256(decoded.tobytes()).hexdigest() == expected["decoded_sha256"]
    prepared = resized(decoded, SIZE)
    assert abs(int(prepared.sum()) - expected["prepared_sum"]) < 5e-4 * prepared.size
    kept = prepared[::EVERY, ::EVERY].reshape(-1).astype(int)
    assert np.abs(kept - expected["prepared"]).max() <= 1
