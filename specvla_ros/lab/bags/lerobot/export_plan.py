# SPDX-License-Identifier: Apache-2.0
"""The parameters of `specvla export`. Needs neither pyarrow nor av."""

from dataclasses import dataclass

from specvla_ros.settings.parameter import parameter


@dataclass(frozen=True)
class ExportPlan:
    """The form of an exported LeRobot dataset."""

    fps: int = parameter(
        0, "Frames per second; 0: the images' own rate. Frames are never resampled.", minimum=0, maximum=1000
    )
    images: bool = parameter(False, "Store PNG images, without loss, instead of videos.")
    uneven: bool = parameter(
        False, "Export bags with gaps between their images; the stamps in stamp_ns show where time is missing."
    )
    robot: str = parameter("", "The robot's type, for the dataset's description.")
