# SPDX-License-Identifier: Apache-2.0
"""A rule and a drafter of another package, each one file, are found by name and decode in the real engine."""

import logging
import subprocess
import sys
from importlib import metadata

import pytest
from support.draft_heads import policy_with_random_head
from support.pipelines import frame
from support.seams import other_package  # noqa: F401  (a fixture)

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import Target
from specvla_ros.settings.registry import Registry
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

PICTURES = (1, 1, 2, 2, 3, 3)  # each comes again: what the last action was is then right


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=3, hidden_size=64, layers=1)


def actions(policy: Target, settings: EngineSettings) -> list[Action]:
    engine = Engine(policy, settings)
    ended = [engine.act(frame(i, picture)) for i, picture in enumerate(PICTURES, start=1)]
    assert all(isinstance(each, Action) for each in ended)
    return ended  # type: ignore[return-value]


@pytest.mark.usefixtures("other_package")
def test_a_rule_of_another_package_is_chosen_by_name_with_its_own_settings(policy: Target) -> None:
    draft = adjusted(DraftSettings(), temporal=True)
    plain, spec = actions(policy, EngineSettings("ar")), actions(policy, EngineSettings("spec", draft=draft))
    assert max(max(each.record.accept_lengths) for each in spec) > 3
    for depth in (1, 3):
        chosen = engine_settings_from(
            mode="spec",
            assignments=[
                "acceptance.rule:=first_only",
                f"acceptance.first_only.depth:={depth}",
                "draft.temporal:=true",
            ],
        )
        ours = actions(policy, chosen)
        assert [each.tokens for each in ours] == [each.tokens for each in plain]
        assert {each.record.acceptance for each in ours} == {"first_only"}
        assert max(max(each.record.accept_lengths) for each in ours) == depth


@pytest.mark.usefixtures("other_package")
def test_a_drafter_of_another_package_is_asked_for_by_its_own_settings(policy: Target) -> None:
    alone = adjusted(DraftSettings(head="none"), **{"repeat_last.times": 3})
    engine = Engine(policy, EngineSettings("spec", draft=alone))
    assert engine.describe()["drafts"] == "repeat_last"
    plain, ours = actions(policy, EngineSettings("ar")), actions(policy, EngineSettings("spec", draft=alone))
    assert [each.tokens for each in ours] == [each.tokens for each in plain]
    assert {nodes for each in ours for nodes in each.record.tree_nodes} == {1, 2, 3, 4}, "down to what is missing"
    beside = adjusted(DraftSettings(nodes=12, top_k=2, depth=3), temporal=True, **{"repeat_last.times": 3})
    assert Engine(policy, EngineSettings("spec", draft=beside)).drafter.sources == ("temporal", "repeat_last", "head")
    ours = actions(policy, EngineSettings("spec", draft=beside))
    assert [each.tokens for each in ours] == [each.tokens for each in plain]
    assert max(nodes for each in ours for nodes in each.record.tree_nodes) <= 12


@pytest.mark.usefixtures("other_package")
def test_drafters_are_told_what_acceptance_tolerates_whenever_it_changes(policy: Target) -> None:
    draft = adjusted(DraftSettings(head="none"), **{"repeat_last.times": 1})
    acceptance = AcceptanceSettings("bin_distance", bins=(3,), gripper_bins=1)
    engine = Engine(policy, EngineSettings("spec", draft=draft, acceptance=acceptance))
    engine.set_acceptance(AcceptanceSettings("bin_distance", bins=(5,)))
    (told,) = (drafter.tolerances for drafter in engine.drafter.by_name.values())  # type: ignore[attr-defined]
    assert told == [(3,) * 6 + (1,), (5,) * 6 + (0,)]


def test_without_the_package_its_names_are_refused() -> None:
    with pytest.raises(UserError, match=r"acceptance\.rule is 'first_only', but it must be one of: strict"):
        AcceptanceSettings("first_only")
    with pytest.raises(UserError, match=r"there is no parameter 'draft\.repeat_last\.times'"):
        adjusted(DraftSettings(), **{"repeat_last.times": 3})


def test_a_package_that_cannot_be_loaded_is_logged_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = metadata.EntryPoints([metadata.EntryPoint("broken", "no_such_module", "specvla_ros.rules")])
    monkeypatch.setattr(metadata, "entry_points", lambda group: points.select(group=group))
    registry = Registry("specvla_ros.rules", [])
    with caplog.at_level(logging.WARNING):
        assert registry.names() == ()
    assert "'broken' of no_such_module cannot be loaded" in caplog.text


def test_two_of_one_name_are_refused() -> None:
    registry = Registry("specvla_ros.rules", [])
    registry.register("twice")(lambda: None)
    with pytest.raises(ValueError, match="two entries named 'twice'"):
        registry.register("twice")(lambda: None)


def test_settings_are_read_without_torch() -> None:
    """It takes seconds to import, and where it is missing a node says so instead of dying."""
    code = "import sys; from specvla_ros.engine.settings import EngineSettings; EngineSettings('specpipe')"
    assert subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]).returncode == 0
