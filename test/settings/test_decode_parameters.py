"""Parameters of decoding, as the command line takes them."""

from pathlib import Path

import pytest

from specvla_ros.errors import UserError
from specvla_ros.settings.decode import DecodeParameters, read_decode_parameters

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
    assert read_decode_parameters() == DecodeParameters()
    assert read_decode_parameters().engine_settings().mode == "ar"


def test_assignments_win_over_the_file(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE)
    chosen = read_decode_parameters(["draft.nodes:=8", "acceptance.fly_theta:=1"], profile).engine_settings()
    assert (chosen.mode, chosen.draft.nodes) == ("spec", 8)
    assert chosen.acceptance.bins == (1, 2, 3, 4, 5, 6, 0)
    assert chosen.acceptance.fly_theta == 1.0


def test_the_target_drafts_for_itself_when_it_is_told_to() -> None:
    assert read_decode_parameters().engine_settings().draft.self_tokens == 0
    chosen = read_decode_parameters(["draft.self_tokens:=6", "draft.self_image_share:=1"]).engine_settings().draft
    assert (chosen.self_tokens, chosen.self_image_share) == (6, 1.0)


def test_one_number_of_bins_is_a_list_of_one() -> None:
    assert read_decode_parameters(["acceptance.bins:=5"]).acceptance_bins == (5,)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("draft.nodes", "write it as name:=value"),
        ("draft.node:=3", r"did you mean 'draft\.nodes'"),
        ("draft.nodes:=65", "a whole number from 1 to 64"),
        ("draft.nodes:=many", "a whole number"),
        ("acceptance.rule:=kind", "one of: strict, bin_distance, fly, lvspec, composite"),
        ("acceptance.bins:=-1", "from 0 to 254"),
        ("acceptance.bins:=[1, 300]", "from 0 to 254"),
        ("draft.temporal:=1", "true or false"),
        ("draft.self_tokens:=64", "a whole number from 0 to 63"),
        ("draft.self_image_share:=0.0", r"a number with a decimal point from 0\.001 to 1"),
        ("draft.self_image_share:=2", r"from 0\.001 to 1"),
    ],
)
def test_what_is_wrong_is_refused(assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_decode_parameters([assignment])


def test_two_tolerances_at_once_are_refused() -> None:
    parameters = read_decode_parameters(["acceptance.bins:=5", "acceptance.tolerance_m:=0.01"])
    with pytest.raises(UserError, match="say the same thing"):
        parameters.engine_settings()
