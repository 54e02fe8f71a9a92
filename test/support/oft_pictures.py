# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow makes of pictures as OpenVLA-OFT prepares them: writes test/models/oft_pictures.json.

pip install tensorflow-cpu==2.21.0 numpy; python test/support/oft_pictures.py
"""

import hashlib
import json
from pathlib import Path

import numpy as np

EXPECTED = Path(__file__).parents[1] / "models" / "oft_pictures.json"
SIZE, EVERY = 224, 32  # of the result, and of its pixels that are kept
SHAPES = ((256, 256), (480, 640), (97, 131), (64, 64), (3, 5))


def picture(height: int, width: int) -> np.ndarray:
    """Uint8 RGB [height, width, 3] with slopes, edges and noise, from whole numbers alone."""
    y, x = np.mgrid[:height, :width]
    slopes = np.stack([abs((3 * x + 2 * y) % 510 - 255), abs((x + 5 * y) % 510 - 255), (x * y // 7) % 256], axis=2)
    noise = (7 * x * x + 13 * y * y + 5 * x * y) % 61
    slopes[height // 4 : height // 2, width // 3 : width // 2] = 250, 10, 5
    return np.clip(slopes + noise[:, :, None] - 30, 0, 255).astype(np.uint8)


def main() -> None:
    """As openvla-oft's experiments/robot/openvla_utils.py (commit 213c5ff) calls TensorFlow."""
    import tensorflow as tf

    found = []
    for height, width in SHAPES:
        decoded = tf.io.decode_image(
            tf.image.encode_jpeg(picture(height, width)), expand_animations=False, dtype=tf.uint8
        )
        resized = tf.image.resize(decoded, (SIZE, SIZE), method="lanczos3", antialias=True)
        prepared = tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8).numpy()
        found.append(
            {
                "shape": [height, width],
                "decoded_sha256": hashlib.sha256(decoded.numpy().tobytes()).hexdigest(),
                "prepared_sum": int(prepared.sum()),
                "prepared": prepared[::EVERY, ::EVERY].reshape(-1).tolist(),
            }
        )
    head = {"made_by": "test/support/oft_pictures.py", "tensorflow": tf.__version__, "numpy": np.__version__}
    EXPECTED.write_text(json.dumps(head | {"pictures": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
