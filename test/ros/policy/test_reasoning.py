# SPDX-License-Identifier: Apache-2.0
"""A policy that writes before it acts, over real DDS: the text and the action of the original code."""

import json

import numpy as np
import pytest
from PIL import Image as Picture
from sensor_msgs.msg import Image
from support.paths import ORACLES, needs
from support.ros import robot

HERE = ORACLES / "ecot_tiny_a"
pytestmark = needs(HERE)


@pytest.mark.parametrize("think_every_s", [0.0, 3600.0])
def test_text_and_action_go_out_with_the_stamps_of_their_images(think_every_s: float) -> None:
    case = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    case = (case if isinstance(case, list) else case["cases"])[0]
    pixels = np.asarray(Picture.open(HERE / case["image"]).convert("RGB"))
    height, width = pixels.shape[:2]
    chosen = {"model.prompt": "ecot", "decode.max_reasoning_tokens": 64, "unnorm_key": case["unnorm_key"]}
    chosen["decode.think_every_s"] = think_every_s
    with robot(HERE / "checkpoint", instruction=case["instruction"], **chosen) as r:
        r.start()
        r.until(lambda: r.user.count_publishers("/policy/reasoning"))
        first = None
        for _ in range(2):
            image = Image(height=height, width=width, encoding="rgb8", step=3 * width, data=pixels.tobytes())
            image.header.stamp = r.policy.get_clock().now().to_msg()
            image.header.frame_id = "camera"
            action = r.act(image)
            r.until(lambda: len(r.reasoning) == len(r.actions))
            reasoning = r.reasoning[-1]
            first = first or image.header
            assert action.header.stamp == image.header.stamp
            assert reasoning.header == (first if think_every_s else image.header)
            assert (reasoning.seq, reasoning.epoch) == (action.seq, action.epoch)
            assert case["text_new"].startswith(reasoning.text) and reasoning.text.endswith("ACTION:")
            assert reasoning.tokens == case["n_generated"] - 8
            assert list(action.tokens) == case["native_last7_ids"]
