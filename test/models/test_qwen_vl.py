# SPDX-License-Identifier: Apache-2.0
"""Policies made of Qwen2.5-VL, on random checkpoints: against transformers' class, and what is refused."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import edit_json
from support.nightly import nightly_but
from support.random_qwen_vl import FAST_IDS, SHAPES, TEMPLATE, Shape, add_nora, add_starvla, add_vla0, write_qwen_vl
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.papers.text_target import TextCodec
from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import MODES
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget
from specvla_ros.speculation.settings import DraftSettings, adjusted

# What a processor, a tokenizer and a model save.
NEW = (
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
LONGEST = 24
CONFIG = """
MODEL:
  QWEN: {{horizon: {horizon}, num_cam: {cameras}, rgb_img_size: '{size}', tiled_rgb_imgs: {tiled},
         add_vision_id: {numbered}, num_bins_actions: 500, history: 1, action_type: original}}
DATALOADER:
  ROBOVERSE: {{cfg_opts: 'IMAGE.crop_img:{crop}:IMAGE.img_size:{side}'}}
"""
# Cameras, side and aspect of the pictures, and how they are shown.
VIEWS = {
    "tiled": dict(horizon=2, cameras=2, size="56,84", tiled=True, numbered=True, crop=0.875, side=56),
    "apart": dict(horizon=1, cameras=3, size="112,84", tiled=False, numbered=True, crop=1.0, side=112),
    "alone": dict(horizon=4, cameras=1, size="140,140", tiled=False, numbered=False, crop=0.5, side=140),
}


class _Only(LogitsProcessor):
    """Lets some ids through, as VLA-0's own processor does."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = list(ids)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.ids] = scores[:, self.ids]
        return masked


def as_text(target: QwenVLTarget) -> QwenVLTarget:
    """The same model, whose answers are compared whatever they stand for."""
    codec = TextCodec(target.codec.end_ids, target.decoder.config.vocab_size)  # type: ignore[attr-defined]
    return replace(target, policy=replace(target.policy, codec=codec))


def load(directory: Path, **options: Any) -> QwenVLTarget:
    target = load_target(directory, device="cpu", **options)
    assert isinstance(target, QwenVLTarget)
    return target


def seen(target: QwenVLTarget, seed: int, instruction: str = "put the carrot away") -> Observation:
    generator = np.random.default_rng(seed)
    images = {}
    for name in target.cameras:
        height, width = generator.integers(40, 300, 2)
        images[name] = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Observation(images, instruction, stamp_ns=seed + 1)


def transformers_answer(target: QwenVLTarget, observation: Observation) -> tuple[list[int], torch.Tensor]:
    """Its class's own generate, from our patches and ids, and its normed hidden states [rows, hidden_size]."""
    base = target.directory / "vlm"  # in a run of StarVLA's
    source = base if base.is_dir() else target.directory
    reference: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    layout = target.prompt_layout(observation)
    grids = [(1, h // 14, w // 14) for h, w in target.policy.picture_sizes]
    rows = iter(h * w // 4 for _, h, w in grids)
    ids = torch.tensor([[i for each in layout.ids for i in [each] * (next(rows) if each == target.image_id else 1)]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == target.image_id).int(),
        "pixel_values": target.processor.patches(target.policy.pictures(observation.cameras)),
        "image_grid_thw": torch.tensor(grids),
    }
    only = target.generation.allowed_ids
    answer = reference.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=LONGEST,
        logits_processor=LogitsProcessorList([_Only(only)] if only else []),
    )
    positions, _ = reference.model.get_rope_index(ids, inputs["mm_token_type_ids"], inputs["image_grid_thw"])
    assert layout.positions is not None and np.array_equal(positions[:, 0].numpy(), layout.positions)
    written = torch.cat((inputs["mm_token_type_ids"], torch.zeros_like(answer[:, ids.shape[1] :])), dim=1)
    inputs |= {"input_ids": answer, "attention_mask": torch.ones_like(answer), "mm_token_type_ids": written}
    with torch.inference_mode():
        hidden = reference.model(**inputs).last_hidden_state[0]
    return answer[0, ids.shape[1] :].tolist(), hidden


@pytest.fixture(scope="module", params=nightly_but(lambda shape: shape == 0, range(len(SHAPES))))
def nora(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QwenVLTarget:
    shape: Shape = SHAPES[request.param]
    directory = write_qwen_vl(tmp_path_factory.mktemp("nora"), shape, seed=request.param, actions=FAST_IDS)
    return load(add_nora(directory))


@pytest.fixture(scope="module", params=nightly_but(lambda view: view == [*VIEWS][-1], VIEWS))
def vla0(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QwenVLTarget:
    index = list(VIEWS).index(request.param)
    directory = write_qwen_vl(tmp_path_factory.mktemp("vla0"), SHAPES[index], seed=7 + index, penalty=5.0)
    return load(add_vla0(directory, config=CONFIG.format(**VIEWS[request.param])))


@pytest.fixture(scope="module", params=range(len(SHAPES)))
def starvla(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QwenVLTarget:
    """Two cameras, and chunks of four."""
    run = tmp_path_factory.mktemp("starvla")
    write_qwen_vl(run / "vlm", SHAPES[request.param], seed=20 + request.param, actions=FAST_IDS)
    return load(add_starvla(run, horizon=4))


@torch.inference_mode()
def check_hidden_states(target: QwenVLTarget) -> None:
    for seed in range(3):
        question = seen(target, seed, instruction="put the carrot away" + " now" * 9 * seed)
        answer, expected = transformers_answer(target, question)
        layout = target.prompt_layout(question)
        written = target.decoder.embed_tokens(torch.tensor(answer))
        inputs = torch.cat((target.prompt_embeddings(question, layout.ids), written))
        behind = layout.tree_root_positions(layout.rows, len(answer))
        assert layout.positions is not None and behind is not None
        positions = np.concatenate((layout.positions, behind + np.arange(len(answer))), axis=1)
        cache = new_cache(target.decoder, slots=1, slot_rows=len(inputs))
        segment = Segment(0, 0, inputs, wanted=len(inputs), positions=positions)
        hidden = packed_forward(target.decoder, [segment], cache).hidden
        np.testing.assert_allclose(hidden, expected, atol=1e-4)


def check_all_modes(target: QwenVLTarget) -> None:
    drafts = adjusted(
        DraftSettings(nodes=12),
        temporal=True,
        prompt_lookup_tokens=4,
        self_tokens=3,
        self_image_share=0.3,
        model=str(target.directory),
        model_tokens=3,
    )
    engines = {
        mode: Engine(
            as_text(target),
            EngineSettings(
                mode, max_reasoning_tokens=LONGEST, max_text_tokens=400, prefill_chunks=2, draft=drafts, in_order=True
            ),
        )
        for mode in MODES
    }
    for seed in range(3):
        question = seen(target, seed)
        expected, _ = transformers_answer(target, question)
        for mode, engine in engines.items():
            for again in range(2):  # the second time the first answer is the draft
                action = engine.act(replace(question, stamp_ns=10 * seed + again + 1))
                assert isinstance(action, Action), action
                assert list(action.tokens) == expected, f"{mode}, picture {seed}"


def test_nora_writes_what_transformers_does_in_every_mode(nora: QwenVLTarget) -> None:
    assert nora.cameras == ("image",) and nora.generation.repetition_penalty == 1.05
    check_hidden_states(nora)
    check_all_modes(nora)


def test_vla0_writes_what_transformers_does_in_every_mode(vla0: QwenVLTarget) -> None:
    assert len(vla0.generation.allowed_ids) == 12
    check_hidden_states(vla0)
    check_all_modes(vla0)


@pytest.mark.nightly
def test_starvla_writes_what_transformers_does_in_every_mode(starvla: QwenVLTarget) -> None:
    assert starvla.cameras == ("image", "wrist") and starvla.codec.horizon == 4
    check_hidden_states(starvla)
    check_all_modes(starvla)


def test_the_penalty_and_the_mask_change_these_answers(vla0: QwenVLTarget) -> None:
    """Otherwise nothing above would show that they are honoured."""
    with_both, _ = transformers_answer(vla0, seen(vla0, 0))
    plain = replace(vla0, policy=replace(vla0.policy, generation=replace(vla0.generation, repetition_penalty=1.0)))
    question = seen(vla0, 0)
    settings = EngineSettings("ar", max_reasoning_tokens=LONGEST, max_text_tokens=400)
    action = Engine(as_text(plain), settings).act(question)
    assert isinstance(action, Action) and list(action.tokens) != with_both
    unmasked = replace(vla0, policy=replace(vla0.policy, generation=replace(vla0.generation, allowed_ids=())))
    action = Engine(as_text(unmasked), settings).act(question)
    assert isinstance(action, Action) and list(action.tokens) != with_both


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_qwen_vl(tmp_path / "run" / "model_last", SHAPES[0], seed=1, actions=FAST_IDS)


def refuse(directory: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message):
        load_target(directory, device="cpu", **options)


def test_a_model_that_is_no_policy(checkpoint: Path) -> None:
    (checkpoint / "norm_stats.json").write_text('{"bridge": {"action": {"q01": [0.0], "q99": [1.0]}}}')
    refuse(checkpoint, "their tokenizer is missing: copy physical-intelligence/fast to .*action_tokenizer")
    write_qwen_vl(checkpoint, SHAPES[0], seed=1)
    refuse(checkpoint, "is a Qwen-VL checkpoint, but not a known policy: NORA has .*VLA-0 has")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"vision_config": {"depth": "four"}}, "vision_config cannot be read"),
        ("config.json", {"model_type": "qwen4_vl"}, "only .* checkpoints are supported"),
        ("config.json", {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ("generation_config.json", {"num_beams": 4}, "num_beams is 4, which changes the answers"),
        ("generation_config.json", {"repetition_penalty": -1}, "repetition_penalty is -1, but it must be"),
        ("preprocessor_config.json", {"image_std": [0.5, 0, 0.5]}, "image_std"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize is False, but it must be True: other"),
        ("preprocessor_config.json", {"do_rescale": False}, "do_rescale is False"),
        ("preprocessor_config.json", {"rescale_factor": 0.01}, "rescale_factor is 0.01"),
        ("preprocessor_config.json", {"resample": 2}, "resample is 2"),
        ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop is True, but it must be None or False"),
        ("chat_template.json", {"chat_template": ""}, "has no chat template"),
        ("norm_stats.json", {"bridge": {"action": {"q01": [0.0], "q99": ["x"]}}}, "must be a list of numbers"),
        ("norm_stats.json", {"fractal": {}}, "statistics of 2 datasets; set unnorm_key"),
    ],
)
def test_damaged_nora_files(checkpoint: Path, file: str, change: dict[str, Any], message: str) -> None:
    load(add_nora(checkpoint))
    edit_json(checkpoint / file, lambda given: given.update(change))
    refuse(checkpoint, message)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "preprocessor_config.json", "norm_stats.json", "chat_template.json"]
)
def test_missing_files(checkpoint: Path, name: str) -> None:
    (add_nora(checkpoint) / name).unlink()
    refuse(checkpoint, name)


def test_mrope_sections_that_do_not_fit(checkpoint: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"]["rope_parameters"]["mrope_section"] = [2, 2, 3]

    edit_json(add_nora(checkpoint) / "config.json", change)
    refuse(checkpoint, "mrope_section is .* three whole numbers whose sum is half of a head's 12 channels")


def test_a_fast_tokenizer_of_another_vocabulary(checkpoint: Path) -> None:
    add_nora(checkpoint)
    write_qwen_vl(checkpoint, SHAPES[0], seed=1, actions=FAST_IDS - 1)
    refuse(checkpoint, "is not consecutive from <robot_action_0> to <robot_action_63>")


def test_options_of_other_families(checkpoint: Path) -> None:
    add_nora(checkpoint)
    refuse(checkpoint, "does not support model.quantization", quantization="int4")
    refuse(checkpoint, "does not support center_crop", center_crop=True)


def test_the_hubs_flat_layout_loads_the_same(checkpoint: Path) -> None:
    """Names and config.json as released files have them: one level less than newer transformers write."""
    from safetensors.torch import load_file, save_file

    target = load(add_nora(checkpoint))
    flat = checkpoint.parent / "flat"
    shutil.copytree(checkpoint, flat)
    weights = load_file(flat / "model.safetensors")
    assert any(name.startswith("visual.") for name in weights) != any("language_model" in name for name in weights)
    to_flat = {name: name.replace("model.visual.", "visual.").replace("language_model.", "") for name in weights}
    to_nested = {
        name: name if name.startswith("lm_head") else f"model.{name}".replace("model.model.", "model.language_model.")
        for name in weights
    }
    renamed = to_flat if any("language_model" in name for name in weights) else to_nested
    save_file({renamed[name]: weights[name] for name in weights}, flat / "model.safetensors", metadata={"format": "pt"})

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        config |= {key: value for key, value in text.items() if key not in ("model_type", "tie_word_embeddings")}
        config |= {"rope_theta": rope["rope_theta"]}
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}

    edit_json(flat / "config.json", flatten)
    other, question = load(flat), seen(target, 3)
    ids = target.prompt_layout(question).ids
    assert torch.equal(target.prompt_embeddings(question, ids), other.prompt_embeddings(question, ids))
    assert other.decoder.config == target.decoder.config


class _Processor(ProcessorMixin):
    """Qwen2_5_VLProcessor without videos, for which torchvision would be needed."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


@pytest.mark.parametrize("family", ["nora", "vla0", "starvla"])
def test_a_folder_that_transformers_5_saves_is_read_as_the_one_it_was_made_from(tmp_path: Path, family: str) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    old, new = (folder / "vlm" if family == "starvla" else folder for folder in (run, again))
    write_qwen_vl(old, SHAPES[0], seed=1, actions=0 if family == "vla0" else FAST_IDS)
    add: dict[str, Callable[[Path], Path]]
    add = {"nora": add_nora, "vla0": add_vla0, "starvla": partial(add_starvla, horizon=2)}
    add[family](run)
    edit_json(old / "preprocessor_config.json", lambda given: given.update(image_std=[0.3, 0.4, 0.5], max_pixels=9000))
    shutil.copytree(run, again)
    for name in NEW:
        (new / name).unlink()
    Qwen2_5_VLForConditionalGeneration.from_pretrained(old).save_pretrained(new)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(old)
    _Processor(Qwen2VLImageProcessorPil.from_pretrained(old), tokenizer, TEMPLATE).save_pretrained(new)
    assert not any((new / name).exists() for name in ("preprocessor_config.json", "chat_template.json"))
    one, other = load(run), load(again)
    question = seen(one, 4)
    ids = one.prompt_layout(question).ids
    assert other.prompt_layout(question).ids == ids
    assert torch.equal(*(each.pixels(question)[0] for each in (one, other)))
    assert torch.equal(*(each.prompt_embeddings(question, ids) for each in (one, other)))
    assert other.generation == one.generation and other.decoder.config == one.decoder.config


def test_of_several_files_the_one_that_transformers_reads_is_read(checkpoint: Path) -> None:
    add_nora(checkpoint)
    other = {"min_pixels": 3136, "max_pixels": 3136, "patch_size": 14, "merge_size": 2, "image_std": [0.5, 0.5, 0.5]}
    (checkpoint / "processor_config.json").write_text(json.dumps({"image_processor": other}))
    (checkpoint / "chat_template.jinja").write_text("another")
    processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
    target, question = load(checkpoint), np.zeros((56, 56, 3), np.uint8)
    wanted = processor(question, return_tensors="pt")["pixel_values"]
    np.testing.assert_allclose(target.processor.patches([question]), wanted, atol=1e-6)
    template = _Processor.get_processor_dict(checkpoint)[0]["chat_template"]
    assert template == TEMPLATE and "Be brief" in target.chat(target.policy.messages("lift"))


def test_vla0_statistics_beside_the_folder_and_as_its_own_pickle(checkpoint: Path) -> None:
    write_qwen_vl(checkpoint, SHAPES[0], seed=1)
    bounds = {"min": np.array([-1, -2], np.float32), "max": np.array([1, 0.5], np.float32)}
    (checkpoint.parent / "dataset_stats.pkl").write_bytes(pickle.dumps({"out_ori_act": bounds}))
    (checkpoint.parent / "config.yaml").write_text(CONFIG.format(**VIEWS["alone"]))
    target = load(checkpoint)
    assert target.codec.names == ("dim_0", "dim_1") and target.codec.horizon == 4 and target.cameras == ("3p1",)
    low, high = target.codec.action_range
    assert low.tolist() == [-1, -2] and high.tolist() == [1, 0.5]


class _Acts:
    def __reduce__(self) -> Any:
        return exec, ("print('a pickle that acts')",)  # print itself is another function once Ray runs


def test_a_pickle_that_acts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qwen_vl(checkpoint, SHAPES[0], seed=1)
    (checkpoint / "dataset_stats.pkl").write_bytes(pickle.dumps({"out_ori_act": _Acts()}))
    refuse(checkpoint, r"dataset_stats.pkl cannot be read .*builtins.exec")
    assert "acts" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(size="10,84"), "rgb_img_size .* from 28 to 4096"),
        (dict(size="wide"), "rgb_img_size .* height and width"),
        (dict(crop="most"), "crop_img is 'most', but it must be a number above 0"),
        (dict(horizon=0), "horizon is 0"),
        (dict(tiled="'yes'"), "tiled_rgb_imgs"),
    ],
)
def test_vla0_configurations(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    write_qwen_vl(checkpoint, SHAPES[0], seed=1)
    add_vla0(checkpoint, config=CONFIG.format(**VIEWS["tiled"] | change))
    refuse(checkpoint, message)


def test_images_of_other_cameras(vla0: QwenVLTarget) -> None:
    image = np.zeros((40, 40, 3), np.uint8)
    with pytest.raises(UserError, match="needs images of the cameras 3p1"):
        vla0.prompt_layout(Observation({"left": image, "right": image}, "lift", 1))


@pytest.mark.parametrize("words", ["", "lift <|im_end|> it", "a\0b"])
def test_instructions(nora: QwenVLTarget, words: str) -> None:
    with pytest.raises(UserError):
        nora.prompt_layout(seen(nora, 0, words))


def digits(**changes: Any) -> DigitsCodec:
    from specvla_ros.models.codecs.statistics import ActionStatistics

    statistics = ActionStatistics("", np.array([-1.0, 0.0]), np.array([1.0, 0.5]), np.ones(2, dtype=bool))
    codec = DigitsCodec(tuple(range(20, 30)), 31, frozenset({40, 41}), statistics, horizon=2, bins=1000, limit=1024)
    return replace(codec, **changes)


def written(text: str) -> list[int]:
    return [31 if letter == " " else 20 + int(letter) if letter.isdigit() else 5 for letter in text]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 1000 500 7", ""),
        ("0 1000 500", "3 numbers instead of 2 x 2"),
        ("0 1000 500 7 8", "5 numbers instead of 2 x 2"),
        ("0 1001 500 7", "'1001' is not a number from 0 to 1000"),
        ("0 007 500 7", "'007' is not a number from 0 to 1000"),
        ("0  1000 500 7", "'' is not a number"),
        (" 0 1000 500 7", "'' is not a number"),
        ("", "'' is not a number"),
        ("0 x 500 7", "token 5 is neither a digit nor a space"),
        ("0 " + "9" * 400 + " 5 7", "is not a number from 0 to 1000"),
    ],
)
def test_digits_refuse_what_is_no_chunk(text: str, problem: str) -> None:
    codec = digits()
    found = codec.problem([*written(text), 40])
    assert (problem in found) if problem else not found
    assert "no end" in codec.problem(written("0 1 2 3"))


def test_digits_round_trip() -> None:
    codec = digits()
    actions = np.array([[-1.0, 0.5], [0.25, 0.1]])
    tokens = codec.encode(actions)
    assert list(tokens) == written("0 1000 625 200")
    np.testing.assert_allclose(codec.decode(tokens), actions)
    assert codec.encode(actions + 9) == tuple(written("1000 1000 1000 1000")), "what is beyond is clipped"
    assert codec.max_tokens == 20 and codec.end([*tokens, 41, 3], 0) == len(tokens) + 1
    assert codec.spread_bins((2,), 0) == (2,) * 4
