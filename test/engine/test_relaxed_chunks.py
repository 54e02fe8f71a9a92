# SPDX-License-Identifier: Apache-2.0
"""Relaxed acceptance of digits and FAST tokens: which tokens are near, by loops; what it does to actions, in bounds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.launches import Launches
from support.nightly import examples, nightly_but
from support.random_chunks import any_chunks
from support.scripted_drafts import Scripted
from support.verifications import make_tree, verify_tree

from specvla_kernels.compare_drafts import Comparison
from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.training.artifacts import fit_fast_tokenizer
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.fast_tokenizer import HALF, FastTokenizer
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

HORIZON, END = 4, 40
SPACE, FIRST = 30, 300
NAMED = ActionStatistics("", np.full(7, -0.05), np.full(7, 0.05), np.array([True] * 6 + [False]))


def digits_codec(largest: int = 1000) -> DigitsCodec:
    return DigitsCodec(tuple(range(20, 30)), SPACE, frozenset({END}), NAMED, HORIZON, bins=largest, limit=999)


@cache
def fitted(values: float) -> FastTokenizer:
    """Some of its tokens are several characters; of large values, characters are two bytes, which may be two tokens."""
    rng = np.random.default_rng(0)
    chunks = rng.uniform(-values, values, (400, 1, 7)) * np.linspace(0.9, 1.0, HORIZON)[:, None]
    return fit_fast_tokenizer(chunks, scale=10.0, vocab_size=600)


def fast_codec(values: float = 1.0, **changes: Any) -> FastCodec:
    return FastCodec(fitted(values), NAMED, HORIZON, FIRST, frozenset({END}), step=1, **changes)


Nodes = Sequence[tuple[int, int]]  # parent and token


def compared(codec: Codec, before: Sequence[int], tree: Nodes, choices: Sequence[int]) -> Comparison:
    """Of an answer whose last token is the root."""
    parents, tokens = [-1, *(parent for parent, _ in tree)], [before[-1], *(token for _, token in tree)]
    case = verify_tree(make_tree(tokens, parents), torch.zeros(len(tokens), 2), position=codec.position(before))
    return codec.distances.compare(replace(case, choices=torch.tensor(choices)).verification().trees)


def path_to(tree: Nodes, node: int) -> list[int]:
    """Tokens behind the root and before a node."""
    path: list[int] = []
    while (node := tree[node - 1][0]) > 0:
        path.insert(0, tree[node - 1][1])
    return path


@st.composite
def trees(draw: st.DrawFn, tokens: Sequence[int]) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """An answer, a tree of up to 12 nodes behind it, and the target's choices after the root and each node."""
    token = st.sampled_from(tokens)
    n = draw(st.integers(1, 12))
    tree = [(draw(st.integers(0, node)), draw(token)) for node in range(n)]
    return draw(st.lists(token, min_size=1, max_size=9)), tree, draw(st.lists(token, min_size=n + 1, max_size=n + 1))


def number_begun(tokens: Sequence[int]) -> tuple[int, str]:
    """How many spaces there are, and the digits behind the last of them."""
    text = "".join(" " if token == SPACE else str(token - 20) if token < SPACE else "" for token in tokens)
    return text.count(" "), text.rpartition(" ")[2]


def ends_here(text: str, largest: int) -> bool:
    """Whether it is a number as the codec writes it, and no digit behind it makes another."""
    legal = {str(number) for number in range(largest + 1)}
    return text in legal and not any(text + digit in legal for digit in "0123456789")


@pytest.mark.parametrize("largest", [9, 25, 100, 255, 1000])
@given(data=st.data())
def test_a_digit_is_near_another_where_it_is_the_last_of_its_number(largest: int, data: st.DataObject) -> None:
    before, tree, choices = data.draw(trees([*range(20, 30), 20, 21, 20, 21, SPACE, SPACE, END]))
    found = compared(digits_codec(largest), before, tree, choices)
    for node, (parent, token) in enumerate(tree, 1):
        path = [*before, *path_to(tree, node)]
        number, text = number_begun(path)
        wanted = choices[parent]
        both = (text + str(each - 20) for each in (token, wanted))
        near = max(token, wanted) < SPACE and all(ends_here(each, largest) for each in both)
        assert found.exact[0, node] == (token == wanted)
        if END in path or (text and str(int(text)) != text):  # behind an end nothing counts; `05` is refused
            continue
        assert found.dimensions[0, node] == (number if near else -1)
        assert found.distances[0, node] == (abs(token - wanted) if near else token != wanted)


@pytest.mark.parametrize("values", [1.0, 12.0])
@given(data=st.data())
def test_a_fast_token_is_near_another_where_one_coefficient_differs(values: float, data: st.DataObject) -> None:
    codec = fast_codec(values)
    bpe, vocab = codec.tokenizer.bpe, codec.tokenizer.vocab_size
    long = [i for i in range(vocab) if len(codec.tokenizer.token_bytes[i]) > 1]
    ids = [*range(0, vocab, 7), *long[::5]]
    before, tree, choices = data.draw(trees([*(FIRST + i for i in ids), END, 3]))
    found = compared(codec, before, tree, choices)
    for node, (parent, token) in enumerate(tree, 1):
        path = [*before, *path_to(tree, node)]
        behind = bpe.decode([each - FIRST for each in path if each >= FIRST], skip_special_tokens=False)
        wanted = choices[parent]
        texts = [bpe.decode([each - FIRST]) if each >= FIRST else "" for each in (token, wanted)]
        apart = [abs(ord(a) - ord(b)) for a, b in zip(*texts, strict=False)]
        whole = HALF not in "".join(texts) and len(texts[0]) == len(texts[1])
        near = whole and sum(each > 0 for each in apart) == 1
        assert found.exact[0, node] == (token == wanted)
        assert found.distances[0, node] == (max(apart) if near else token != wanted)
        assert (found.dimensions[0, node] >= 0) == near
        if near and HALF not in behind:
            assert found.dimensions[0, node] == len(behind) + np.argmax(apart)


def test_tokens_of_half_a_character_are_tried_too() -> None:
    assert any(HALF in token.decode("utf-8", errors="replace") for token in fitted(12.0).token_bytes)
    assert max(len(token.decode()) for token in fitted(1.0).token_bytes) > 1


@given(
    numbers=st.lists(st.integers(0, 1000), min_size=28, max_size=28),
    off=st.lists(st.integers(-9, 9), min_size=28, max_size=28),
    tolerances=st.lists(st.integers(0, 20), min_size=7, max_size=7),
)
def test_numbers_within_their_tolerance_are_within_the_bound(
    numbers: list[int], off: list[int], tolerances: list[int]
) -> None:
    codec = digits_codec()
    units = codec.spread_bins(tolerances, 0)
    moved = [each + max(-r, min(r, step)) for each, step, r in zip(numbers, off, units, strict=True)]
    both = (" ".join(str(max(0, min(1000, each))) for each in row) for row in (numbers, moved))
    ids = ([SPACE if character == " " else 20 + int(character) for character in text] for text in both)
    first, second = map(codec.decode, ids)
    assert (np.abs(first - second) <= codec.bound(units) * (1 + 1e-9)).all()


@given(data=st.data(), tolerances=st.lists(st.integers(0, 4), min_size=7, max_size=7))
def test_coefficients_within_their_tolerance_are_within_the_bound_at_every_step(
    data: st.DataObject, tolerances: list[int]
) -> None:
    codec = fast_codec()
    steps = np.array(codec.spread_bins(tolerances, 0)).reshape(HORIZON, 7)
    middle = np.array(data.draw(st.lists(st.integers(-5, 5), min_size=28, max_size=28))).reshape(HORIZON, 7)
    signs = np.array(data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=28, max_size=28))).reshape(HORIZON, 7)
    first, second = (decoded_coefficients(codec, each) for each in (middle, middle + signs * steps))
    bound = codec.bound(steps.flatten().tolist())
    assert (np.abs(first - second) <= bound * (1 + 1e-9) + 1e-12).all()


def decoded_coefficients(codec: FastCodec, coefficients: np.ndarray) -> np.ndarray:
    text = "".join(chr(each - codec.tokenizer.min_token) for each in coefficients.flatten().tolist())
    return codec.decode([FIRST + i for i in codec.tokenizer.bpe.encode(text).ids])


@pytest.mark.parametrize("make", [digits_codec, fast_codec])
@given(metres=st.floats(0.0, 0.05), radians=st.floats(0.0, 0.05), gripper=st.integers(0, 3))
def test_metres_and_radians_bound_every_joint_at_every_step(
    make: Any, metres: float, radians: float, gripper: int
) -> None:
    codec = make()
    try:
        bound = codec.bound(codec.bins_within(metres=metres, radians=radians, gripper_bins=gripper))
    except UserError as error:
        assert "smaller than one" in str(error)
        return
    assert bound.shape == (HORIZON, 7)
    assert (bound[:, :3] <= metres * (1 + 1e-9)).all() and (bound[:, 3:6] <= radians * (1 + 1e-9)).all()
    assert (bound[:, :3] > 0).any() == (metres > 0)
    assert (bound[:, 6] > 0).all() == (gripper > 0)


def test_a_tolerance_too_small_for_one_step_says_what_is_not() -> None:
    with pytest.raises(UserError, match="smaller than one step of any FAST coefficient of x"):
        fast_codec().bins_within(metres=1e-5, radians=0.0, gripper_bins=0)
    with pytest.raises(UserError, match="smaller than one bin of x"):
        digits_codec().bins_within(metres=1e-5, radians=0.0, gripper_bins=0)


# With random models


@pytest.fixture(scope="module", params=nightly_but(lambda codec: codec == "digits", ["digits", "fast"]))
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return any_chunks(tmp_path_factory.mktemp("policy"), request.param)


def seen(seed: int) -> Observation:
    image = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", 1)


def own_choices(policy: OpenVLATarget, observation: Observation, tokens: Sequence[int]) -> list[int]:
    """The target's own token behind each prefix of an answer, in one forward from an empty cache."""
    prompt = policy.prompt_embeddings(observation, policy.prompt.ids(observation.instruction))
    sequence = torch.cat((prompt, policy.decoder.embed_tokens(torch.tensor(tokens[:-1], dtype=torch.int64))))
    cache = new_cache(policy.decoder, slots=1, slot_rows=len(sequence))
    forward = packed_forward(policy.decoder, [Segment(0, 0, sequence, wanted=len(tokens))], cache)
    return forward.logits.argmax(dim=-1).tolist()


@torch.inference_mode()
def test_an_answer_stays_within_its_tolerance_of_the_targets_own(policy: OpenVLATarget) -> None:
    relaxed: list[int] = []

    @settings(max_examples=examples(80), derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data(), seed=st.integers(0, 5), r=st.integers(0, 12))
    def stays(data: st.DataObject, seed: int, r: int) -> None:
        plain = Engine(policy, EngineSettings("ar")).act(seen(seed))
        assert isinstance(plain, Action)
        acceptance = AcceptanceSettings("bin_distance", bins=(r,), gripper_bins=r)
        drafts = adjusted(DraftSettings(), chunk_shift=True)
        engine = Engine(policy, EngineSettings("spec", draft=drafts, acceptance=acceptance))
        last = read_config(policy.directory).token_vocab_size - 1
        engine.drafter = Scripted(data, plain.tokens, low=last - 10, high=last)  # type: ignore[assignment]
        action = engine.act(seen(seed))
        assert isinstance(action, Action)
        choices = own_choices(policy, seen(seed), action.tokens)
        for token, own, off in zip(action.tokens, choices, action.record.bins_off, strict=True):
            assert off == 0 if token == own else 1 <= off <= r
            relaxed.append(token != own)

    stays()
    assert any(relaxed), "no token was relaxed"


@pytest.mark.parametrize(("make", "most"), [(digits_codec, 74), (fast_codec, 50)])
def test_a_comparison_is_a_known_number_of_launches_whatever_the_tree(make: Any, most: int) -> None:
    codec = make()
    for nodes in (2, 9):
        case = verify_tree(make_tree([25] * nodes, range(-1, nodes - 1)), torch.zeros(nodes, 2), position=7)
        trees = case.verification().trees
        codec.distances.compare(trees)  # the tables are uploaded once
        with Launches() as launches:
            codec.distances.compare(trees)
        assert launches.counted.total() == most, launches.counted
