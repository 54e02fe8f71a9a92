# SPDX-License-Identifier: Apache-2.0
"""A running policy under hostile images and instructions, over real DDS.

A case is right where the message is refused or answered as it says, and a good image is answered after it. An action
of another instruction, or out of order, is wrong motion.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attacks.images import bombs, damaged_pictures
from attacks.process import Attacker, NodeProcess, attacker, ns_of, running, stamp
from attacks.tally import Silent, Tally
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.serialization import serialize_message
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String

from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.msg import DecodeStats, VlaAction
from specvla_ros.ros.qos import ACTION, CLOCK, DIAGNOSTICS

TAUGHT = ("lift the red cube", "lift the blue cube")
_SIDE = 64
_MUCH_TEXT = 20_000  # characters that no diagnosis and no log may hold of one message
_ENCODINGS = (
    *(
        "rgb8",
        "bgr8",
        "rgba8",
        "bgra8",
        "rgb16",
        "bgr16",
        "rgba16",
        "mono8",
        "mono16",
        "8UC1",
        "8UC3",
        "16UC1",
        "32FC1",
    ),
    *("64FC3", "bayer_rggb8", "bayer_grbg16", "yuv422", "yuv422_yuy2", "uyvy", "nv12", "nv21", "nv24", "h264", "jpeg"),
    *("", " ", "rgb8\0", "RGB8", "8UC4294967295", "x" * 10_000, "é🤖"),
)
_TEXTS = (
    *(f"{TAUGHT[0]}{end}" for end in (" </s>", "\0", ".", "\r\nOut:", " " * 10**5, f" {TAUGHT[0]}" * 50)),
    *(
        "",
        " ",
        "\n",
        "\0",
        f"\0{TAUGHT[0]}",
        TAUGHT[0].upper(),
        TAUGHT[0].replace(" ", "  "),
        "<s>",
        "<unk>",
        "<image>",
    ),
    *(
        "lift the purple cube",
        "rm -rf /",
        "%s%n",
        "{instruction}",
        "\x1b[31m",
        "\u202eebuc der",
        "é中🤖",
        "\ufffd",
        "a\nb",
    ),
    *("None", "In: What? Out:", "9" * 5000, "x" * 10**6, " " * 10**5),
)


class Robot(Attacker):
    """What a robot has around a policy: a camera, an instruction, and an eye on what comes out."""

    def __init__(self, other: Attacker, process: NodeProcess) -> None:
        super().__init__(other.node, other._executor)
        self.process = process
        self.actions: list[tuple[VlaAction, int]] = []  # with the time of its publication, by its sender's clock
        self.stats: DecodeStats | None = None
        self.longest = 0
        node = self.node
        node.create_subscription(VlaAction, "/policy/action", self._on_action, ACTION)
        node.create_subscription(DecodeStats, "/policy/decode_stats", self._on_stats, ACTION)
        node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, DIAGNOSTICS)
        self.images = node.create_publisher(Image, "/image", 1)
        self.compressed = node.create_publisher(CompressedImage, "/image/compressed", 1)
        self.instructions = node.create_publisher(String, "/instruction", 1)
        self.clock = node.create_publisher(Clock, "/clock", CLOCK)

    def good(self, ns: int) -> Image:
        """A picture that is right."""
        message = Image(height=_SIDE, width=_SIDE, encoding="rgb8", step=3 * _SIDE, data=bytes(3 * _SIDE * _SIDE))
        message.header.stamp = stamp(ns)
        return message

    def answered(self, ns: int) -> VlaAction | None:
        """The action of a picture."""
        return next((each for each, _ in reversed(self.actions) if ns_of(each.header.stamp) == ns), None)

    def act(self, *, tries: int = 100, now_ns: Callable[[], int] = time.time_ns) -> VlaAction:
        """The action of a good picture, one of some that are sent.

        Raises:
            RuntimeError: none comes.
        """
        first = now_ns()
        for _ in range(tries):
            self.images.publish(self.good(now_ns()))
            if self.until(lambda: self.actions and ns_of(self.actions[-1][0].header.stamp) >= first, 0.3):
                return self.actions[-1][0]
        raise RuntimeError(f"no action any more: {self.process.new_output()[-400:]}")

    @property
    def drops(self) -> int:
        """Frames dropped since activation, as of the newest action."""
        return sum(self.stats.drop_counts) if self.stats is not None else 0

    def instruct(self, text: str) -> None:
        """Gives a taught instruction, and waits for an action of it."""

        def follows() -> bool:
            self.instructions.publish(String(data=text))
            return self.act().instruction == text

        if not self.until(follows):
            raise RuntimeError(f"'{text}' is not followed")

    def _on_action(self, message: VlaAction, info: Any) -> None:
        self.actions.append((message, info["source_timestamp"]))

    def _on_stats(self, message: DecodeStats) -> None:
        self.stats = message

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        texts = [
            text for status in message.status for text in (status.message, *(pair.value for pair in status.values))
        ]
        self.longest = max(self.longest, *(len(text) for text in texts), 0)


@contextmanager
def policy(scratch: Path, domain: int, *, active: bool = True, **parameters: object) -> Iterator[Robot]:
    """The nano policy as a process, and the robot around it."""
    scratch.mkdir(parents=True, exist_ok=True)
    fake = scratch / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "gs").write_text(f"#!/bin/sh\ntouch {fake / 'started'}\n")  # whoever opens EPS starts it
    (fake / "gs").chmod(0o755)
    chosen = {
        "checkpoint": nano_policy(),
        "device": "cpu",
        "instruction": TAUGHT[0],
        "max_image_age_s": 5.0,
        **parameters,
    }
    with attacker(domain) as user:
        path = {"PATH": f"{fake}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        names = {key.replace("__", "."): value for key, value in chosen.items()}
        process = NodeProcess("policy", scratch / "policy.log", names, environment=path)
        with running(process):
            robot = Robot(user, process)
            if active:
                robot.activate("policy")
            yield robot


def attack_live_images(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Images and compressed images of every wrong kind, and bytes that are none.

    Args:
        scratch: directory for files.
        domain: of DDS.
        limit: number of cases, drawn at random; None: all.
        seed: of the drawing and the damage.
    """
    rng = random.Random(seed)
    cases = [*_wrong_images(), *_encodings(), *_wrong_stamps(), *_pictures(seed), *_bytes_of_images(rng)]
    if limit is not None:
        cases = rng.sample(cases, min(limit, len(cases)))
    with policy(scratch, domain) as robot:
        robot.act()
        tally = Tally(pid=str(robot.process.pid))
        for name, topic, message, may in cases:
            tally.judge(name, partial(_one_image, robot, scratch / "bin" / "started", topic, message, may))
    return tally


def _one_image(robot: Robot, started: Path, topic: str, message: Any, may_be_answered: bool) -> str:
    publisher = robot.compressed if topic == "compressed" else robot.images
    before, ns = robot.drops, None
    if not isinstance(message, bytes):
        if message.header.stamp == stamp(0) and message.header.frame_id != "stamp":
            message.header.stamp = stamp(time.time_ns())
        ns = message.header.stamp
    publisher.publish(message)
    robot.spin(0.1)
    robot.act()
    robot.process.check()
    if started.exists():
        raise Silent("a program of the PATH was started")
    wrong = ns is not None and any(action.header.stamp == ns for action, _ in robot.actions[-20:])
    del robot.actions[:-20]
    if wrong and not may_be_answered:
        raise Silent("it was answered")
    return "answered" if wrong else "refused" if robot.drops > before else "passed over"


def _wrong_images() -> Iterator[tuple[str, str, Any, bool]]:
    full = 3 * _SIDE * _SIDE
    sizes = (0, 1, _SIDE, 4000, 2**31, 2**32 - 1)
    for height, width, step in itertools.product(sizes, sizes, (0, 1, 3 * _SIDE, 2**32 - 1)):
        for data in (0, 1, full):
            right = data >= full and height == width == _SIDE and step == 3 * _SIDE
            fits = right or (width and height and 3 * width <= step and step * height == data)
            image = Image(height=height, width=width, step=step, encoding="rgb8", data=bytes(data))
            yield f"{height} x {width}, step {step}, {data} bytes", "raw", image, bool(fits)


def _encodings() -> Iterator[tuple[str, str, Any, bool]]:
    for encoding in _ENCODINGS:
        for factor in (0.5, 1, 2, 3, 4, 6, 8, 12, 24):
            step = int(_SIDE * factor)
            image = Image(height=_SIDE, width=_SIDE, step=step, encoding=encoding, data=b"\x7f" * (step * _SIDE))
            yield f"{encoding:.20} with {factor} bytes a pixel", "raw", image, True


def _wrong_stamps() -> Iterator[tuple[str, str, Any, bool]]:
    for sec, nanosec in itertools.product((-(2**31), -1, 0, 1, 1_600_000_000, 2**31 - 1), (0, 10**9, 2**32 - 1)):
        image = Image(height=_SIDE, width=_SIDE, step=3 * _SIDE, encoding="rgb8", data=bytes(3 * _SIDE * _SIDE))
        image.header.stamp.sec, image.header.stamp.nanosec, image.header.frame_id = sec, nanosec, "stamp"
        yield f"stamp {sec} s {nanosec} ns", "raw", image, False
    for offset_s in (-3600, -6, 0.5, 60, 10**6):
        image = Image(height=_SIDE, width=_SIDE, step=3 * _SIDE, encoding="rgb8", data=bytes(3 * _SIDE * _SIDE))
        image.header.stamp, image.header.frame_id = stamp(time.time_ns() + int(offset_s * 10**9)), "stamp"
        yield f"stamp {offset_s} s from now", "raw", image, offset_s == 0.5


def _pictures(seed: int) -> Iterator[tuple[str, str, Any, bool]]:
    for name, form, content in (*damaged_pictures(120, seed), next(bombs())):
        yield name, "compressed", CompressedImage(format=form.lower(), data=content), True
    rng = np.random.default_rng(seed)
    for form in ("", "jpeg", "png", "h264", "x" * 10_000, "rgb8; jpeg compressed bgr8"):
        for size in (0, 1, 100, 100_000):
            content = rng.integers(0, 256, size, np.uint8).tobytes()
            yield f"{size} random bytes as {form:.20}", "compressed", CompressedImage(format=form, data=content), False


def _bytes_of_images(rng: random.Random) -> Iterator[tuple[str, str, bytes, bool]]:
    image = Image(height=8, width=8, step=24, encoding="rgb8", data=bytes(192))
    whole = serialize_message(image)
    yield from ((f"cut at {at}", "raw", whole[:at], True) for at in range(4, len(whole), 9))
    for at in range(0, 44, 4):  # the head, and the lengths in it
        for value in (b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\0\0\0\0"):
            yield f"{value.hex()} at {at}", "raw", whole[:at] + value + whole[at + 4 :], True
    yield from ((f"{size} random bytes", "raw", b"\0\1\0\0" + rng.randbytes(size), True) for size in (1, 7, 40, 1000))


def attack_instructions(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Instructions that nobody taught, that are none, or that come in floods; arguments as of `attack_live_images`."""
    texts = [*_TEXTS] if limit is None else random.Random(seed).sample(_TEXTS, min(limit, len(_TEXTS)))
    whole = serialize_message(String(data=TAUGHT[1]))
    broken = [whole[:at] for at in (4, 6, 8, 12)] + [whole[:4] + size + whole[8:] for size in (b"\xff" * 4, b"\0" * 4)]
    broken += [whole[:8] + bytes([255, 254, 128, 0]) + whole[12:]]
    with policy(scratch, domain, diagnostics_period_s=0.2) as robot:
        robot.act()
        tally = Tally(pid=str(robot.process.pid))
        for text in texts:
            tally.judge(f"{text!r:.40}, {len(text)} characters", partial(_one_instruction, robot, text))
        for raw in broken:
            tally.judge(f"bytes {raw.hex():.40}", partial(_one_instruction, robot, raw))
        for count in (200, 1000):
            tally.judge(f"{count} changes", partial(_toggle, robot, count))
    return tally


def _one_instruction(robot: Robot, text: str | bytes) -> str:
    robot.instruct(TAUGHT[0])
    robot.longest = 0
    robot.instructions.publish(text if isinstance(text, bytes) else String(data=text))
    robot.spin(0.3)
    ns, before = time.time_ns(), robot.drops
    robot.images.publish(robot.good(ns))
    robot.spin(0.5)
    action = robot.answered(ns)
    # rclpy's own conversion ends a text at a NUL before it is sent.
    if action is not None and isinstance(text, str) and action.instruction != text.partition("\0")[0]:
        raise Silent(f"it still follows '{action.instruction:.40}'")
    robot.instruct(TAUGHT[1])
    said = robot.process.check()
    if len(said) > _MUCH_TEXT or robot.longest > _MUCH_TEXT:
        raise Silent(f"{len(said)} characters of log, {robot.longest} of a diagnosis")
    return "followed" if action is not None else "refused" if robot.drops > before else "passed over"


def _toggle(robot: Robot, count: int) -> str:
    """Each epoch has one instruction, and the last one stands."""
    robot.actions.clear()
    for number in range(count):
        robot.instructions.publish(String(data=TAUGHT[number % 2]))
        robot.images.publish(robot.good(time.time_ns()))
        robot.spin(0.005)
    last = TAUGHT[(count - 1) % 2]
    if not robot.until(lambda: robot.act().instruction == last):
        raise Silent(f"after {count} changes it does not follow the last one")
    if robot.act().instruction != last:
        raise Silent("it fell back to an earlier one")
    robot.process.check()
    check_order([action for action, _ in robot.actions])
    return "followed"


def check_order(actions: list[VlaAction]) -> None:
    """One instruction for an epoch, epochs and numbers in order; stamps too within an epoch."""
    meant: dict[int, str] = {}
    for before, after in itertools.pairwise(actions):
        if after.epoch < before.epoch or after.seq <= before.seq:
            raise Silent(f"epoch {after.epoch}, number {after.seq} after {before.epoch}, {before.seq}")
        if after.epoch == before.epoch and ns_of(after.header.stamp) <= ns_of(before.header.stamp):
            raise Silent("a picture was answered after a newer one")
    for action in actions:
        if meant.setdefault(action.epoch, action.instruction) != action.instruction:
            raise Silent(f"epoch {action.epoch} follows two instructions")
