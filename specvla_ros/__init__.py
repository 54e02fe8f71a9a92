# SPDX-License-Identifier: Apache-2.0
"""Real-time VLA policies on ROS 2; `Policy` runs one without ROS. Importing this package does not import torch."""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specvla_ros.engine.engine import Engine as Engine
    from specvla_ros.engine.outcome import Action as Action
    from specvla_ros.engine.outcome import Drop as Drop
    from specvla_ros.engine.settings import EngineSettings as EngineSettings
    from specvla_ros.errors import UserError as UserError
    from specvla_ros.models.observation import Observation as Observation
    from specvla_ros.policy import Policy as Policy

# When modules are imported from a source checkout, the generated messages (specvla_ros.msg) still come from the
# installed package: without this line the sources would hide them.
__path__ = extend_path(__path__, __name__)

__version__ = "0.1.0"

_PUBLIC = {
    "Action": "specvla_ros.engine.outcome",
    "Drop": "specvla_ros.engine.outcome",
    "Engine": "specvla_ros.engine.engine",
    "EngineSettings": "specvla_ros.engine.settings",
    "Observation": "specvla_ros.models.observation",
    "Policy": "specvla_ros.policy",
    "UserError": "specvla_ros.errors",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
