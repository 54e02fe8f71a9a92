# SPDX-License-Identifier: Apache-2.0
"""Which files a result says it was made of."""

import subprocess
from pathlib import Path

import pytest
from support.random_qwen_vl import FAST_IDS, SHAPES, add_starvla, write_qwen_vl

import specvla_ros
from specvla_ros import EngineSettings
from specvla_ros.control.convention import Reference
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.page import context_rows
from specvla_ros.lab.evaluation.run_directory import checkpoint_hashes, head
from specvla_ros.models.checkpoint import load_target


def test_a_bundled_policy_and_its_head() -> None:
    nano = bundled_policy("nano")
    hashes = checkpoint_hashes(nano, EngineSettings("spec"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hashes["policy_files"])
    assert not any("draft" in name or name.endswith(".md") for name in hashes["policy_files"])
    assert {"config.json", "model.safetensors"} <= set(hashes["draft_files"])
    assert not checkpoint_hashes(nano, EngineSettings("ar"))["draft_files"]


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/steps_1.safetensors",
        "dataset_statistics.json",
        "config.yaml",
        "vlm/generation_config.json",
        "action_tokenizer/tokenizer.json",
    ],
)
def test_a_file_in_a_folder_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    write_qwen_vl(tmp_path / "vlm", SHAPES[0], seed=1, actions=FAST_IDS)
    target = load_target(add_starvla(tmp_path, horizon=2), device="cpu")
    assert target.directory == tmp_path
    before = checkpoint_hashes(target.directory, EngineSettings("ar"))["policy_files"]
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b" ")
    after = checkpoint_hashes(target.directory, EngineSettings("ar"))["policy_files"]
    assert {each for each in after if before[each] != after[each]} == {name}


def test_the_commit_of_a_package_that_is_linked_into_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "repository" / "specvla_ros" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.touch()
    git = ["git", "-C", str(tmp_path / "repository"), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    made = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    linked = tmp_path / "site-packages" / "specvla_ros" / "__init__.py"
    linked.parent.mkdir(parents=True)
    linked.symlink_to(source)
    for file in (source, linked):
        monkeypatch.setattr(specvla_ros, "__file__", str(file))
        assert head()["software"]["git_revision"] == made


def test_settings_are_shown_as_parameter_files_have_them() -> None:
    settings = {"action": {"reference": Reference.DELTA}, "bins": (0,), "dims": [True, 1.5], "temporal": False}
    assert context_rows(settings) == [
        ("action.reference", "delta"),
        ("bins", "[0]"),
        ("dims", "[true, 1.5]"),
        ("temporal", "false"),
    ]
