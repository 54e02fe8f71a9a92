# SPDX-License-Identifier: Apache-2.0
"""Times the export of bags to a LeRobot dataset and the reading of both, per 1000 frames of two cameras.

python -m benchmarks.speed.lerobot_datasets --frames 600
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow
import typer

from benchmarks.harness import Out, finish, result_head
from specvla_ros.lab.bags.demonstrations import DemonstrationRecord, write_demonstration
from specvla_ros.lab.bags.frames import TopicChoice, bag_frames, choose_topics, rgb_from_message
from specvla_ros.lab.bags.lerobot.export import export
from specvla_ros.lab.bags.lerobot.export_plan import ExportPlan
from specvla_ros.lab.bags.reader import open_bag

SIZES = {"256 x 256": (256, 256), "640 x 480": (480, 640)}
TOPICS = TopicChoice(cameras={"wrist": "/wrist/image_raw"}, state_topic="/joint_states")
RATE_HZ = 20


def main(context: typer.Context, frames: int = 600, out: Out = None) -> None:
    """Measures bags, videos and PNG images at two resolutions."""
    head = result_head(context, pyarrow=pyarrow.__version__, av=av.__version__)
    case("warm-up", (64, 64), 2)
    cases = [case(name, size, frames) for name, size in SIZES.items()]
    finish(head | {"frames": frames, "cameras": 2, "cases": cases}, out)


def case(name: str, size: tuple[int, int], frames: int) -> dict[str, Any]:
    """Seconds per 1000 frames and bytes of one resolution."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        bag = root / "bag"
        write_demonstration(bag, record(size, frames))
        found: dict[str, Any] = {"size": name}
        found["read_bag_s"] = timed(lambda: read(bag), frames)
        found["bag_bytes"] = bytes_in(bag)
        for form in ("video", "images"):
            dataset = root / form
            plan = ExportPlan(images=form == "images")
            found[f"export_{form}_s"] = timed(partial(export, [bag], dataset, plan, TOPICS), frames)
            found[f"read_{form}_s"] = timed(partial(read, dataset / "episode_000000"), frames)
            found[f"{form}_bytes"] = bytes_in(dataset)
    return found


def record(size: tuple[int, int], frames: int) -> DemonstrationRecord:
    """A scene with texture and noise, over which a camera moves."""
    random = np.random.default_rng(0)
    scene = np.kron(random.integers(40, 200, (60, 80, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    noise = random.integers(0, 8, (*size, 3), dtype=np.uint8)
    height, width = size
    moved = [(scene[i % 256 : i % 256 + height, i % 400 : i % 400 + width] + noise) for i in range(frames)]
    numbers = [random.normal(size=7) for _ in range(frames)]
    names = tuple(f"joint_{i}" for i in range(7))
    times = [i / RATE_HZ for i in range(frames)]
    return DemonstrationRecord(moved, numbers, "stack the cups", times, {}, {"wrist": moved[::-1]}, names, numbers)


def read(path: Path) -> None:
    """Decodes all images of a recording, as a replay does."""
    with open_bag(path) as bag:
        for frame in bag_frames(bag, choose_topics(bag, TOPICS)):
            for message in (frame.image, frame.others["wrist"]):
                rgb_from_message(message.message())


def timed(run: Callable[[], Any], frames: int) -> float:
    """Seconds per 1000 frames."""
    before = time.perf_counter()
    run()
    return (time.perf_counter() - before) * 1000 / frames


def bytes_in(directory: Path) -> int:
    """Size of all files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    typer.run(main)
