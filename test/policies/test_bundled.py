# SPDX-License-Identifier: Apache-2.0
"""The policies that come with the package, and how they are named."""

from pathlib import Path

import pytest

from specvla_ros.errors import UserError
from specvla_ros.policies import bundled
from specvla_ros.policies.bundled import DECODING_FILE, bundled_names, bundled_policy, find_policy, nano_policy


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("nano", "digits", "unfinished"):
        (tmp_path / "shipped" / name).mkdir(parents=True)
        (tmp_path / "shipped" / name / "config.json").touch()
    for name in ("nano", "digits"):
        (tmp_path / "shipped" / name / "model.safetensors").touch()
    (tmp_path / "shipped" / "digits" / DECODING_FILE).touch()
    monkeypatch.setattr(bundled, "__file__", str(tmp_path / "shipped" / "bundled.py"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "shipped"


def test_a_name_is_a_bundled_policys_where_no_directory_has_it(shipped: Path) -> None:
    assert bundled_names() == ("digits", "nano")
    assert find_policy(None) == (shipped / "nano", None)
    assert find_policy(Path("nano")) == (shipped / "nano", None)
    assert find_policy(Path("digits")) == (shipped / "digits", shipped / "digits" / DECODING_FILE)
    for other in (Path("unfinished"), Path("some/digits"), Path("digits/nano"), shipped / "digits"):
        assert find_policy(other) == (other, None)
    Path("digits").mkdir()
    assert find_policy(Path("digits")) == (Path("digits"), None)


def test_one_without_weights_says_what_to_do(shipped: Path) -> None:
    (shipped / "nano" / "model.safetensors").unlink()
    for missing in (nano_policy, lambda: bundled_policy("unfinished"), lambda: find_policy(None)):
        with pytest.raises(UserError, match="name a checkpoint with --policy"):
            missing()
