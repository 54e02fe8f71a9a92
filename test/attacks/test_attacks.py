# SPDX-License-Identifier: Apache-2.0
"""Attacks at a small size: nothing raises but a UserError, nothing acts otherwise in silence, nothing takes long."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.bags import attack_bombs, attack_bytes, attack_descriptions, layouts
from attacks.checkpoints import attack_files, attack_json
from attacks.commands import attack_commands, options
from attacks.driver import attack_driver
from attacks.guard import attack_guard, attack_pairs
from attacks.images import attack_images
from attacks.joint_driver import attack_joint_driver
from attacks.joint_guard import attack_joint_guard
from attacks.tally import Silent, Tally
from support.checkpoints import shard, write_checkpoint
from support.nightly import nightly_but

from specvla_ros.control.guard.settings import JOINT_OUTPUTS, Output
from specvla_ros.errors import UserError

pytestmark = pytest.mark.attack
CHUNK = Output.JOINT_TRAJECTORY_CHUNK.value
SEEDS = (1, pytest.param(2, marks=pytest.mark.nightly))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")
    shard(directory)
    return directory


def unharmed(tally: Tally, tried: int) -> None:
    assert tally.tried == tried
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.outcomes["refused"] + tally.outcomes["damage told"] > tried / 4


@pytest.mark.parametrize("attack", [attack_json, attack_files])
@pytest.mark.parametrize("seed", SEEDS)
def test_checkpoints(checkpoint: Path, tmp_path: Path, attack: Callable[..., Tally], seed: int) -> None:
    unharmed(attack(checkpoint, tmp_path, limit=80, seed=seed), 80)


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return layouts(tmp_path_factory.mktemp("bags"))


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_bags(bags: dict[str, Path], tmp_path: Path, seed: int) -> None:
    unharmed(attack_bytes(bags, tmp_path, limit=100, seed=seed), 100)


def test_descriptions_of_bags(bags: dict[str, Path], tmp_path: Path) -> None:
    tally = attack_descriptions(bags, tmp_path, limit=100, seed=1)
    assert tally.tried == 100
    assert not tally.failures, "\n".join(tally.failures)


def test_bombs(tmp_path: Path) -> None:
    tally = attack_bombs(tmp_path)
    assert tally.outcomes["refused"] + tally.outcomes["damage told"] == tally.tried > 30
    assert tally.peak_bytes < 512 << 20


def test_images() -> None:
    tally = attack_images(limit=300, seed=1)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.outcomes["refused"] > 100 and tally.outcomes["decoded"] > 5


def test_commands_in_a_group_are_attacked_too() -> None:
    found = {command for command, _, _ in options()}
    assert {"robot check", "robot stops", "simulate"} <= found and "robot" not in found


@pytest.mark.nightly
def test_commands(tmp_path: Path) -> None:
    tally = attack_commands(tmp_path, limit=12, seed=3)
    assert tally.tried == 12
    assert not tally.failures, "\n".join(tally.failures)


@pytest.mark.parametrize(
    "attack", nightly_but(lambda attack: attack is attack_guard, [attack_driver, attack_guard, attack_pairs])
)
def test_nodes_of_a_robot(tmp_path: Path, attack: Callable[..., Tally]) -> None:
    tally = attack(tmp_path, int(os.environ["ROS_DOMAIN_ID"]), limit=3, seed=1)
    assert tally.tried >= 3
    assert not tally.failures, "\n".join(tally.failures)


def test_the_guard_of_joints(tmp_path: Path) -> None:
    tally = attack_joint_guard(tmp_path, int(os.environ["ROS_DOMAIN_ID"]), limit=2, seed=1)
    assert tally.tried == 3 * len(JOINT_OUTPUTS)
    assert not tally.failures, "\n".join(tally.failures)


@pytest.mark.parametrize("output", nightly_but(lambda output: output == CHUNK, JOINT_OUTPUTS))
def test_the_driver_of_joints(tmp_path: Path, output: str) -> None:
    tally = attack_joint_driver(tmp_path, int(os.environ["ROS_DOMAIN_ID"]), limit=2, seed=1, outputs=[output])
    assert tally.tried == 2 * 6
    assert not tally.failures, "\n".join(tally.failures)


def test_a_tally_tells_what_failed() -> None:
    def fail(error: BaseException) -> Callable[[], str]:
        def attack() -> str:
            raise error

        return attack

    tally = Tally()
    tally.judge("good", lambda: "same")
    tally.judge("refused", fail(UserError("no")))
    tally.judge("crash", fail(ZeroDivisionError("zero")))
    tally.judge("panic", fail(SystemExit(3)))
    tally.judge("silent", fail(Silent("other")))
    tally.judge("bomb", lambda: str(len(bytearray(600 << 20)))[:0] or "same")
    assert dict(tally.outcomes) == {"same": 1, "refused": 1, "traceback": 2, "silent": 1, "memory": 1}
    assert (tally.tried, tally.failed) == (6, 4)
    assert "crash: traceback" in tally.failures[0]
