# SPDX-License-Identifier: Apache-2.0
"""Statistics of a LeRobot dataset's features, by which LeRobot normalises."""

from collections.abc import Mapping, Sequence

import numpy as np

Statistics = dict[str, np.ndarray]  # by name: min, max, mean, std, count and the quantiles

_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_SAMPLED_IMAGES = 100  # of an episode and camera
_SAMPLED_SIDE = 150  # pixels; larger images are thinned out


def of_numbers(values: np.ndarray) -> Statistics:
    """Statistics per value of an episode's rows, [frames, values]; rows that are not finite do not count."""
    finite = values[np.isfinite(values).all(axis=1)]
    rows = finite if len(finite) else np.zeros((1, values.shape[1]))
    return _statistics(rows, len(finite))


def of_images(images: Sequence[np.ndarray]) -> Statistics:
    """Statistics per colour, [3, 1, 1] in 0..1, of sampled images, uint8 [height, width, 3]."""
    pixels = np.concatenate([image.reshape(-1, 3) for image in images]) / 255.0
    found = _statistics(pixels, len(images))
    return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in found.items()}


class ImageSample:
    """Some of an episode's images, spread over it; thinned out to bound memory."""

    def __init__(self) -> None:
        self.images: list[np.ndarray] = []
        self._seen, self._step = 0, 1

    def add(self, image: np.ndarray) -> None:
        """Takes an image, uint8 [height, width, 3], or leaves it."""
        if self._seen % self._step == 0:
            stride = -(-max(image.shape[:2]) // _SAMPLED_SIDE)
            self.images.append(image[::stride, ::stride].copy())
        self._seen += 1
        if len(self.images) > _SAMPLED_IMAGES:
            self.images, self._step = self.images[::2], self._step * 2


def together(parts: Sequence[Statistics]) -> Statistics:
    """Statistics of several episodes; quantiles are means weighted by count, as LeRobot does it."""
    counts = np.array([part["count"][0] for part in parts], dtype=np.float64)
    weights = counts / counts.sum() if counts.any() else np.full(len(parts), 1 / len(parts))

    def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.tensordot(weights, np.stack(arrays), axes=1)

    means = [part["mean"] for part in parts]
    total = mean(means)
    spread = mean([part["std"] ** 2 + (each - total) ** 2 for part, each in zip(parts, means, strict=True)])
    found = {
        "min": np.min([part["min"] for part in parts], axis=0),
        "max": np.max([part["max"] for part in parts], axis=0),
    }
    found |= {"mean": total, "std": np.sqrt(spread), "count": np.array([int(counts.sum())])}
    return found | {name: mean([part[name] for part in parts]) for name in _QUANTILES}


def as_lists(statistics: Mapping[str, Statistics]) -> dict[str, dict[str, list[float]]]:
    """Statistics by feature, for JSON."""
    return {key: {name: value.tolist() for name, value in each.items()} for key, each in statistics.items()}


def _statistics(rows: np.ndarray, count: int) -> Statistics:
    found = {"min": rows.min(axis=0), "max": rows.max(axis=0), "mean": rows.mean(axis=0), "std": rows.std(axis=0)}
    quantiles = np.quantile(rows, [*_QUANTILES.values()], axis=0)
    return {**found, "count": np.array([count]), **dict(zip(_QUANTILES, quantiles, strict=True))}
