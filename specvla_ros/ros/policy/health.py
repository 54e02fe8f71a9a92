"""What /diagnostics says of the policy node, with causes in words."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from specvla_ros.engine.outcome import DropCounter, DropReason
from specvla_ros.ros.qos import DIAGNOSTICS

# These are how a queue of length one works, not faults.
_NORMAL = frozenset({DropReason.SUPERSEDED, DropReason.OVERTAKEN, DropReason.EPOCH_CHANGED})


@dataclass(frozen=True)
class RecentDrops:
    """Drops since the last diagnostics: how many of each reason, and the last detail of each."""

    counts: dict[DropReason, int]
    details: dict[DropReason, str]

    def worst(self, reasons: tuple[DropReason, ...]) -> str:
        """The most frequent of `reasons` in words; empty when there was none."""
        present = [reason for reason in reasons if self.counts.get(reason)]
        if not present:
            return ""
        reason = max(present, key=lambda each: self.counts[each])
        return f"{self.counts[reason]} dropped as {reason.value}: {self.details[reason]}"


class DropLedger:
    """Counts drops from any thread.

    Args:
        log_period_s: at most one log message per reason in this time.
        monotonic_s: the time for it.
    """

    def __init__(self, log_period_s: float = 5.0, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._log_period_s = log_period_s
        self._monotonic_s = monotonic_s
        self._since_activation = DropCounter()
        self._recent = DropCounter()
        self._details: dict[DropReason, str] = {}
        self._silenced = DropCounter()
        self._logged_s: dict[DropReason, float] = {}

    def add(self, reason: DropReason, detail: str = "") -> str | None:
        """Counts one drop and returns what to log, if it is time to."""
        with self._lock:
            self._since_activation.add(reason)
            self._recent.add(reason)
            self._details[reason] = detail
            if reason in _NORMAL:
                return None
            now_s = self._monotonic_s()
            if now_s - self._logged_s.get(reason, -self._log_period_s) < self._log_period_s:
                self._silenced.add(reason)
                return None
            self._logged_s[reason] = now_s
            silenced, self._silenced.counts[reason] = self._silenced.counts[reason], 0
        more = f" ({silenced} more since the last message)" if silenced else ""
        return f"frame dropped as {reason.value}: {detail}{more}"

    def since_activation(self) -> dict[str, int]:
        """Counts by name, every reason included."""
        with self._lock:
            return self._since_activation.by_name()

    def take_recent(self) -> RecentDrops:
        """Drops since the last call."""
        with self._lock:
            counts, self._recent = self._recent.counts, DropCounter()
            return RecentDrops(counts, dict(self._details))

    def start_over(self) -> None:
        """Counts from zero, as on activation."""
        with self._lock:
            self._since_activation = DropCounter()
            self._recent = DropCounter()


class Level(IntEnum):
    """As in diagnostic_msgs/DiagnosticStatus."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Status:
    """What one task has to say: how bad it is, why, and the figures."""

    level: Level
    message: str
    values: Mapping[str, object] = field(default_factory=dict)


class DiagnosticsPublisher:
    """Publishes the status of every task at once, periodically.

    Args:
        node: its name begins every task's name.
        period_s: on the steady clock: a simulator that stands still must not silence the diagnostics.
        tasks: by name.
    """

    def __init__(self, node: Node, period_s: float, tasks: Mapping[str, Callable[[], Status]]) -> None:
        self._node = node
        self._tasks = tasks
        self._publisher = node.create_publisher(DiagnosticArray, "/diagnostics", DIAGNOSTICS)
        self._timer = node.create_timer(period_s, self.publish, clock=Clock(clock_type=ClockType.STEADY_TIME))

    def publish(self) -> None:
        """Publishes now."""
        array = DiagnosticArray()
        array.header.stamp = self._node.get_clock().now().to_msg()
        array.status = [self._message(name, task()) for name, task in self._tasks.items()]
        self._publisher.publish(array)

    def _message(self, name: str, status: Status) -> DiagnosticStatus:
        return DiagnosticStatus(
            level=bytes([status.level]),
            name=f"{self._node.get_name()}: {name}",
            message=status.message,
            hardware_id=self._node.get_fully_qualified_name(),
            values=[KeyValue(key=key, value=str(value)) for key, value in status.values.items()],
        )


INPUT_FAULTS = (
    DropReason.BAD_INSTRUCTION,
    DropReason.NO_INSTRUCTION,
    DropReason.BAD_IMAGE,
    DropReason.BAD_STAMP,
    DropReason.OUT_OF_ORDER,
    DropReason.STALE,
)
INFERENCE_FAULTS = (DropReason.ENGINE_FAULT, DropReason.NOT_FINITE, DropReason.NOT_AN_ACTION)

_LATENCIES = 500
_NOT_LOADED = Status(Level.WARN, "no policy loaded; configure the node")


class ModelHealth:
    """Whether a policy is loaded, and which."""

    def __init__(self) -> None:
        self._status = _NOT_LOADED

    def set_loading(self, what: str, fraction: float) -> None:
        """Reports progress."""
        self._status = Status(Level.WARN, f"loading: {what} ({fraction:.0%})")

    def set_failed(self, reason: str) -> None:
        """Reports why there is no policy."""
        self._status = Status(Level.ERROR, reason)

    def set_loaded(self, description: Mapping[str, str]) -> None:
        """Reports the policy, and whether it decodes plainly because there was nothing to draft with."""
        if "decode.fallback" in description:
            self._status = Status(Level.WARN, "policy loaded, without drafts: decoding plainly", description)
        else:
            self._status = Status(Level.OK, "policy loaded", description)

    def set_unloaded(self) -> None:
        """Reports that the policy was let go."""
        self._status = _NOT_LOADED

    def status(self) -> Status:
        """For /diagnostics."""
        return self._status


class InputHealth:
    """Whether images and an instruction come in, and what is wrong with them."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic_s = monotonic_s
        self._images = {"raw": 0, "compressed": 0}
        self._age_s = float("nan")
        self._last_image_s: float | None = None
        self._asked_s = monotonic_s()

    def add_image(self, transport: str) -> None:
        """Counts an image, whatever becomes of it."""
        with self._lock:
            self._images[transport] += 1
            self._last_image_s = self._monotonic_s()

    def set_age(self, age_s: float) -> None:
        """Notes the age at which an image was received."""
        with self._lock:
            self._age_s = age_s

    def start_over(self) -> None:
        """Forgets all images, as on activation."""
        with self._lock:
            self._images = dict.fromkeys(self._images, 0)
            self._age_s, self._last_image_s = float("nan"), None

    def status(self, active: bool, instruction: str, instruction_problem: str, drops: RecentDrops) -> Status:
        """For /diagnostics; begins a new period for the rates."""
        with self._lock:
            now_s = self._monotonic_s()
            elapsed_s, self._asked_s = max(now_s - self._asked_s, 1e-3), now_s
            rates = {f"{transport}_hz": f"{count / elapsed_s:.1f}" for transport, count in self._images.items()}
            arrived = sum(self._images.values())
            self._images = dict.fromkeys(self._images, 0)
            silent_s = None if self._last_image_s is None else now_s - self._last_image_s
            age_s = self._age_s
        values = {
            "instruction": instruction or "(none)",
            **rates,
            "image_age_s": f"{age_s:.3f}",
            **{f"dropped_{reason.value}": drops.counts[reason] for reason in INPUT_FAULTS},
        }
        if instruction_problem:
            return Status(Level.ERROR, f"the instruction was refused: {instruction_problem}", values)
        if not active:
            return Status(Level.OK, "not active", values)
        worst = drops.worst(INPUT_FAULTS)
        if worst:
            lost = sum(drops.counts[reason] for reason in INPUT_FAULTS)
            return Status(Level.ERROR if lost >= arrived else Level.WARN, worst, values)
        if arrived:
            return Status(Level.OK, "images arrive", values)
        if silent_s is None:
            return Status(Level.STALE, "no image since activation: check the topic's name and the camera", values)
        return Status(Level.STALE, f"no image for {silent_s:.1f} s: check the camera", values)


class InferenceHealth:
    """Actions per second, latency, and faults of the policy itself."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic_s = monotonic_s
        self._actions = 0
        self._latencies_s: deque[float] = deque(maxlen=_LATENCIES)
        self._fault = ""
        self._asked_s = monotonic_s()

    def add_action(self, latency_s: float) -> None:
        """Counts a published action."""
        with self._lock:
            self._actions += 1
            self._latencies_s.append(latency_s)

    def set_fault(self, what: str) -> None:
        """Notes an exception; it is reported once."""
        with self._lock:
            self._fault = what

    def start_over(self) -> None:
        """Forgets all figures, as on activation."""
        with self._lock:
            self._actions = 0
            self._latencies_s.clear()
            self._fault = ""

    def status(self, active: bool, drops: RecentDrops) -> Status:
        """For /diagnostics; begins a new period for the rate."""
        with self._lock:
            now_s = self._monotonic_s()
            elapsed_s, self._asked_s = max(now_s - self._asked_s, 1e-3), now_s
            actions, self._actions = self._actions, 0
            fault, self._fault = self._fault, ""
            latencies_s = np.array(self._latencies_s)
        values: dict[str, object] = {"action_hz": f"{actions / elapsed_s:.2f}"}
        if len(latencies_s):
            for percent, value in zip((50, 95, 99), np.percentile(latencies_s, (50, 95, 99)), strict=True):
                values[f"latency_p{percent}_s"] = f"{value:.4f}"
        values |= {f"dropped_{reason.value}": drops.counts[reason] for reason in INFERENCE_FAULTS}
        values["dropped_superseded"] = drops.counts[DropReason.SUPERSEDED]
        if fault:
            return Status(Level.ERROR, f"a fault was survived: {fault}", values)
        worst = drops.worst(INFERENCE_FAULTS)
        if worst:
            return Status(Level.ERROR, worst, values)
        if not active:
            return Status(Level.OK, "not active", values)
        return Status(Level.OK, "actions are published" if actions else "no action in this period", values)
