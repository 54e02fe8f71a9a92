# SPDX-License-Identifier: Apache-2.0
"""The policy node's status on /diagnostics, with causes in words."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus

from specvla_ros.engine.outcome import DropCounter, DropReason
from specvla_ros.errors import shortened
from specvla_ros.ros.node import make_status
from specvla_ros.ros.policy.inputs import Instruction

# Not faults: normal for a queue of length one, or requested.
_NORMAL = frozenset(
    {DropReason.SUPERSEDED, DropReason.OVERTAKEN, DropReason.EPOCH_CHANGED, DropReason.MODE_CHANGED, DropReason.PAUSED}
)
_INPUT_FAULTS = (
    DropReason.BAD_INSTRUCTION,
    DropReason.NO_INSTRUCTION,
    DropReason.BAD_IMAGE,
    DropReason.BAD_STAMP,
    DropReason.INCOMPLETE,
    DropReason.OUT_OF_ORDER,
    DropReason.STALE,
)
_INFERENCE_FAULTS = (
    DropReason.ENGINE_FAULT,
    DropReason.NOT_FINITE,
    DropReason.NOT_AN_ACTION,
    DropReason.BROKEN_OFF,
    DropReason.TOO_OLD,
)

_LOG_PERIOD_S = 5.0  # min time between two log messages of one reason
_STAMPS = 51  # number of newest images whose stamps' gaps show losses
_FEWEST_GAPS = 10
_PAUSE_NS = 2 * 10**9  # gap between two stamps after which a camera counts as started again
_TRANSPORTS = ("raw", "compressed")
_LATENCIES = 500  # number of newest actions for the percentiles
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class RecentDrops:
    """Drops since the last diagnostics: number and last detail by reason."""

    counts: dict[DropReason, int]
    details: dict[DropReason, str]

    def worst(self, reasons: tuple[DropReason, ...]) -> str:
        """The most frequent of `reasons` in words; empty if none occurred."""
        present = [reason for reason in reasons if self.counts.get(reason)]
        if not present:
            return ""
        worst = max(present, key=lambda reason: self.counts[reason])
        detail = self.details[worst]
        return f"{self.counts[worst]} dropped as {worst.value}{': ' if detail else ''}{detail}"


class DropLedger:
    """Counts drops from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_activation = DropCounter()
        self._recent = DropCounter()
        self._details: dict[DropReason, str] = {}
        self._not_logged = DropCounter()
        self._logged_s: dict[DropReason, float] = {}

    def add(self, reason: DropReason, detail: str = "") -> str | None:
        """Counts one drop. Returns a message if one is due."""
        with self._lock:
            self._since_activation.add(reason)
            self._recent.add(reason)
            self._details[reason] = detail
            if reason in _NORMAL:
                return None
            now_s = time.monotonic()
            if now_s - self._logged_s.get(reason, -math.inf) < _LOG_PERIOD_S:
                self._not_logged.add(reason)
                return None
            self._logged_s[reason] = now_s
            not_logged, self._not_logged.counts[reason] = self._not_logged.counts[reason], 0
        more = f" ({not_logged} more since the last message)" if not_logged else ""
        return f"frame dropped as {reason.value}{': ' if detail else ''}{detail}{more}"

    def since_activation(self) -> dict[str, int]:
        with self._lock:
            return self._since_activation.by_name()

    def take_recent(self) -> RecentDrops:
        with self._lock:
            counts, self._recent = self._recent.counts, DropCounter()
            return RecentDrops(counts, dict(self._details))


def not_loaded_status() -> DiagnosticStatus:
    """The status of a node without a policy."""
    return make_status(DiagnosticStatus.WARN, "no policy loaded; configure the node")


def loaded_status(description: Mapping[str, str]) -> DiagnosticStatus:
    """The status of a loaded policy; a warning if it decodes plainly for lack of a drafter."""
    if "decode.fallback" in description:
        return make_status(DiagnosticStatus.WARN, "policy loaded, without drafts: decoding plainly", description)
    return make_status(DiagnosticStatus.OK, "policy loaded", description)


def images_lost(stamps_ns: Sequence[int]) -> str:
    """Warning if the stamps show that a camera takes far more images than arrive; empty if it does not.

    When images get lost, the smallest gaps still equal the camera's period, but the mean gap is longer. The longest
    tenth is ignored, so that a camera may pause.
    """
    gaps_s = np.diff(np.array(stamps_ns, dtype=np.int64)) * 1e-9
    gaps_s = np.sort(gaps_s[gaps_s > 0])
    if len(gaps_s) < _FEWEST_GAPS:
        return ""
    tenth = len(gaps_s) // 10
    period_s, mean_s = gaps_s[tenth], gaps_s[: len(gaps_s) - tenth].mean()
    if mean_s < 2 * period_s:
        return ""
    return (
        f"images arrive at {1 / mean_s:.1f} Hz, but their stamps show a camera rate of {1 / period_s:.1f} Hz: the "
        "others are lost in transit; publish images reliably, smaller or compressed, or reduce the load of this "
        "computer"
    )


class InputHealth:
    """Arrival and faults of the images and the instruction.

    Args:
        cameras: the names of several cameras, the first of which leads; empty: there is a single one.
    """

    def __init__(self, cameras: Sequence[str] = ()) -> None:
        self._lead = cameras[0] if cameras else ""
        ways = [f"{camera}_{way}" for camera in cameras for way in _TRANSPORTS] if cameras else [*_TRANSPORTS]
        self._leading = frozenset(ways[: len(_TRANSPORTS)])
        self._images = dict.fromkeys(ways, 0)
        self._bad_beside = 0
        self._age_s = float("nan")
        self._stamps_ns: deque[int] = deque(maxlen=_STAMPS)
        self._last_image_s: float | None = None  # of the leading camera
        self._period_began_s = time.monotonic()
        self.several = ""  # the camera that has several publishers, in words; empty: none
        self.grey = ""  # the cameras whose images are grey, in words; empty: none
        self.sources = ""  # the topics of images and their publishers, in words; empty: not looked up yet

    def add_image(self, transport: str) -> None:
        """Counts an arriving image, valid or not. With several cameras `transport` begins with the camera's name."""
        self._images[transport] += 1
        if transport in self._leading:
            self._last_image_s = time.monotonic()

    def add_bad_beside(self) -> None:
        """Counts a dropped image of a camera that does not lead. No frame ends with it."""
        self._bad_beside += 1

    def add_frame(self, stamp_ns: int, age_s: float) -> None:
        """Records the stamp of a decoded image, and its age at receipt. Of those before a pause none is lost."""
        if self._stamps_ns and stamp_ns - self._stamps_ns[-1] > _PAUSE_NS:
            self._stamps_ns.clear()
        self._stamps_ns.append(stamp_ns)
        self._age_s = age_s

    def status(self, active: bool, instruction: Instruction, drops: RecentDrops) -> DiagnosticStatus:
        """The status; starts a new period for the rates."""
        now_s = time.monotonic()
        elapsed_s, self._period_began_s = max(now_s - self._period_began_s, 1e-3), now_s
        images, self._images = self._images, dict.fromkeys(self._images, 0)
        bad_beside, self._bad_beside = self._bad_beside, 0
        # Only the leading camera's images become frames: without them the others' are of no use.
        arrived = sum(count for transport, count in images.items() if transport in self._leading)
        values = {
            "instruction": shortened(instruction.text) or "(none)",
            **{f"{transport}_hz": f"{count / elapsed_s:.1f}" for transport, count in images.items()},
            "image_age_s": f"{self._age_s:.3f}",
            **{f"dropped_{reason.value}": drops.counts[reason] for reason in _INPUT_FAULTS},
        }
        if instruction.problem:
            message = f"the instruction was refused: {instruction.problem}"
            return make_status(DiagnosticStatus.ERROR, message, values)
        if not active:
            return make_status(DiagnosticStatus.OK, "not active", values)
        if self.several:
            return make_status(DiagnosticStatus.ERROR, self.several, values)
        worst = drops.worst(_INPUT_FAULTS)
        if worst:
            lost_all = sum(drops.counts[reason] for reason in _INPUT_FAULTS) - bad_beside >= arrived
            return make_status(DiagnosticStatus.ERROR if lost_all else DiagnosticStatus.WARN, worst, values)
        if arrived:
            worse = images_lost(self._stamps_ns) or self.grey
            level = DiagnosticStatus.WARN if worse else DiagnosticStatus.OK
            return make_status(level, worse or "images arrive", values)
        since = "since activation" if self._last_image_s is None else f"for {now_s - self._last_image_s:.1f} s"
        topics = f"; topics: {self.sources}" if self.sources else ""
        of = f" of '{self._lead}'" if self._lead else ""
        what = f"no image{of} {since}: check the topic's name and the camera{topics}"
        return make_status(DiagnosticStatus.STALE, what, values)


class InferenceHealth:
    """Actions per second, latency, and faults of the policy itself; reported by the inference thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions = 0
        self._latencies_s: deque[float] = deque(maxlen=_LATENCIES)
        self._action_dt = math.inf
        self._fault = ""
        self._period_began_s = time.monotonic()

    def add_action(self, latency_s: float, action_dt: float) -> None:
        with self._lock:
            self._actions += 1
            self._latencies_s.append(latency_s)
            self._action_dt = action_dt

    def set_fault(self, what: str) -> None:
        with self._lock:
            self._fault = what

    def status(self, idle: str, drops: RecentDrops) -> DiagnosticStatus:
        """The status; starts a new period. `idle`: why no actions are wanted, such as "paused"; empty: they are."""
        with self._lock:
            now_s = time.monotonic()
            elapsed_s, self._period_began_s = max(now_s - self._period_began_s, 1e-3), now_s
            actions, self._actions = self._actions, 0
            fault, self._fault = self._fault, ""
            latencies_s, action_dt = [*self._latencies_s], self._action_dt
        percentiles_s = np.percentile(latencies_s, _PERCENTILES).tolist() if latencies_s else []
        values: dict[str, object] = {"action_hz": f"{actions / elapsed_s:.2f}"}
        values |= {f"latency_p{p}_s": f"{each:.4f}" for p, each in zip(_PERCENTILES, percentiles_s, strict=False)}
        values |= {f"dropped_{reason.value}": drops.counts[reason] for reason in _INFERENCE_FAULTS}
        values["dropped_superseded"] = drops.counts[DropReason.SUPERSEDED]
        if fault:
            return make_status(DiagnosticStatus.ERROR, f"the inference thread continued after a fault: {fault}", values)
        worst = drops.worst(_INFERENCE_FAULTS)
        if worst:
            return make_status(DiagnosticStatus.ERROR, worst, values)
        if idle:
            return make_status(DiagnosticStatus.OK, idle, values)
        if not actions:
            return make_status(DiagnosticStatus.OK, "no action in this period", values)
        median_s = percentiles_s[0]
        if median_s > action_dt:
            what = (
                f"the median latency, {median_s:.3f} s, is longer than action_dt, {action_dt:g} s: an action arrives "
                "after its own period; choose a faster decode.mode or a smaller policy, or use the driver with "
                "compensate: image_goal"
            )
            return make_status(DiagnosticStatus.WARN, what, values)
        return make_status(DiagnosticStatus.OK, "actions are published", values)
