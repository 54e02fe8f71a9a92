# SPDX-License-Identifier: Apache-2.0
"""Runs a node until it is asked to end, with exit codes and messages meant for people."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

import rclpy
from rclpy.executors import Executor, ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import uninstall_signal_handlers

from specvla_ros.errors import UserError

AnyNode = TypeVar("AnyNode", bound=Node)

_PERIOD_S = 0.5


def run_node(
    name: str,
    make_node: Callable[[], AnyNode],
    *,
    close: Callable[[AnyNode], bool],
    finished: Callable[[AnyNode], bool] = lambda node: False,
    failure: Callable[[AnyNode], str] = lambda node: "",
    others: Callable[[AnyNode], Iterable[Node]] = lambda node: (),
) -> int:
    """Makes a node and spins it, on one thread, until SIGINT, SIGTERM or its own end.

    Args:
        name: first word of the messages on stderr.
        make_node: the node's class; may raise UserError.
        close: stops what the node runs beside the executor; False when something does not stop.
        finished: whether the node has done its work; looked at twice a second and after each callback.
        failure: what went wrong in the node's work, once it is closed; empty: nothing.
        others: nodes that belong to it, to be spun with it; it destroys them itself.

    Returns:
        The exit code: 0, or 2 for what a user can mend. When something does not stop, the process ends here with 1.
    """
    try:
        rclpy.init()
    except KeyboardInterrupt:
        return 0
    except Exception as error:  # rclpy has no common type for a command line or a parameter file it cannot read
        print(f"{name}: {_first_sentence(error)}", file=sys.stderr)
        return 2
    try:
        node = make_node()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        rclpy.try_shutdown()
        return 2
    except (KeyboardInterrupt, ExternalShutdownException):
        rclpy.try_shutdown()
        return 0
    except Exception:
        if rclpy.ok():
            raise
        return 0  # a signal ended the context in the middle of it
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    for other in others(node):
        executor.add_node(other)
    with contextlib.suppress(KeyboardInterrupt, ExternalShutdownException):
        _spin(node, executor, lambda: finished(node))
    # A launcher and the terminal often both send SIGINT: the second must not cut the cleaning up short. And rclpy's
    # thread, which ends every context some time after the signal, must not end one that `close` makes.
    with contextlib.suppress(KeyboardInterrupt):
        uninstall_signal_handlers()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    stopped = close(node)
    executor.shutdown(timeout_sec=1.0)
    node.destroy_node()
    rclpy.try_shutdown()
    if not stopped:
        print(f"{name}: a thread did not stop in time; leaving without it", file=sys.stderr, flush=True)
        os._exit(1)  # the interpreter's own exit would abort in a thread that hangs inside a device driver
    if failure(node):
        print(f"{name}: {failure(node)}", file=sys.stderr)
        return 2
    return 0


def _spin(node: Node, executor: Executor, finished: Callable[[], bool]) -> None:
    """An exception in a callback is logged, and the node lives on."""
    while rclpy.ok() and not finished():
        try:
            executor.spin_once(timeout_sec=_PERIOD_S)
        except (KeyboardInterrupt, ExternalShutdownException):
            raise
        except Exception:
            if not rclpy.ok():  # a signal ended the context in the middle of it
                return
            node.get_logger().error(f"a callback failed:\n{traceback.format_exc()}", throttle_duration_sec=5.0)


def _first_sentence(error: Exception) -> str:
    """Without the positions in C files that rcl appends."""
    return str(error).split(", at ")[0]
