# SPDX-License-Identifier: Apache-2.0
"""Chunks as digits, FAST tokens and codes of a VQ-VAE, held against plain readings: bounds, ends, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specvla_ros.errors import UserError
from specvla_ros.lab.training.artifacts import fit_fast_tokenizer, save_fast_tokenizer
from specvla_ros.models.codecs.codec import CODEC_FILE, CODEC_FOLDER, Codec, CodecContext, make_codec
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.codecs.vq import VqCodec, VqVae, read_vq_vae
from specvla_ros.models.config import MAX_WIDTH

STATISTICS = ActionStatistics("here", np.array([-1.0, 0.0]), np.array([1.0, 4.0]), np.array([True, True]))
ARM = ActionStatistics("arm", np.full(7, -0.1), np.full(7, 0.1), np.array([True] * 6 + [False]), switches=(6,))
END, SPACE = 12, 10


# Digits

DIGITS = DigitsCodec(tuple(range(10)), SPACE, frozenset({END, 13}), STATISTICS, horizon=2, bins=100, limit=40)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(SPACE if letter == " " else int(letter) for letter in text)


def test_numbers_are_shares_of_the_range() -> None:
    actions = np.array([[-1.0, 4.0], [0.5, 1.0]])
    assert DIGITS.encode(actions) == numbers("0 100 75 25")
    np.testing.assert_allclose(DIGITS.decode(numbers("0 100 75 25")), actions)
    assert DIGITS.encode(np.array([[-9.0, 9.0], [0.009, 0.021]])) == numbers("0 100 50 1"), "clipped, and rounded"
    still = replace(DIGITS, statistics=replace(STATISTICS, low=np.array([0.5, 0.0]), high=np.array([0.5, 4.0])))
    assert still.encode(np.array([[0.5, 0.0], [0.7, 4.0]])) == numbers("0 0 0 100")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0 100 75 25", ""),
        ("0 101 75 25", "'101' is not a number from 0 to 100"),
        ("0 07 75 25", "'07' is not a number from 0 to 100"),
        ("0  75 25", "'' is not a number from 0 to 100"),
        ("0 100 75", "3 numbers instead of 2 x 2"),
        ("0 100 75 25 1", "5 numbers instead of 2 x 2"),
    ],
)
def test_what_is_wrong_with_an_answer_of_digits(text: str, why: str) -> None:
    assert DIGITS.problem((*numbers(text), END)) == DIGITS.problem((*numbers(text), 13)) == why
    assert DIGITS.problem(numbers(text)) == f"the answer has no end token after {len(text)} tokens"


def test_what_is_no_digit_is_named_and_the_end_is_no_part_of_the_action() -> None:
    assert DIGITS.problem((1, 99, 98, END)) == "token 99 is neither a digit nor a space"
    assert DIGITS.action_tokens((1, 2, END)) == DIGITS.action_tokens((1, 2)) == (1, 2)
    assert DIGITS.text_tokens((1, END)) == ()
    assert (DIGITS.max_tokens, replace(DIGITS, limit=15).max_tokens) == (16, 15), (
        "four of three digits, each with its end"
    )
    assert DIGITS.end((*numbers("0 1"), END, END), 0) == 4
    assert DIGITS.end((1,) * 20, 0) == 16 and not DIGITS.end((1,), 0)


def test_where_an_answer_of_digits_stands() -> None:
    per_number = 103  # nothing, 0 to 100, or more
    for text, expected in (
        ("", 0),
        ("0", 1),
        ("7", 8),
        ("100", 101),
        ("101", per_number - 1),
        ("9999", per_number - 1),
        ("12 ", per_number),
        ("12 4", per_number + 5),
        ("1 2 34", 2 * per_number + 35),
    ):
        assert DIGITS.position(numbers(text)) == expected
    assert DIGITS.position((99, 3, 99)) == 4, "what is no digit is not read"


def test_how_far_a_number_may_be_off() -> None:
    np.testing.assert_allclose(DIGITS.bound([3] * 4), 3 * np.array([[0.02, 0.04]] * 2))
    np.testing.assert_allclose(DIGITS.bound([9, 10, 99, 1]), [[0.18, 0.36], [0.18, 0.04]]), "the last digit alone"
    arm = replace(DIGITS, statistics=ARM)
    assert arm.bins_within(metres=0.005, radians=0.01, gripper_bins=4) == 2 * (2, 2, 2, 5, 5, 5, 4)
    assert arm.spread_bins((3,), 1) == 2 * (3, 3, 3, 3, 3, 3, 1)


@pytest.mark.parametrize("kind", ["digits", "fast"])
def test_a_gripper_that_the_policy_scales_takes_its_own_tolerance(kind: str) -> None:
    """As VLA-0's, NORA's and others': it is no angle, and strict unless told otherwise."""
    everything = replace(ARM, mask=np.ones(7, bool), switches=())
    own: Any = DIGITS if kind == "digits" else FAST
    codec: Codec = replace(own, statistics=everything)
    for gripper in (0, 2):
        for bins in (
            codec.bins_within(metres=0.05, radians=0.05, gripper_bins=gripper),
            codec.spread_bins((3,), gripper),
        ):
            assert [*bins[6::7]] == [gripper] * 2 and any(bins[:6])
            assert (codec.bound(bins)[:, 6] > 0).all() == (gripper > 0)
    names = tuple(f"{arm}_{name}" for arm in ("left", "right") for name in ("joint", "gripper"))
    arms = ActionStatistics("arms", np.zeros(4), np.ones(4), np.ones(4, bool), given_names=names)
    assert replace(own, statistics=arms).spread_bins((3,), 1) == 2 * (3, 1, 3, 1)
    assert codec.spread_bins((1, 2, 3, 4, 5, 6, 7), 0) == 2 * (1, 2, 3, 4, 5, 6, 7), "one each is taken as given"


# FAST

FITTED_ON = np.random.default_rng(0).uniform(-1, 1, (300, 2, 1)) * np.array([1.0, 0.9])
FAST = FastCodec(fit_fast_tokenizer(FITTED_ON, scale=5.0, vocab_size=300), STATISTICS, 2, 999, frozenset({END}))
BEGUN = replace(FAST, beginning=(1, 2), step=1, first_id=100)


@pytest.mark.parametrize("codec", [FAST, BEGUN], ids=["down", "up"])
def test_a_fast_answer_and_its_parts(codec: FastCodec) -> None:
    actions = codec.decode(codec.encode(np.array([[0.4, 3.0], [-0.2, 1.0]])))
    tokens = codec.encode(actions)
    sign = codec.step
    assert tokens == tuple(codec.first_id + sign * i for i in codec.tokenizer.encode(STATISTICS.normalise(actions)))
    answer = (*codec.beginning, *tokens, END)
    assert codec.problem(answer) == "" and codec.action_tokens(answer) == tokens
    assert codec.action_tokens(answer[:-1]) == tokens and codec.text_tokens(answer) == codec.beginning
    np.testing.assert_allclose(codec.decode(tokens), actions)
    assert codec.problem(answer[:-1]) == f"the answer has no end token after {len(answer) - 1} tokens"
    assert codec.problem((*codec.beginning, *tokens, tokens[0], END)).endswith("FAST coefficients instead of 2 x 2")
    assert codec.problem((*codec.beginning, codec.first_id - sign, END)) == "-1 is not a FAST token"
    assert codec.problem((*codec.beginning, codec.first_id + 300 * sign, END)) == "300 is not a FAST token"


def test_an_answer_begins_as_the_policys_do() -> None:
    tokens = BEGUN.encode(np.zeros((2, 2)) + 0.5)
    for answer in ((*tokens, END), (1, *tokens, END), (2, 1, *tokens, END)):
        assert BEGUN.problem(answer) == "the answer does not start with the policy's fixed words"
        assert BEGUN.text_tokens(answer) == ()
    assert (FAST.max_tokens, BEGUN.max_tokens) == (9, 11), "two bytes for each of four coefficients, and the end"
    assert (replace(FAST, limit=8).max_tokens, replace(FAST, limit=20).max_tokens) == (8, 9)


@pytest.mark.parametrize("codec", [FAST, BEGUN], ids=["down", "up"])
def test_where_a_fast_answer_stands_and_goes_on(codec: FastCodec) -> None:
    """By coefficients, however many a token has."""
    sign, longest = codec.step, max(map(len, codec.tokenizer.token_bytes))
    long = next(i for i, each in enumerate(codec.tokenizer.token_bytes) if len(each) == longest)
    one, many, other = codec.first_id, codec.first_id + sign * long, 5
    assert longest > 1 == len(codec.tokenizer.token_bytes[0])
    begun = codec.beginning
    assert codec.position((*begun, one, many, one)) == 2 + codec.tokenizer.characters_begun[long]
    assert codec.position((*begun, other, one)) == 1 and codec.position(begun) == 0
    draft = (many, one, one, END)
    assert [codec.resume(draft, (one,) * n) for n in range(longest + 4)] == [
        0,
        *[1] * longest,
        *(2, 3, 4),
    ]
    assert codec.resume(draft, (other, many)) == 2 and codec.resume((), (one,)) == 0


def test_steps_of_a_coefficient_move_each_action_within_the_tolerance() -> None:
    arm = replace(FAST, statistics=ARM)
    for metres in (0.05, 0.03):
        steps = np.array(arm.bins_within(metres=metres, radians=0.0, gripper_bins=2)).reshape(2, 7)
        assert (steps[:, 3:6] == 0).all() and steps[:, 6].tolist() == [2, 2]
        moved = arm.bound(steps.flatten().tolist())
        per_step = 0.1 * np.sqrt(0.5) / 5.0  # of a half range of 0.1 m, the cosines of two actions, the scale
        assert steps[:, 0].sum() == int(metres / per_step) and steps[0, 0] - steps[1, 0] in (0, 1)
        np.testing.assert_allclose(moved[:, :3], steps[:, 0].sum() * per_step)
        assert (moved[:, 6] == 1).all() and (moved[:, 3:6] == 0).all()
    assert arm.bound([0] * 14).max() == 0, "a switch that may not be off is not"
    with pytest.raises(UserError, match=r"a tolerance below 0\.0141 \(m or rad\) is smaller .* of x: raise acceptance"):
        arm.bins_within(metres=0.01, radians=0.0, gripper_bins=0)
    still = replace(arm, statistics=replace(ARM, high=np.array([-0.1] + [0.1] * 6)))
    assert still.bins_within(metres=0.05, radians=0.0, gripper_bins=0)[0] == 0


# Codes of a VQ-VAE


def layer(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(generator.normal(size=shape).astype(np.float32) for shape in ((outputs, inputs), (outputs,)))  # type: ignore[return-value]


def vae(scale: float = 2.0) -> VqVae:
    """Of two layers with five codes, for three actions of two values."""
    generator = np.random.default_rng(1)
    encoder = tuple(layer(generator, *shape) for shape in ((8, 6), (7, 8), (4, 7)))
    decoder = tuple(layer(generator, *shape) for shape in ((7, 4), (9, 7), (6, 9)))
    return VqVae(generator.normal(size=(2, 5, 4)).astype(np.float32), encoder, decoder, 3, scale)


def through(layers: Any, values: np.ndarray) -> np.ndarray:
    for number, (weight, bias) in enumerate(layers):
        values = np.array(
            [bias[i] + sum(weight[i, j] * values[j] for j in range(len(values))) for i in range(len(bias))]
        )
        if number < len(layers) - 1:
            values = np.array([max(0.0, each) for each in values])
    return values


def test_codes_are_the_nearest_of_each_layer_to_what_is_left() -> None:
    model = vae()
    assert model.dims == 2
    for seed in range(20):
        actions = np.random.default_rng(seed).uniform(-2, 2, (3, 2))
        left, codes = through(model.encoder, actions.flatten() / 2), []
        for book in model.codebooks:
            codes.append(min(range(5), key=lambda i, book=book, left=left: float(((book[i] - left) ** 2).sum())))  # type: ignore[misc]
            left = left - book[codes[-1]]
        assert model.encode(actions) == tuple(codes)
    summed = model.codebooks[0][3] + model.codebooks[1][1]
    np.testing.assert_allclose(model.decode([3, 1]), 2 * through(model.decoder, summed).reshape(3, 2), rtol=1e-4)


def test_an_answer_of_codes() -> None:
    codec = VqCodec(vae(), STATISTICS, stop_id=50)
    assert (codec.horizon, codec.max_tokens, codec.ids) == (3, 2, range(45, 50)) and codec.legal_ids(()) == codec.ids
    chunk = codec.decode([46, 48])
    np.testing.assert_allclose(chunk, [STATISTICS.unnormalise(row) for row in codec.vae.decode([3, 1])])
    codes = codec.vae.encode(STATISTICS.normalise(chunk))
    assert codec.encode(chunk) == tuple(49 - code for code in codes)
    assert codec.problem((45, 49)) == "" and codec.problem((44, 50)) == "token 44 is not an action token"
    assert codec.problem((49, 50)) == "token 50 is not an action token"
    with pytest.raises(UserError, match="codes of a VQ-VAE have no tolerance in metres"):
        codec.bins_within(metres=0.1, radians=0.0, gripper_bins=0)
    assert codec.spread_bins((0, 0), 0) == () and not codec.bound(()).any() and codec.bound(()).shape == (3, 2)


def write_vae(directory: Path, model: VqVae, **config: Any) -> dict[str, dict[str, torch.Tensor]]:
    names = ("encoder.0", "encoder.2", "fc")
    saved = {
        part: {
            f"{name}.{kind}": torch.from_numpy(each)
            for name, layer in zip(names, layers, strict=True)
            for kind, each in zip(("weight", "bias"), layer, strict=True)
        }
        for part, layers in (("encoder", model.encoder), ("decoder", model.decoder))
    }
    books = {f"layers.{i}._codebook.embed": torch.from_numpy(book[None]) for i, book in enumerate(model.codebooks)}
    (directory / "checkpoints").mkdir(exist_ok=True)
    saved["vq_embedding"] = books
    torch.save(saved, directory / "checkpoints" / "model.pt")
    given = {"input_dim_h": 3, "input_dim_w": 2, "n_latent_dims": 4, "vqvae_n_embed": 5, "vqvae_groups": 2}
    (directory / "config.json").write_text(json.dumps(given | config))
    return saved


def test_a_vq_vae_is_read_as_it_was_saved(tmp_path: Path) -> None:
    model = vae(scale=3.0)
    write_vae(tmp_path, model, act_scale=3.0)
    read = read_vq_vae(tmp_path)
    assert (read.horizon, read.scale, read.dims) == (3, 3.0, 2)
    np.testing.assert_array_equal(read.codebooks, model.codebooks)
    for mine, theirs in ((read.encoder, model.encoder), (read.decoder, model.decoder)):
        assert all(np.array_equal(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))
    write_vae(tmp_path, model)
    assert read_vq_vae(tmp_path).scale == 1.0


@pytest.mark.parametrize(
    ("part", "name", "shape", "wanted"),
    [
        ("encoder", "encoder.0.weight", (8, 7), "encoder.encoder.0.weight must have shape any x 6"),
        ("encoder", "encoder.2.weight", (7, 7), "encoder.encoder.2.weight must have shape any x 8"),
        ("encoder", "fc.weight", (5, 7), "encoder.fc.weight must have shape 4 x 7"),
        ("encoder", "fc.bias", (5,), "encoder.fc.bias must have shape 4"),
        ("decoder", "encoder.0.bias", (7, 1), "decoder.encoder.0.bias must have shape 7"),
        ("decoder", "fc.weight", None, "decoder.fc.weight must have shape 6 x 9"),
        ("vq_embedding", "layers.1._codebook.embed", (2, 5, 4), "layers.1._codebook.embed must have shape 1 x 5 x 4"),
        ("vq_embedding", "layers.0._codebook.embed", (1, 6, 4), "layers.0._codebook.embed must have shape 1 x 5 x 4"),
    ],
)
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, part: str, name: str, shape: Any, wanted: str) -> None:
    saved = write_vae(tmp_path, vae())
    if shape is None:
        del saved[part][name]
    else:
        saved[part][name] = torch.zeros(shape)
    torch.save(saved, tmp_path / "checkpoints" / "model.pt")
    with pytest.raises(UserError, match=f"model.pt: .*{wanted}, as config.json says"):
        read_vq_vae(tmp_path)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("input_dim_h", 1024),
        ("input_dim_w", 1024),
        ("n_latent_dims", MAX_WIDTH),
        ("vqvae_n_embed", 65536),
        ("vqvae_groups", 65536),
    ],
)
def test_sizes_that_no_vq_vae_has_are_refused_before_tensors_are_looked_at(
    tmp_path: Path, field: str, most: int
) -> None:
    for size, why in ((0, f"{field} is 0"), (1, "model.pt"), (most, "model.pt"), (most + 1, f"{field} is {most + 1}")):
        write_vae(tmp_path, vae(), **{field: size})
        if (field, size) == ("vqvae_groups", 1):
            assert len(read_vq_vae(tmp_path).codebooks) == 1
            continue
        with pytest.raises(UserError, match=why):
            read_vq_vae(tmp_path)
    write_vae(tmp_path, vae(), act_scale=0.5)
    assert read_vq_vae(tmp_path).scale == 0.5
    write_vae(tmp_path, vae(), act_scale=0.0)
    with pytest.raises(UserError, match="act_scale is 0"):
        read_vq_vae(tmp_path)


# From a checkpoint's files


def made(directory: Path, name: str, vocab_size: int, **config: Any) -> Codec:
    folder = directory / CODEC_FOLDER
    folder.mkdir(exist_ok=True)
    fast = {"scale": 5.0, "vocab_size": 300, "min_token": FAST.tokenizer.min_token}
    save_fast_tokenizer(FAST.tokenizer, folder)
    (folder / CODEC_FILE).write_text(json.dumps(fast | config))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": END}))
    statistics = {"here": {"action": {"q01": [-1, 0], "q99": [1, 4]}}}
    return make_codec(name, CodecContext(directory, statistics, "", vocab_size, bins=256))


def test_digits_are_the_vocabularys_last_tokens(tmp_path: Path) -> None:
    codec = made(tmp_path, "digits", 100, time_horizon=2, bins=50, dt_s=0.2)
    assert isinstance(codec, DigitsCodec)
    assert codec.digit_ids == tuple(range(99, 89, -1)) and codec.space_id == 89 and codec.end_ids == {END}
    assert (codec.horizon, codec.bins, codec.dt_s, codec.limit) == (2, 50, 0.2, 16384)
    made(tmp_path, "digits", 12, time_horizon=1024, bins=1_000_000)
    for vocab, config, why in (
        (11, dict(time_horizon=2, bins=50), "a vocabulary of 11 tokens has no room for digits"),
        (100, dict(time_horizon=0, bins=50), "time_horizon"),
        (100, dict(time_horizon=1025, bins=50), "time_horizon"),
        (100, dict(time_horizon=2, bins=0), "bins"),
        (100, dict(time_horizon=2, bins=1_000_001), "bins"),
        (100, dict(time_horizon=2, bins=50, dt_s=0.0), "dt_s"),
    ):
        with pytest.raises(UserError, match=why):
            made(tmp_path, "digits", vocab, **config)
    assert made(tmp_path, "digits", 100, time_horizon=1, bins=1).dt_s is None


def test_fast_tokens_are_the_vocabularys_last_and_count_down(tmp_path: Path) -> None:
    ids = FAST.tokenizer.vocab_size
    codec = made(tmp_path, "fast", ids + 1, time_horizon=2, action_dim=2, dt_s=0.1)
    assert isinstance(codec, FastCodec) and (codec.first_id, codec.step, codec.horizon) == (ids, -1, 2)
    assert (codec.dt_s, codec.end_ids, codec.limit, codec.beginning) == (0.1, {END}, None, ())
    made(tmp_path, "fast", ids + 1, time_horizon=1024)
    for vocab, config, why in (
        (ids, dict(time_horizon=2), f"has {ids} ids, but the policy only {ids} tokens"),
        (999, dict(time_horizon=2, action_dim=3), "fitted for 3 dimensions, but the action statistics have 2"),
        (999, dict(time_horizon=0), "time_horizon"),
        (999, dict(time_horizon=1025), "time_horizon"),
        (999, dict(time_horizon=2, dt_s=0.0), "dt_s"),
        (999, dict(time_horizon=2, action_dim=0), "action_dim is"),
        (999, dict(time_horizon=2, action_dim=1025), "action_dim is"),
    ):
        with pytest.raises(UserError, match=why):
            made(tmp_path, "fast", vocab, **config)
    assert made(tmp_path, "fast", 999, time_horizon=1).dt_s is None
