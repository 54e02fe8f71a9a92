"""Where the engine is looked for an observation; see specvla_ros.models.observation."""

from specvla_ros.models.observation import Observation as Observation
