# SPDX-License-Identifier: Apache-2.0
"""pi0-FAST as LeRobot saves it: against LeRobot's own answers, against transformers' PaliGemma, and what is refused."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from support.checkpoints import edit_json
from support.nightly import nightly_but
from support.paths import ORACLES, needs

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import MODES
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.pi0_fast.config import Normalisation, Pi0FastConfig
from specvla_ros.models.families.pi0_fast.target import PaliGemma, Pi0FastTarget, padded_picture
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

ORACLE = ORACLES / "pi0fast_tiny_a"
pytestmark = needs(ORACLE)


def cases() -> list[dict[str, Any]]:
    path = ORACLE / "cases.json"
    return json.loads(path.read_text()) if path.exists() else []


def cameras_of(case: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name.removeprefix("observation.images.") for name in case["images"])


@pytest.fixture(scope="module")
def targets() -> dict[tuple[str, ...], Pi0FastTarget]:
    return {}


def target_of(case: Mapping[str, Any], loaded: dict[tuple[str, ...], Pi0FastTarget]) -> Pi0FastTarget:
    """The policy on a robot with the case's cameras."""
    names = cameras_of(case)
    if names not in loaded:
        target = load_target(ORACLE / "checkpoint", device="cpu", cameras=names)
        assert isinstance(target, Pi0FastTarget)
        loaded[names] = target
    return loaded[names]


def observation(case: Mapping[str, Any], stamp_ns: int = 1) -> Observation:
    pictures = [np.array(Image.open(ORACLE / name).convert("RGB")) for name in case["images"].values()]
    images = dict(zip(cameras_of(case), pictures, strict=True))
    return Observation(images, case["task"], stamp_ns, state=np.array(case["state"]))


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["case"]))
@torch.inference_mode()
def test_prompt_pictures_and_states(case: dict[str, Any], targets: dict[tuple[str, ...], Pi0FastTarget]) -> None:
    target, seen, number = target_of(case, targets), observation(case), case["case"]
    if case["prompt_truncated"]:
        with pytest.raises(UserError, match="the prompt has 103 tokens, but the policy reads 64: the robot's state"):
            target.prompt_layout(seen)
        return
    layout = target.prompt_layout(seen)
    assert list(layout.ids) == [*case["prompt_ids"], target.bos_id]
    assert layout.rows == case["prefix"]["valid_rows"]
    assert seen.state is not None
    np.testing.assert_allclose(target.state(seen.state), case["state_normalised"], atol=1e-6)
    expected = np.load(ORACLE / "expected.npz")
    pixels = torch.stack([padded_picture(image, *target.image_size) for image in seen.cameras.values()])
    if f"c{number}_pixel_values" in expected:
        np.testing.assert_allclose(pixels, expected[f"c{number}_pixel_values"][: len(pixels)], atol=1e-6)
    embedded = target.prompt_embeddings(seen, layout.ids)
    images = expected[f"c{number}_image_embeddings"]
    np.testing.assert_allclose(embedded[: target.image_tokens], images.reshape(-1, images.shape[-1]), atol=1e-4)

    answer = torch.tensor(case["generated_ids"])
    cache = new_cache(target.decoder, slots=1, slot_rows=layout.rows + len(answer))
    prompt = packed_forward(target.decoder, [Segment(0, 0, embedded, sees_all=True)], cache)
    after = packed_forward(target.decoder, [Segment(0, layout.rows, answer[:-1], wanted=len(answer) - 1)], cache)
    hidden = torch.cat((prompt.hidden[-1:], after.hidden))
    np.testing.assert_allclose(hidden, expected[f"c{number}_step_hidden"][: len(answer)], atol=1e-3)
    logits = torch.cat((prompt.logits, after.logits))
    np.testing.assert_allclose(logits, expected[f"c{number}_logits"][: len(answer)], atol=1e-3)


@pytest.mark.parametrize("mode", nightly_but(lambda mode: mode == "specpipe", MODES))
def test_tokens_and_actions(mode: str, targets: dict[tuple[str, ...], Pi0FastTarget]) -> None:
    drafts = adjusted(DraftSettings(nodes=16), temporal=True, prompt_lookup_tokens=6)
    engines: dict[int, Engine] = {}
    acted = dropped = 0
    for case in cases():
        target = target_of(case, targets)
        engine = engines.setdefault(id(target), Engine(target, EngineSettings(mode, draft=drafts, in_order=True)))
        outcome = engine.act(observation(case, stamp_ns=case["case"] + 1))
        if case["answer"]["legal"]:
            assert isinstance(outcome, Action), outcome
            assert [*outcome.text_tokens, *outcome.tokens] == case["generated_ids"][:-1]
            np.testing.assert_allclose(outcome.actions, case["actions"], atol=1e-5)
            acted += 1
        else:
            assert isinstance(outcome, Drop)
            wanted = DropReason.BAD_INSTRUCTION if case["prompt_truncated"] else DropReason.NOT_AN_ACTION
            assert outcome.reason is wanted
            dropped += 1
    assert (acted, dropped) == (9, 3)


def test_answers_that_lerobot_reads_one_way_or_another(targets: dict[tuple[str, ...], Pi0FastTarget]) -> None:
    """A whole chunk behind the beginning and before the end means the same here; all else is refused."""
    codec = target_of(cases()[0], targets).codec
    taken = []
    for case in json.loads((ORACLE / "detokenize.json").read_text()):
        ids = case["ids"]
        tokens = ids[: codec.end(ids, 0) or len(ids)]
        if codec.problem(tokens):
            continue
        taken.append(case["what"])
        normalised = codec.normalise(codec.decode(codec.action_tokens(tokens)))
        np.testing.assert_allclose(normalised, case["checked"]["actions_normalised"], atol=1e-5)
    assert taken == ["well formed", "'|' then rubbish", "zeros (pad) after '|'"]


@pytest.mark.parametrize("lookup", [0, 8])
def test_a_draft_model_reads_a_prompt_that_sees_itself_both_ways(lookup: int) -> None:
    """The policy itself drafts, and is right; so it would not be if it read its prompt row by row."""
    target = load_target(ORACLE / "checkpoint", device="cpu")
    case = next(case for case in cases() if cameras_of(case) == target.cameras)
    drafts = adjusted(DraftSettings(nodes=16), model=str(target.directory), model_lookup_tokens=lookup)
    plain, drafted = (Engine(target, EngineSettings(mode, draft=drafts)) for mode in ("ar", "spec"))
    ours, theirs = (engine.act(observation(case)) for engine in (drafted, plain))
    assert isinstance(ours, Action) and isinstance(theirs, Action)
    assert ours.tokens == theirs.tokens
    *whole, _ = ours.record.accept_lengths
    assert whole and set(whole) == {15}


def test_a_draft_model_with_other_cameras_is_refused() -> None:
    case = next(case for case in cases() if len(cameras_of(case)) == 1)
    target = load_target(ORACLE / "checkpoint", device="cpu", cameras=cameras_of(case))
    drafts = adjusted(DraftSettings(nodes=16), model=str(target.directory))
    with pytest.raises(UserError, match=r"draft.model: .* needs images of the cameras"):
        Engine(target, EngineSettings("spec", draft=drafts))


def test_its_tokens_may_be_accepted_by_class(targets: dict[tuple[str, ...], Pi0FastTarget]) -> None:
    """Its tokenizer's last id, <image>, has no logit."""
    case = next(each for each in cases() if each["answer"]["legal"])
    engine = Engine(target_of(case, targets), EngineSettings("ar", acceptance=AcceptanceSettings("composite")))
    action = engine.act(observation(case))
    assert isinstance(action, Action) and [*action.text_tokens, *action.tokens] == case["generated_ids"][:-1]


def test_its_prompt_is_never_cut(targets: dict[tuple[str, ...], Pi0FastTarget]) -> None:
    target = target_of(cases()[0], targets)
    with pytest.raises(UserError, match="this policy's prompt attends bidirectionally"):
        Engine(target, EngineSettings("pipeline", prefill_chunks=2))
    drafts = adjusted(DraftSettings(), self_tokens=4)
    with pytest.raises(UserError, match=r"draft\.self_tokens omits image rows"):
        Engine(target, EngineSettings("spec", draft=drafts))


@pytest.mark.parametrize("shape", [(32, 2, 4, 1, 8, 6), (48, 1, 2, 2, 16, 20), (24, 3, 4, 2, 10, 9)])
@pytest.mark.parametrize(("cameras", "tied"), [(1, True), (2, False), (3, True)])
@torch.inference_mode()
def test_prefix_and_answer_equal_transformers_own_paligemma(shape: tuple[int, ...], cameras: int, tied: bool) -> None:
    """Random models of several shapes: a prompt that sees itself both ways, then tokens one by one."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    hidden, layers, heads, kv_heads, head_dim, words = shape
    vision = dict(hidden_size=24, intermediate_size=30, num_hidden_layers=2, num_attention_heads=2, patch_size=14)
    text = dict(
        hidden_size=hidden,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=60,
        hidden_activation="gelu_pytorch_tanh",
    )
    config = PaliGemmaConfig(
        text_config={"model_type": "gemma", **text},
        vision_config={"model_type": "siglip_vision_model", "image_size": 56, "vision_use_head": False, **vision},
        projection_dim=hidden,
        image_token_index=59,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(hidden + cameras)
    reference: Any = PaliGemmaForConditionalGeneration(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    decoder = DecoderShape(
        hidden, 40, layers, heads, kv_heads, head_dim, 60, max_position_embeddings=256, tie_word_embeddings=tied
    )
    from specvla_ros.models.config import DECODERS

    ours = PaliGemma(
        Pi0FastConfig(
            decoder=replace(decoder, variant=DECODERS["gemma"].variant),
            vision=vision | {"image_size": 56, "vision_use_head": False},
            cameras=("a",) * cameras,
            image_size=(56, 56),
            state=Normalisation("IDENTITY", np.zeros(1, np.float32), np.zeros(1, np.float32)),
            actions=None,  # type: ignore[arg-type]
            chunk=1,
            prompt_tokens=99,
            answer_tokens=9,
            skipped_ids=0,
            text_tokenizer=Path(),
            action_tokenizer=Path(),
        ),
        cameras,
    ).eval()
    copy_weights(ours, reference)
    pixels = torch.randn(ours.pixel_shape)
    ids = torch.randint(3, 50, (words,))
    rows = torch.cat((ours.image_embeddings(pixels), ours.decoder.embed_tokens(ids)))
    answer = torch.randint(3, 50, (5,))

    cache = new_cache(ours.decoder, slots=1, slot_rows=len(rows) + 8)
    prompt = packed_forward(ours.decoder, [Segment(0, 0, rows, sees_all=True)], cache)
    after = packed_forward(ours.decoder, [Segment(0, len(rows), answer, wanted=len(answer))], cache)

    theirs = reference.model.multi_modal_projector(reference.model.vision_tower(pixels).last_hidden_state).flatten(0, 1)
    torch.testing.assert_close(rows[: len(theirs)], theirs, atol=1e-5, rtol=1e-5)
    inputs = torch.cat((rows, ours.decoder.embed_tokens(answer)))[None]
    n, total = len(rows), inputs.shape[1]
    seen = torch.ones(total, total).tril().bool()
    seen[:n, :n] = True
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    hidden_states = reference.model.language_model(
        inputs_embeds=inputs, attention_mask=mask, position_ids=torch.arange(total)[None]
    ).last_hidden_state[0]
    logits = reference.lm_head(hidden_states)
    torch.testing.assert_close(torch.cat((prompt.logits, after.logits)), logits[n - 1 :], atol=1e-4, rtol=1e-4)


def copy_weights(ours: PaliGemma, reference: Any) -> None:
    from specvla_ros.models.decoder import decoder_tensors

    theirs = {
        name.removeprefix("vision_model."): each for name, each in reference.model.vision_tower.named_parameters()
    }
    for name, parameter in ours.tower.named_parameters():
        parameter.copy_(theirs[name.removeprefix("vision_model.")])
    ours.projector.load_state_dict(reference.model.multi_modal_projector.linear.state_dict())
    text = dict(reference.model.language_model.named_parameters()) | {"lm_head.weight": reference.lm_head.weight}
    decoder: PackedDecoder = ours.decoder
    for name, tensor in decoder_tensors(decoder).items():
        tensor.copy_(text[name.removeprefix("model.")])
    if decoder.config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    shutil.copytree(ORACLE / "checkpoint", directory)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755)
    return directory


HEAD, EMBEDDINGS = (
    f"model.paligemma_with_expert.paligemma.{name}.weight" for name in ("lm_head", "model.language_model.embed_tokens")
)


@pytest.mark.parametrize("names", [(HEAD,), (EMBEDDINGS,), (HEAD, EMBEDDINGS)], ids=["head", "embeddings", "both"])
def test_tables_that_differ_are_two_and_any_others_one(checkpoint: Path, names: tuple[str, ...]) -> None:
    """LeRobot's class has two tables: its training lets them part, and its file lacks one only where they are equal."""
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    table = weights.pop(HEAD)
    save_file(weights | dict.fromkeys(names, table), path)
    decoder = load_target(checkpoint, device="cpu").decoder
    assert isinstance(decoder, PackedDecoder)
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    np.testing.assert_array_equal(decoder.lm_head.weight, table)
    if len(names) == 2:
        save_file(weights | {HEAD: table, EMBEDDINGS: table + 1}, path)
        decoder = load_target(checkpoint, device="cpu").decoder
        assert isinstance(decoder, PackedDecoder)
        np.testing.assert_array_equal(decoder.lm_head.weight, table)
        np.testing.assert_array_equal(decoder.embed_tokens.weight, table + 1)


def refuse(directory: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message):
        load_target(directory, device="cpu", **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.7}, "temperature above 0 asks for sampling"),
        ({"paligemma_variant": "gemma_7b"}, "paligemma_variant .* one of: gemma_2b, gemma_300m"),
        ({"input_features": {"observation.state": {"shape": [8]}}}, "names no camera"),
        ({"image_resolution": [112, 100]}, "image_resolution"),
        ({"output_features": {"action": {"shape": [6]}}}, "must contain 6 finite numbers each as action.mean"),
        ({"fast_skip_tokens": 700}, "has 256 ids, but the policy has room for 110"),
        ({"type": "pi0"}, "only .*'pi0_fast'.* checkpoints are supported"),
    ],
)
def test_configurations(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    edit_json(checkpoint / "config.json", lambda config: config.update(change))
    refuse(checkpoint, message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer", "copy PaliGemma's tokenizer there"),
        ("action_tokenizer", "copy the FAST tokenizer of the policy's training there"),
        ("policy_preprocessor.json", "policy_preprocessor.json is missing"),
        ("policy_postprocessor_step_0_unnormalizer_processor.safetensors", "cannot be read"),
        ("model.safetensors", "holds neither model.safetensors"),
    ],
)
def test_missing_files(checkpoint: Path, name: str, message: str) -> None:
    path = checkpoint / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    refuse(checkpoint, message)


def test_options_and_cameras(checkpoint: Path) -> None:
    refuse(checkpoint, "has no camera 'top'; its cameras are base_0_rgb, left_wrist_0_rgb", cameras=("top",))
    refuse(checkpoint, "this family of policies does not support unnorm_key", unnorm_key="bridge")
    refuse(checkpoint, "this family of policies does not support model.quantization", quantization="int4")


def test_cameras_that_stand_for_no_image_are_none_of_the_robots(checkpoint: Path) -> None:
    """LeRobot adds them to the inputs of a policy that was trained with more cameras than there are, and masks them."""
    named = load_target(checkpoint, device="cpu").cameras

    def pad(config: dict[str, Any]) -> None:
        shape = {"type": "VISUAL", "shape": [3, 224, 224]}
        empty = {f"observation.images.empty_camera_{i}": shape for i in range(2)}
        config |= {"empty_cameras": 2, "input_features": config["input_features"] | empty}

    edit_json(checkpoint / "config.json", pad)
    assert load_target(checkpoint, device="cpu").cameras == named
    edit_json(checkpoint / "config.json", lambda config: config.update(empty_cameras=1))
    assert load_target(checkpoint, device="cpu").cameras == (*named, "empty_camera_1"), "a camera of that name"


PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"


def edit_step(checkpoint: Path, file: str, name: str, **changes: Any) -> None:
    def edit(given: dict[str, Any]) -> None:
        (step,) = (each for each in given["steps"] if each["registry_name"] == name)
        step["config"] |= changes

    edit_json(checkpoint / file, edit)


@pytest.mark.parametrize("mode", ["MIN_MAX", "QUANTILES", "IDENTITY"])
def test_other_normalisations(checkpoint: Path, mode: str) -> None:
    """As LeRobot's normalize_processor.py has them: -1 and 1 stand for the two statistics.

    Its processors' files say it; config.json, which says MEAN_STD here, is not asked by LeRobot either.
    """
    edit_step(checkpoint, PRE, "normalizer_processor", norm_map={"STATE": mode, "ACTION": "MEAN_STD"})
    edit_step(checkpoint, POST, "unnormalizer_processor", norm_map={"STATE": "MEAN_STD", "ACTION": mode})
    target = load_target(checkpoint, device="cpu")
    assert isinstance(target, Pi0FastTarget)
    statistics = load_file(ORACLE / "checkpoint" / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    low, high = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "IDENTITY": ("min", "max")}[mode]
    state = statistics[f"observation.state.{low}"].astype(np.float64)
    np.testing.assert_allclose(target.state(state), state if mode == "IDENTITY" else np.full(8, -1), atol=1e-6)
    top = np.full((10, 7), 1.0) if mode == "IDENTITY" else np.tile(statistics[f"action.{high}"], (10, 1))
    codec = target.codec
    np.testing.assert_allclose(codec.normalise(top), np.ones((10, 7)), atol=1e-5)
    np.testing.assert_allclose(codec.decode(codec.encode(top)), top, rtol=0.2)


@pytest.mark.parametrize(
    ("file", "name", "changes", "message"),
    [
        (
            POST,
            "unnormalizer_processor",
            {"norm_map": {"ACTION": "LOG"}},
            r"norm_map.ACTION is 'LOG', but it must be one",
        ),
        (
            POST,
            "unnormalizer_processor",
            {"norm_map": {"ACTION": "QUANTILE10"}},
            "one of: MEAN_STD, MIN_MAX, QUANTILES",
        ),
        (POST, "unnormalizer_processor", {"eps": 1e-3}, "only eps 1e-08"),
        (POST, "absolute_actions_processor", {"enabled": True}, "policy_postprocessor.json: relative actions are not"),
        (PRE, "relative_actions_processor", {"enabled": True}, "policy_preprocessor.json: relative actions are not"),
        (PRE, "rename_observations_processor", {"rename_map": {"a": "b"}}, "rename_map is not supported"),
        (PRE, "normalizer_processor", {"normalize_observation_keys": []}, "without normalize_observation_keys is"),
        (
            PRE,
            "normalizer_processor",
            {"norm_map": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}},
            r"norm_map.VISUAL is 'MEAN_STD', but it must be one of: IDENTITY",
        ),
    ],
)
def test_what_a_processors_step_asks_is_done_or_refused(
    checkpoint: Path, file: str, name: str, changes: dict[str, Any], message: str
) -> None:
    edit_step(checkpoint, file, name, **changes)
    refuse(checkpoint, message)


def test_a_step_that_is_not_known_or_missing(checkpoint: Path) -> None:
    edit_json(checkpoint / POST, lambda given: given["steps"].append({"registry_name": "clip_actions", "config": {}}))
    refuse(
        checkpoint,
        r"policy_postprocessor.json has 'clip_actions', which is not supported; supported steps, once each: un",
    )
    edit_json(checkpoint / POST, lambda given: given.update(steps=[]))
    refuse(checkpoint, "policy_postprocessor.json lacks unnormalizer_processor; supported steps, once each: un")


def test_the_longest_prompt_is_the_tokenizer_steps(checkpoint: Path) -> None:
    edit_step(checkpoint, PRE, "tokenizer_processor", max_length=20)
    target = load_target(checkpoint, device="cpu")
    with pytest.raises(UserError, match=r"tokens, but the policy reads 20: the robot's state"):
        target.prompt_layout(observation(next(case for case in cases() if cameras_of(case) == target.cameras)))


def test_statistics_that_are_no_numbers(checkpoint: Path) -> None:
    path = checkpoint / "policy_preprocessor_step_3_normalizer_processor.safetensors"
    values = load_file(path)
    values["observation.state.mean"] = np.full(8, np.nan, np.float32)
    save_file(values, path)
    refuse(checkpoint, "must contain 8 finite numbers each as observation.state.mean and observation.state.std")


@pytest.mark.parametrize(
    ("state", "message"),
    [(None, "got none"), (np.zeros(7), r"got shape \[7\]"), (np.full(8, np.nan), "finite")],
)
def test_states(targets: dict[tuple[str, ...], Pi0FastTarget], state: np.ndarray | None, message: str) -> None:
    target = target_of(cases()[0], targets)
    with pytest.raises(UserError, match=f"reads the robot's state, 8 .*{message}"):
        target.prompt_layout(replace(observation(cases()[0]), state=state))


def test_a_camera_is_missing(targets: dict[tuple[str, ...], Pi0FastTarget]) -> None:
    seen = observation(cases()[0])
    fewer = {name: image for name, image in seen.cameras.items() if name != "left_wrist_0_rgb"}
    with pytest.raises(UserError, match="needs images of the cameras base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb"):
        target_of(cases()[0], targets).prompt_layout(replace(seen, images=fewer))


@pytest.mark.parametrize(
    "ids, why",
    [((), "the prompt has no token ids"), ((5, -1), "prompt id -1 is outside"), ((1 << 20,), "prompt id 1048576 is")],
)
def test_a_prompt_of_ids_that_the_model_does_not_have(
    ids: tuple[int, ...], why: str, targets: dict[tuple[str, ...], Pi0FastTarget]
) -> None:
    """On a GPU such an id would make the device unusable for all further frames."""
    case = cases()[0]
    target = target_of(case, targets)
    outcome = Engine(target, EngineSettings("ar")).act(replace(observation(case), prompt_ids=ids))
    assert isinstance(outcome, Drop) and outcome.reason is DropReason.BAD_INSTRUCTION and why in outcome.detail
