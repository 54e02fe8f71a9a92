# SPDX-License-Identifier: Apache-2.0
"""StarVLA's QwenFast against answers of its own code, from the camera's picture to the action.

`starvla_answers.json` says what made them. Where that code makes an action of an answer that is none, ours drops it.
"""

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.nightly import nightly_but
from support.paths import ORACLES, needs

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import MODES
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget
from specvla_ros.speculation.settings import DraftSettings, adjusted

NORA = ORACLES / "nora_tiny_a"
ANSWERS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("starvla_answers.json").read_text())["answers"]
ASKED = [case for case in ANSWERS if "horizon" not in case]
PREFIX = "qwen_vl_interface.model."
pytestmark = needs(NORA)


def old_names(name: str) -> str:
    """As transformers called the parts before it nested them."""
    return PREFIX + name


def new_names(name: str) -> str:
    nested = name.replace("visual.", "model.visual.", 1) if name.startswith("visual.") else name
    return PREFIX + (nested.replace("model.", "model.language_model.", 1) if name.startswith("model.") else nested)


def statistics(factor: float) -> dict[str, Any]:
    given = json.loads((NORA / "checkpoint/norm_stats.json").read_text())["tiny_nomask"]["action"]
    low, high = np.array(given["q01"]), np.array(given["q99"])
    ranges = {"q01": low, "q99": high, "min": 1.5 * low, "max": 1.7 * high}
    return {"action": {name: (factor * values).tolist() for name, values in ranges.items()}}


MIXTURES = {
    "libero_all": {"franka": 1.0},
    "bridge_rt_1": {"oxe_bridge": 1.0, "oxe_rt1": 1.25},
    "bridge": {"oxe_bridge": 1.0},
}


def write_run(
    run: Path, mixture: str, prompt: str, *, horizon: int = 1, names: Callable[[str], str] = new_names
) -> Path:
    """A training run's folder with the weights of nora_tiny_a."""
    (run / "checkpoints").mkdir(parents=True)
    weights = load_file(NORA / "checkpoint/model.safetensors")
    torch.save({names(name): tensor for name, tensor in weights.items()}, run / "checkpoints/steps_1_pytorch_model.pt")
    (run / "vlm").mkdir()
    for path in chain((NORA / "checkpoint").glob("*.json"), (NORA / "checkpoint").glob("*.txt")):
        shutil.copyfile(path, run / "vlm" / path.name)
    (run / "action_tokenizer").symlink_to(NORA / "fast_tokenizer")
    data = {"data_mix": mixture} | ({"CoT_prompt": prompt} if prompt else {})
    action = {"action_model_type": "FAST", "action_dim": 7, "future_action_window_size": horizon - 1}
    config = {
        "framework": {"name": "QwenFast", "qwenvl": {"base_vlm": "./elsewhere"}, "action_model": action},
        "datasets": {"vla_data": data},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    scaled = {key: statistics(factor) for key, factor in MIXTURES[mixture].items()}
    (run / "dataset_statistics.json").write_text(json.dumps(scaled))
    return run


def edit_config(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def load(run: Path, unnorm_key: str = "") -> QwenVLTarget:
    target = load_target(run, device="cpu", unnorm_key=unnorm_key)
    assert isinstance(target, QwenVLTarget)
    return target


def observation(case: dict[str, Any], target: QwenVLTarget, stamp_ns: int) -> Observation:
    images = [np.array(Image.open(NORA / f"images/case{i}.png").convert("RGB")) for i in case["pictures"]]
    return Observation(dict(zip(target.cameras, images, strict=True)), case["instruction"], stamp_ns)


GROUPS = sorted({(case["data_mix"], case["unnorm_key"], case["cot_prompt"]) for case in ASKED})


@pytest.mark.parametrize("names", nightly_but(lambda names: names is new_names, [old_names, new_names]))
@pytest.mark.parametrize(("mixture", "key", "prompt"), GROUPS)
def test_tokens_and_actions_are_those_of_its_own_code(
    tmp_path: Path, mixture: str, key: str, prompt: str, names: Callable[[str], str]
) -> None:
    target = load(write_run(tmp_path / "run", mixture, prompt, names=names), key)
    chosen = {"data_mix": mixture, "unnorm_key": key, "cot_prompt": prompt}
    cases = [case for case in ASKED if case | chosen == case]
    drafts = adjusted(DraftSettings(nodes=16), temporal=True)
    for mode in MODES:
        engine = Engine(target, EngineSettings(mode, draft=drafts))
        for stamp, case in enumerate(cases, 1):
            outcome = engine.act(observation(case, target, stamp))
            if case["legal"]:
                assert isinstance(outcome, Action)
                assert list(outcome.tokens) == case["generated_ids"][:-1]
                np.testing.assert_allclose(outcome.actions, case["actions"], atol=1e-6)  # theirs in float32
            else:
                assert isinstance(outcome, Drop) and outcome.reason is DropReason.NOT_AN_ACTION


@pytest.mark.parametrize("mixture", ["libero_all", "bridge"])
def test_chunks_are_scaled_as_its_own_code_does(tmp_path: Path, mixture: str) -> None:
    codec = load(write_run(tmp_path / "run", mixture, "", horizon=4)).codec
    assert isinstance(codec, FastCodec) and codec.horizon == 4
    for case in [case for case in ANSWERS if case.get("horizon") == 4 and case["data_mix"] == mixture]:
        tokens = case["generated_ids"]
        assert bool(codec.problem(tokens)) != case["legal"]
        if case["legal"]:
            actions = codec.decode(codec.action_tokens(tokens))
            np.testing.assert_allclose(actions, case["actions"], atol=1e-6)
            assert codec.encode(actions) == tuple(tokens[:-1])


def test_the_bound_of_a_switch_is_whether_it_may_turn(tmp_path: Path) -> None:
    codec = load(write_run(tmp_path / "run", "bridge", "", horizon=4)).codec
    bins = np.zeros((4, 7), dtype=int)
    assert not codec.bound(bins.flatten().tolist()).any()
    bins[1, 6] = 1  # in the middle of its range: a step of one coefficient turns it
    assert codec.bound(bins.flatten().tolist())[:, 6].tolist() == [1.0] * 4


def test_weights_in_safetensors_and_data_of_ones_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "bridge", "")
    weights = torch.load(run / "checkpoints/steps_1_pytorch_model.pt")
    save_file(weights, run / "checkpoints/steps_1.safetensors")
    (run / "checkpoints/steps_1_pytorch_model.pt").unlink()
    known = load(run)
    case = next(case for case in ASKED if case["data_mix"] == "bridge" and case["legal"])
    first = Engine(known, EngineSettings("ar")).act(observation(case, known, 1))

    ours = {"cameras": ["front"], "scaling": ["q99"] * 6 + ["binary"]}
    edit_config(run, lambda given: given["datasets"]["vla_data"].update(data_mix="my_data", specvla=ours))
    own = load(run)
    assert own.cameras == ("front",)
    second = Engine(own, EngineSettings("ar")).act(observation(case, own, 1))
    assert isinstance(first, Action)
    np.testing.assert_allclose(first.actions, case["actions"], atol=1e-6)
    assert isinstance(second, Action) and second.tokens[0] == first.tokens[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["framework"].update(name="QwenGR00T"), "StarVLA run of 'QwenGR00T', but only QwenFast"),
        (lambda c: c["datasets"]["vla_data"].update(data_mix="moon"), "action scaling of 'moon', .* as specvla: "),
        (
            lambda c: c["datasets"]["vla_data"].update(CoT_prompt="act"),
            "CoT_prompt is 'act', .* otherwise lack the instruction",
        ),
        (lambda c: c["framework"]["action_model"].update(action_dim=8), "action_dim is 8, but the data have 7"),
        (
            lambda c: c["datasets"]["vla_data"].update(specvla={"cameras": ["a"], "scaling": ["q98"]}),
            r"specvla.scaling is \['q98'\], but it must be a list with one of q99, min_max, binary, none",
        ),
        (
            lambda c: c["datasets"]["vla_data"].update(specvla={"cameras": ["a", "a"], "scaling": ["q99"]}),
            "cameras is .* a list of distinct names",
        ),
    ],
)
def test_what_a_run_says_wrong(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    run = write_run(tmp_path / "run", "bridge", "")
    edit_config(run, change)
    with pytest.raises(UserError, match=message):
        load(run)


def test_what_is_missing_or_too_much(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "bridge_rt_1", "")
    adapter = run / "vlm" / "adapter_config.json"
    adapter.write_text("{}")
    with pytest.raises(UserError, match="adapters cannot be merged into this kind of checkpoint"):
        load(run, "oxe_bridge")
    adapter.unlink()
    with pytest.raises(UserError, match="statistics of 2 datasets; set unnorm_key to one of: oxe_bridge, oxe_rt1"):
        load(run)
    with pytest.raises(UserError, match="unnorm_key 'moon' is not in"):
        load(run, "moon")
    shutil.copyfile(run / "checkpoints/steps_1_pytorch_model.pt", run / "checkpoints/steps_2_pytorch_model.pt")
    with pytest.raises(UserError, match=r"must contain one .* file, that of the step to run; it has 2"):
        load(run, "oxe_bridge")
    (run / "checkpoints/steps_2_pytorch_model.pt").unlink()
    edit_json(run / "dataset_statistics.json", lambda given: given["oxe_bridge"]["action"].update(q01=[0.0] * 6))
    with pytest.raises(UserError, match=r"q01 is .* a list of 7 numbers"):
        load(run, "oxe_bridge")
    (run / "action_tokenizer").unlink()
    shutil.copytree(NORA / "fast_tokenizer", run / "action_tokenizer")
    (run / "action_tokenizer/processor_config.json").chmod(0o644)
    edit_json(run / "action_tokenizer/processor_config.json", lambda given: given.update(action_dim=6))
    with pytest.raises(UserError, match="was fitted for 6 dimensions, but the action statistics have 7"):
        load(run, "oxe_rt1")
    shutil.rmtree(run / "action_tokenizer")
    with pytest.raises(UserError, match="FAST tokens, but their tokenizer is missing"):
        load(run, "oxe_rt1")
    shutil.rmtree(run / "vlm")
    with pytest.raises(UserError, match=r"vlm is missing: it must hold config\.json, tokenizer and processor"):
        load(run, "oxe_rt1")
