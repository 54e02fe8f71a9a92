# SPDX-License-Identifier: Apache-2.0
"""Writes the small datasets in test/lab/bags/lerobot with LeRobot itself, and what LeRobot reads from them.

    python -m venv oracle && oracle/bin/pip install lerobot==0.4.4
    oracle/bin/python test/support/lerobot_oracle/make_datasets.py test/lab/bags/lerobot/v30      # and with 0.3.3: v21

If torchvision cannot be installed (see `stand_ins`), `lerobot` with `--no-deps`, and av datasets draccus einops
huggingface-hub<1 jsonlines packaging pandas pillow torch beside it, are enough.
"""

import json
import shutil
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

if util.find_spec("torchvision") is None:
    import stand_ins

    stand_ins.install()

from lerobot.datasets.lerobot_dataset import CODEBASE_VERSION, LeRobotDataset

FPS = 10
LENGTHS = (9, 6)
TASKS = (("put the carrot on the plate", "put the carrot on the plate"), ("open the drawer", "close the drawer"))
HEIGHT, WIDTH = 48, 64
JOINTS = ["shoulder_pan.pos", "elbow_flex.pos", "gripper.pos"]
ACTIONS = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]


def picture(episode: int, frame: int, camera: int) -> np.ndarray:
    """A slope with a bright square that moves from frame to frame: uint8 [48, 64, 3]."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    pixels = np.stack([rows * 3, columns * 3, (rows + columns + 40 * camera) % 256], axis=2).astype(np.uint8)
    left, top = 4 + 5 * frame, 8 + 14 * episode + 4 * camera
    pixels[top : top + 10, left : left + 10] = (250, 240 - 60 * episode, 40)
    return pixels


def write(root: Path) -> None:
    """Writes two episodes of a video camera, another camera (an image in v2.1), state and action."""
    second = "video" if CODEBASE_VERSION == "v3.0" else "image"
    shape, axes = (HEIGHT, WIDTH, 3), ["height", "width", "channels"]
    features = {
        "observation.images.front": {"dtype": "video", "shape": shape, "names": axes},
        "observation.images.wrist": {"dtype": second, "shape": shape, "names": axes},
        "observation.state": {"dtype": "float32", "shape": (len(JOINTS),), "names": JOINTS},
        "action": {"dtype": "float32", "shape": (len(ACTIONS),), "names": ACTIONS},
    }
    dataset = LeRobotDataset.create("specvla/oracle", FPS, features, root, "so100")
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            values = np.random.default_rng((episode, frame)).normal(size=10).astype(np.float32)
            first, last = TASKS[episode]
            content = {
                "observation.images.front": picture(episode, frame, 0),
                "observation.images.wrist": picture(episode, frame, 1),
                "observation.state": values[:3],
                "action": values[3:],
            }
            task = first if frame < length // 2 else last
            if CODEBASE_VERSION == "v3.0":
                dataset.add_frame(content | {"task": task})
            else:
                dataset.add_frame(content, task)
        dataset.save_episode()
    if hasattr(dataset, "finalize"):
        dataset.finalize()
    shutil.rmtree(root / "images", ignore_errors=True)


def readings(root: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """What LeRobot reads from a dataset: arrays [frames, ...] by feature, pictures as uint8, and each frame's task."""
    dataset = LeRobotDataset("specvla/oracle", root, video_backend="pyav")
    items = [dataset[index] for index in range(len(dataset))]
    arrays = {}
    for key in items[0]:
        if key == "task":
            continue
        stacked = np.stack([np.asarray(item[key]) for item in items])
        if key in dataset.meta.camera_keys:
            stacked = np.rint(stacked.transpose(0, 2, 3, 1) * 255).astype(np.uint8)
        arrays[key] = stacked
    return arrays, [item["task"] for item in items]


def main() -> None:
    """`PATH` makes a dataset there; `--read PATH OUT.npz` only writes what LeRobot reads."""
    if sys.argv[1] == "--read":
        root, out = Path(sys.argv[2]), Path(sys.argv[3])
    else:
        root = Path(sys.argv[1])
        out = root.with_name(f"{root.name}_read.npz")
        shutil.rmtree(root, ignore_errors=True)
        write(root)
    arrays, tasks = readings(root)
    content: dict[str, Any] = {"tasks": np.array(tasks), **arrays}
    np.savez_compressed(out, **content)
    print(json.dumps({"lerobot": metadata.version("lerobot"), "codebase": CODEBASE_VERSION, "frames": len(tasks)}))


if __name__ == "__main__":
    main()
