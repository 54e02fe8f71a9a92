# SPDX-License-Identifier: Apache-2.0
"""The policies that come with the package, and how they are named."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from support.nightly import nightly_but

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled import policies as bundled
from specvla_ros.lab.bundled.policies import DECODING_FILE, bundled_names, bundled_policy, find_policy, nano_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.models.checkpoint import load_target
from specvla_ros.policy import Policy


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
    for other in (Path("some/digits"), Path("digits/nano"), shipped / "digits"):
        assert find_policy(other) == (other, None)
    with pytest.raises(UserError, match="is neither a folder nor one of the bundled policies: digits, nano"):
        find_policy(Path("unfinished"))
    Path("digits").mkdir()
    assert find_policy(Path("digits")) == (Path("digits"), None)


def test_one_without_weights_says_what_to_do(shipped: Path) -> None:
    (shipped / "nano" / "model.safetensors").unlink()
    for missing in (nano_policy, lambda: bundled_policy("unfinished"), lambda: find_policy(None)):
        with pytest.raises(UserError, match="name a checkpoint with --policy"):
            missing()


@pytest.mark.parametrize("name", nightly_but(lambda name: name == "nano", bundled_names()))
def test_a_bundled_policy_is_decoded_as_it_says_and_loses_nothing(name: str) -> None:
    directory, decoding = find_policy(Path(name))
    assert (directory / "README.md").read_text(encoding="utf-8").startswith("# ")
    policy = load_target(directory, device="cpu")
    chosen = engine_settings_from(params_file=decoding) if decoding is not None else EngineSettings("spec")
    alone = replace(chosen, mode="ar")
    assert chosen.drafts and chosen.acceptance.rule == "strict"
    drafting, plain = Engine(policy, chosen), Engine(policy, alone)
    forwards = []
    for stamp_ns, frame in enumerate(islice(simulation_source(policy, 4000, engine=chosen), 4), start=1):
        seen = replace(frame, stamp_ns=stamp_ns * 10**8)
        ours, theirs = drafting.act(seen), plain.act(seen)
        assert isinstance(ours, Action) and isinstance(theirs, Action)
        assert ours.tokens == theirs.tokens
        forwards.append(ours.record.forwards / theirs.record.forwards)
    # Without a head, the previous action is a poor draft while the joints speed up.
    assert sum(forwards) / len(forwards) < (1.0 if name in ("joints", "so101") else 0.7)


def test_a_bundled_name_given_as_a_folder_is_answered_with_its_folder() -> None:
    """Only commands know the names: a robot needs no laboratory."""
    with pytest.raises(UserError, match=f"nano does not exist; .*of that name it is {re.escape(str(nano_policy()))}$"):
        Policy.load("nano")
    with pytest.raises(UserError, match=r"holds config.json$"):
        Policy.load("nanos")
