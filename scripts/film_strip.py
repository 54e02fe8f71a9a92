#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the films of a demo or a simulation as one picture: a row per task, time from left to right.

python scripts/film_strip.py demo docs/images/demo.png
"""

from pathlib import Path

import av
import numpy as np
import typer
from PIL import Image

_FRAMES = 5
_GAP = 4


def strip(film: Path) -> np.ndarray:
    """Evenly spaced frames of a film side by side, RGB uint8."""
    with av.open(str(film)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    chosen = [frames[i] for i in np.linspace(0, len(frames) - 1, _FRAMES).astype(int)]
    gap = np.full((chosen[0].shape[0], _GAP, 3), 255, np.uint8)
    return np.concatenate([part for frame in chosen for part in (frame, gap)][:-1], axis=1)


def main(results: Path, picture: Path, width: int = 1000) -> None:
    """Draws RESULTS/films/*.mp4 to PICTURE."""
    films: dict[str, Path] = {}
    for film in sorted((results / "films").glob("*.mp4")):
        films.setdefault(film.stem.rsplit("-", 1)[0], film)
    rows = [strip(film) for film in films.values()]
    gap = np.full((_GAP, rows[0].shape[1], 3), 255, np.uint8)
    image = Image.fromarray(np.concatenate([part for row in rows for part in (row, gap)][:-1]))
    picture.parent.mkdir(parents=True, exist_ok=True)
    image.resize((width, image.height * width // image.width), Image.Resampling.LANCZOS).quantize(128).save(
        picture, optimize=True
    )


if __name__ == "__main__":
    typer.run(main)
