#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plays films of a demo or a simulation side by side in one animated GIF, for the README.

make demo && python scripts/demo_gif.py demo docs/images/demo.gif
"""

from pathlib import Path
from typing import Annotated

import av
import numpy as np
import typer
from PIL import Image

_FPS = 10
_HOLD_S = 1.0  # the last frames stay this long before the GIF starts again
_COLORS = 64
_GAP = ((0, 0), (2, 2), (0, 0))  # pixels


def frames(film: Path, width: int) -> list[np.ndarray]:
    """The frames of a film at `_FPS`, RGB uint8 [height, width, 3]."""
    with av.open(str(film)) as container:
        stream = container.streams.video[0]
        step = max(1, round(float(stream.average_rate or _FPS) / _FPS))
        images = [frame.to_image() for number, frame in enumerate(container.decode(stream)) if number % step == 0]
    size = (width, images[0].height * width // images[0].width)
    return [np.asarray(image.resize(size, Image.Resampling.LANCZOS)) for image in images]


def main(
    results: Annotated[Path, typer.Argument(help="Directory of a demo's results.")],
    out: Annotated[Path, typer.Argument(help="The GIF to write.")],
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks, from left to right.")
    ] = "lift_red,push_green,put_red",
    width: Annotated[int, typer.Option(help="Width of each film in pixels.")] = 290,
) -> None:
    """Writes RESULTS/films/TASK-0.mp4 of each task to OUT."""
    films = [frames(results / "films" / f"{task}-0.mp4", width) for task in tasks.split(",")]
    count = max(map(len, films)) + round(_HOLD_S * _FPS)
    rows = [np.concatenate([np.pad(film[min(i, len(film) - 1)], _GAP) for film in films], axis=1) for i in range(count)]
    # One palette for all frames: colors that flicker would also double the size.
    palette = Image.fromarray(np.concatenate(rows[:: max(1, count // 8)])).quantize(_COLORS)
    images = [Image.fromarray(row).quantize(palette=palette, dither=Image.Dither.NONE) for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(out, save_all=True, append_images=images[1:], duration=1000 // _FPS, loop=0, optimize=True)


if __name__ == "__main__":
    typer.run(main)
