"""Real-time vision-language-action policies on ROS 2."""

from pkgutil import extend_path

# The generated messages (specvla_ros.msg) are installed, while a developer imports this source tree: one package, two
# places. Without this line the source tree would hide the messages.
__path__ = extend_path(__path__, __name__)

__version__ = "0.1.0"
