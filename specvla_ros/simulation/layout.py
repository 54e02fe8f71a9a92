"""What a seed decides: where things lie, and how the table, the lamp and the camera look."""

from dataclasses import dataclass

import numpy as np

CUBES = ("red_cube", "green_cube", "blue_cube")
DISTRACTORS = ("cylinder", "prism")
CUBE_HALF_M = 0.025
BLOCK_HALF_M = 0.05
BLOCK_TOP_M = 0.03
ZONE_NEAR_EDGE_M = 0.67

_HEIGHTS = {"block": 0.015, "cylinder": 0.03, "prism": 0.015} | dict.fromkeys(CUBES, CUBE_HALF_M)
_RADII = {"block": 0.065, "cylinder": 0.022, "prism": 0.03} | dict.fromkeys(CUBES, 0.032)
_X_RANGE = (0.38, 0.60)
_Y_RANGE = (-0.21, 0.21)
_GAP_M = 0.04  # a finger fits between two things
_MAX_YAW = 0.3


@dataclass(frozen=True)
class Layout:
    """One start of the world.

    Args:
        seed: that made it.
        poses: per body x, y, z in metres and yaw in radians; a distractor that is missing is not on the table.
        hand: float64 [3], where the hand starts, metres.
        colours: per geom red, green, blue in [0, 1].
        camera_shift: float64 [3], metres from the camera's own place.
        camera_turn: float64 [3], rotation vector in radians, camera frame.
        lamp_direction: float64 [3].
        lamp: brightness of the lamp.
        ambient: brightness from everywhere.
    """

    seed: int
    poses: dict[str, tuple[float, float, float, float]]
    hand: np.ndarray
    colours: dict[str, np.ndarray]
    camera_shift: np.ndarray
    camera_turn: np.ndarray
    lamp_direction: np.ndarray
    lamp: float
    ambient: float


def draw_layout(seed: int) -> Layout:
    """The layout of a seed; the same seed gives the same layout for every task."""
    rng = np.random.default_rng([20_250_722, seed])
    names = [*CUBES, "block", *(name for name in DISTRACTORS if rng.random() < 0.5)]
    return Layout(
        seed=seed,
        poses=_scatter(rng, names),
        hand=rng.uniform([0.42, -0.12, 0.14], [0.54, 0.12, 0.20]),
        colours=_colours(rng),
        camera_shift=rng.uniform(-0.01, 0.01, 3),
        camera_turn=rng.uniform(-0.01, 0.01, 3),
        lamp_direction=np.array([*rng.uniform(-0.15, 0.15, 2), -1.0]),
        lamp=rng.uniform(0.4, 0.6),
        ambient=rng.uniform(0.3, 0.4),
    )


def _scatter(rng: np.random.Generator, names: list[str]) -> dict[str, tuple[float, float, float, float]]:
    while True:
        places = _try_to_scatter(rng, names)
        if places is not None:
            break
    yaws = rng.uniform(-_MAX_YAW, _MAX_YAW, len(names))
    return {name: (*places[name], _HEIGHTS[name], float(yaw)) for name, yaw in zip(names, yaws, strict=True)}


def _try_to_scatter(rng: np.random.Generator, names: list[str]) -> dict[str, tuple[float, float]] | None:
    places: dict[str, tuple[float, float]] = {}
    for name in names:
        for _ in range(50):
            place = (float(rng.uniform(*_X_RANGE)), float(rng.uniform(*_Y_RANGE)))
            if all(_apart(name, place, other, places[other]) for other in places):
                places[name] = place
                break
        else:
            return None
    return places


def _apart(name: str, place: tuple[float, float], other: str, taken: tuple[float, float]) -> bool:
    dx, dy = place[0] - taken[0], place[1] - taken[1]
    if np.hypot(dx, dy) < _RADII[name] + _RADII[other] + _GAP_M:
        return False
    # What the green cube is pushed along stays free: from behind it up to the zone.
    if "green_cube" not in (name, other):
        return True
    ahead = dx if other == "green_cube" else -dx
    return ahead < -0.10 or abs(dy) > _RADII[name] + _RADII[other] + 0.01


def _colours(rng: np.random.Generator) -> dict[str, np.ndarray]:
    base = {
        "red_cube": (0.85, 0.10, 0.10),
        "green_cube": (0.10, 0.65, 0.15),
        "blue_cube": (0.10, 0.20, 0.85),
        "block": (0.30, 0.22, 0.16),
        "table": (0.62, 0.55, 0.46),
        "floor": (0.35, 0.37, 0.40),
        "cylinder": (0.90, 0.75, 0.10),
        "prism": (0.55, 0.20, 0.60),
    }
    return {name: np.clip(np.array(rgb) + rng.uniform(-0.05, 0.05, 3), 0, 1) for name, rgb in base.items()}
