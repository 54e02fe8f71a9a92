# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine, as the command line and Python callers give them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.engine.settings import MODES, EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.lab.files import write_parameters
from specvla_ros.settings.parameter import values_of, with_values
from specvla_ros.speculation.rules.registry import RULES
from specvla_ros.speculation.settings import PRESETS, AcceptanceSettings, DraftSettings, Tolerance

PROFILE = """
/**:
  ros__parameters:
    device: cpu
    decode:
      mode: spec
    draft.nodes: 16
    acceptance:
      rule: bin_distance
      bins: [1, 2, 3, 4, 5, 6, 0]
"""


def test_the_defaults_are_the_engines() -> None:
    assert engine_settings_from() == EngineSettings()
    assert engine_settings_from().mode == "auto"


def test_assignments_win_over_the_file(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE)
    chosen = engine_settings_from(assignments=["draft.nodes:=8", "acceptance.fly_theta:=1"], params_file=profile)
    assert (chosen.mode, chosen.draft.nodes) == ("spec", 8)
    assert chosen.acceptance.bins == (1, 2, 3, 4, 5, 6, 0)
    assert chosen.acceptance.rules["fly"].theta == 1.0


def test_the_target_drafts_for_itself_when_it_is_told_to() -> None:
    assert engine_settings_from().draft.drafters["self"].tokens == 0
    chosen = engine_settings_from(assignments=["draft.self_tokens:=6", "draft.self_image_share:=1"]).draft.drafters[
        "self"
    ]
    assert (chosen.tokens, chosen.image_share) == (6, 1.0)


def test_one_number_of_bins_is_a_list_of_one() -> None:
    assert engine_settings_from(assignments=["acceptance.bins:=5"]).acceptance.bins == (5,)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("draft.nodes", "write name:=value"),
        ("draft.node:=3", r"did you mean 'draft\.nodes'"),
        ("draft.nodes:=65", "a whole number from 1 to 64"),
        ("draft.nodes:=many", "a whole number"),
        ("acceptance.rule:=kind", "one of: strict, bin_distance, fly, lvspec, composite"),
        ("acceptance.bins:=-1", "from 0 to 254"),
        ("acceptance.bins:=[1, 300]", "from 0 to 254"),
        ("draft.temporal:=1", "true or false"),
        ("draft.self_tokens:=64", "a whole number from 0 to 63"),
        ("draft.self_image_share:=0.0", r"a float from 0\.001 to 1"),
        ("draft.self_image_share:=2", r"from 0\.001 to 1"),
        ("draft.self_keep:=attention", "one of: uniform, similarity"),
    ],
)
def test_what_is_wrong_is_refused(assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine_settings_from(assignments=[assignment])


def test_two_tolerances_at_once_are_refused() -> None:
    with pytest.raises(UserError, match="are exclusive"):
        engine_settings_from(assignments=["acceptance.bins:=5", "acceptance.tolerance_m:=0.01"])


def test_a_tolerance_is_accepted_by_bin_distance_unless_another_rule_is_set(tmp_path: Path) -> None:
    near = engine_settings_from(mode="spec", tolerance="2mm,1.1deg")
    assert (near.mode, near.acceptance) == ("spec", Tolerance(2.0, 1.1).acceptance)
    assert near.acceptance.rule == "bin_distance"
    mixed = engine_settings_from(tolerance="5bins", assignments=["acceptance.rule:=composite"]).acceptance
    assert (mixed.rule, mixed.bins) == ("composite", (5,))
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE)
    replaced = engine_settings_from(tolerance="2mm", params_file=profile).acceptance
    assert (replaced.bins, replaced.tolerance_m) == ((0,), 0.002), "the file's bins would say the same thing twice"
    for strict in ("0", "strict"):
        assert engine_settings_from(tolerance=strict, params_file=profile).acceptance == AcceptanceSettings()


def test_python_names_parameters_with_underscores_or_by_the_field() -> None:
    chosen = engine_settings_from(
        mode="specpipe",
        tolerance="5bins",
        draft_nodes=16,
        prefill_chunks=2,
        acceptance_gripper_bins=1,
        max_image_age_s=2,
    )
    assert chosen == EngineSettings(
        "specpipe",
        prefill_chunks=2,
        max_image_age_s=2.0,
        draft=DraftSettings(nodes=16),
        acceptance=AcceptanceSettings("bin_distance", bins=(5,), gripper_bins=1),
    )
    assert engine_settings_from(decode_in_order=True).in_order
    with pytest.raises(UserError, match="no parameter 'draft_node'; did you mean 'draft_nodes'"):
        engine_settings_from(draft_node=3)


def test_flys_entropy_can_be_chosen() -> None:
    chosen = engine_settings_from(assignments=["acceptance.rule:=fly", "acceptance.fly_entropy:=code"])
    assert chosen.acceptance.rules["fly"].entropy == "code"


def test_what_is_no_yaml_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be read as YAML"):
        engine_settings_from(assignments=["acceptance.bins:=[1,"])


def test_a_preset_is_the_papers_numbers() -> None:
    goal = engine_settings_from(mode="spec", preset="spec-vla-paper")
    assert (goal.acceptance.rule, goal.acceptance.bins, goal.acceptance.gripper_bins) == ("bin_distance", (9,), 9)
    assert (goal.draft.top_k, goal.draft.depth, goal.draft.nodes) == (8, 5, 50)
    assert goal.draft.whole_vocabulary and not engine_settings_from().draft.whole_vocabulary
    assert engine_settings_from(preset="spec-vla-paper-long").acceptance.bins == (5,)
    for preset, drafted in (("fly-paper", 15), ("fly-paper-405b", 25)):
        fly = engine_settings_from(preset=preset)
        rule = fly.acceptance.rules["fly"]
        assert (fly.acceptance.rule, rule.window, rule.theta, rule.entropy) == ("fly", 6, 0.3, "paper")
        assert (fly.draft.head, fly.draft.nodes) == ("none", 1 + drafted)
    loose = engine_settings_from(preset="lvspec-paper")
    rule = loose.acceptance.rules["lvspec"]
    assert (loose.acceptance.rule, rule.loose_share, rule.top_n, rule.shift) == ("lvspec", 0.7, 10, 63)
    assert (loose.draft.head, loose.draft.nodes) == ("none", 11)
    itself, model = loose.draft.drafters["self"], loose.draft.drafters["model"]
    assert (itself.image_share, itself.keep, model.tokens) == (0.1, "uniform", 10)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_so_itself_and_is_written_and_read_as_it_was(preset: str, tmp_path: Path) -> None:
    chosen = engine_settings_from(preset=preset)
    assert chosen.preset_summary == preset
    assert values_of(chosen).items() >= PRESETS[preset].items()
    write_parameters(tmp_path / "profile.yaml", values_of(chosen), ["a paper's"])
    assert engine_settings_from(params_file=tmp_path / "profile.yaml") == chosen


def test_what_is_set_beside_a_preset_wins_and_is_told(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE)
    assignments = ["decode.preset:=fly-paper", "acceptance.rule:=strict", "acceptance.fly_window:=4"]
    chosen = engine_settings_from(assignments=assignments, params_file=profile)
    assert (chosen.acceptance.rule, chosen.acceptance.rules["fly"].window, chosen.draft.nodes) == ("strict", 4, 16)
    assert chosen.preset_summary == "fly-paper, except acceptance.rule strict, acceptance.fly_window 4"
    relaxed = engine_settings_from(preset="spec-vla-paper", tolerance="5mm").acceptance
    assert (relaxed.bins, relaxed.tolerance_m, relaxed.gripper_bins) == ((0,), 0.005, 9)
    assert engine_settings_from().preset_summary == ""
    for wrong in ("fly-papers", "[fly-paper]"):
        with pytest.raises(UserError, match=r"'decode\.preset' is .*one of: none, spec-vla-paper"):
            engine_settings_from(assignments=[f"decode.preset:={wrong}"])


values = {
    "decode.mode": st.sampled_from(MODES),
    "decode.prefill_chunks": st.integers(1, 16),
    "decode.preset": st.sampled_from(["none", "fly-paper", "lvspec-paper"]),  # others' bins exclude metres
    "draft.nodes": st.integers(1, 64),
    "draft.temporal": st.booleans(),
    "draft.head": st.sampled_from(["", "none", "/some where/head", "yes", "1"]),
    "acceptance.rule": st.sampled_from(RULES.names()),
    "acceptance.tolerance_m": st.floats(0, 1),
    "acceptance.fly_theta": st.floats(0, 10),
}


@given(st.fixed_dictionaries({}, optional=values))
def test_a_file_that_is_written_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, chosen: dict) -> None:
    settings = with_values(EngineSettings(), chosen)
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    write_parameters(path, values_of(settings), ["why", "and when"])
    assert path.read_text().startswith("# why\n# and when\n/**:\n")
    assert engine_settings_from(params_file=path) == settings
