# SPDX-License-Identifier: Apache-2.0
"""Every recording below what a user gives is read, or named."""

import logging
import shutil
from pathlib import Path

import pytest
from support import bags

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import bags_in, find_bags
from specvla_ros.lab.bags.reader import open_bag


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """Two bags."""
    for name in ("a", "b"):
        bags.write_bag(tmp_path / "day" / name, bags.episode(1))
    return tmp_path / "day"


def names(*given: Path) -> list[str]:
    return [bag.name for bag in find_bags(given).bags]


def test_a_loose_file_beside_bags_is_one_more_bag(day: Path) -> None:
    bags.write_mcap(day / "loose.mcap", bags.episode(1))
    (day / "notes").mkdir()
    (day / "notes.txt").touch()
    (day / ".DS_Store").touch()
    found = find_bags([day])
    assert [bag.name for bag in found.bags] == ["a", "b", "loose.mcap"]
    assert found.left_out == (str(day / "notes"), str(day / "notes.txt"))
    assert names(day, day / "a", day / "loose.mcap") == ["a", "b", "loose.mcap"], "each once"


def test_recordings_side_by_side_are_as_many_bags(day: Path) -> None:
    (day / "two").mkdir()
    for name in ("left.mcap", "right.mcap"):
        bags.write_mcap(day / "two" / name, bags.episode(1))
    assert names(day) == ["a", "b", "left.mcap", "right.mcap"]
    assert names(day / "two") == ["left.mcap", "right.mcap"]
    with pytest.raises(UserError, match=r"holds several recordings, left\.mcap, right\.mcap: give one"):
        open_bag(day / "two")


def test_parts_of_one_recording_are_one_bag_unless_they_were_recorded_at_once(tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    entries = bags.episode(24)
    for part in range(2):
        bags.write_mcap(tmp_path / "split" / f"split_{part}.mcap", entries[24 * part : 24 * part + 24])
    assert names(tmp_path) == ["split"] and names(tmp_path / "split") == ["split"]
    with open_bag(tmp_path / "split") as bag:
        assert len(bag.files) == 2
    bags.write_mcap(tmp_path / "split" / "split_2.mcap", entries)
    with pytest.raises(UserError, match="overlap in time: they are several recordings; give each one separately"):
        open_bag(tmp_path / "split")


def test_what_a_bag_does_not_list_is_named(day: Path, caplog: pytest.LogCaptureFixture) -> None:
    bags.write_mcap(day / "a" / "a_1.mcap", bags.episode(1))
    shutil.copytree(day / "b", day / "a" / "copied")
    with caplog.at_level(logging.WARNING):
        assert [bag.name for bag in bags_in([day])] == ["a", "b"]
    for name in ("a_1.mcap", "copied"):
        assert f"left out: {day / 'a' / name} (bag a does not list it; give it separately)" in caplog.text
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        bags_in([day / "a"])
    assert "a_1.mcap" in caplog.text


def test_a_hidden_file_is_no_part_of_a_bag_and_is_named(day: Path) -> None:
    (day / "b" / "metadata.yaml").unlink()
    (day / "b" / "._b.mcap").write_bytes(b"of another system")
    with open_bag(day / "b") as bag:
        assert [file.name for file in bag.files] == ["b.mcap"]
    assert [each.partition(" ")[0] for each in find_bags([day]).left_out] == [str(day / "b" / "._b.mcap")]


def test_what_is_not_there_or_holds_no_bag_is_refused(day: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        find_bags([day, tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"no bags in .*empty: .*replay-a-bag.*`specvla collect` records simulated experts"
    ):
        find_bags([day, tmp_path / "empty"])
    (tmp_path / "empty" / "._x.mcap").touch()
    with pytest.raises(UserError, match=r"holds .mcap or .db3 files that are not hidden, as \._x.mcap is; .*`specvla"):
        find_bags([tmp_path / "empty"])
    next((day / "a").glob("*.mcap")).unlink()
    assert names(day) == ["a", "b"], "opening it says what it lacks"
