# SPDX-License-Identifier: Apache-2.0
"""Compiled layers compute what the layers do, are compiled once per machine, and are never needed."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draft_heads import policy_with_random_head
from support.nightly import examples, nightly_but
from torch import nn

from benchmarks.random_policy import random_decoder
from specvla_kernels.graph_capture import row_errors
from specvla_kernels.layout import MAX_TREE_NODES, Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models import compiled_layers
from specvla_ros.models.compiled_layers import CompiledLayers, Run, are_compilable, cache_folder, compile_layers
from specvla_ros.models.config import DecoderShape, DecoderVariant
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.models.quantization import quantize_layer

SLOT_ROWS = 112
EVERYTHING = DecoderVariant(qkv_bias=True, qk_norm=True, unit_offset_norms=True, gate="gelu_tanh")
VARIANTS = {"llama": (DecoderVariant(), torch.float32), "others": (EVERYTHING, torch.float32)}
VARIANTS |= {"bfloat16": (EVERYTHING, torch.bfloat16)}
MODES = ("ar", "spec", "pipeline", "specpipe", "auto")


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own, empty at first, and a compiler that may be used."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TORCH_COMPILE_DISABLE", "0")
        yield folder


@pytest.fixture(scope="module")
def policy(home: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    """In float64, where rounding decides nothing."""
    made = policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=6, hidden_size=64, layers=2)
    made.decoder.compile_layers()
    assert made.decoder.compiled is not None and made.decoder.compiled.compile_s > 0
    return made


@pytest.fixture(scope="module")
def compiled(policy: OpenVLATarget) -> CompiledLayers:
    """For trees of any size, whatever is faster on this machine."""
    assert policy.decoder.compiled is not None
    return replace(policy.decoder.compiled, most_rows=MAX_TREE_NODES)


def check(decoder: PackedDecoder, compiled: CompiledLayers, parents: Sequence[int], before: int, slot: int) -> None:
    """The same logits, hidden states, keys and values, and nothing written elsewhere."""
    tree = Segment(slot, before, torch.arange(len(parents)) % 30, Ancestry.from_parents(parents), wanted=len(parents))
    found = []
    for layers in (None, compiled):
        decoder.compiled = layers
        cache = new_cache(decoder, slots=3, slot_rows=SLOT_ROWS)
        for store in (cache.keys, cache.values):
            store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(1)))
        with torch.inference_mode():
            result = packed_forward(decoder, [tree], cache)
        found.append((result.logits, result.hidden, cache.keys, cache.values))
    decoder.compiled = compiled
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}[decoder.dtype]
    for expected, got in zip(*found, strict=True):
        assert row_errors(got.flatten(0, -2), expected.flatten(0, -2)).max() <= tolerance


def parents_of(choices: Sequence[float]) -> list[int]:
    return [-1, *(int(share * (node + 1)) for node, share in enumerate(choices))]


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.floats(0, 1, exclude_max=True), max_size=MAX_TREE_NODES - 1).map(parents_of),
    st.integers(0, SLOT_ROWS - MAX_TREE_NODES),
    st.integers(0, 2),
)
def test_a_compiled_forward_of_any_tree_is_that_of_the_layers(
    policy: OpenVLATarget, compiled: CompiledLayers, parents: list[int], before: int, slot: int
) -> None:
    check(policy.decoder, compiled, parents, before, slot)


@pytest.mark.parametrize("name", nightly_but(lambda name: name == "others", VARIANTS))
def test_every_variant_of_the_decoder_is_compiled(name: str) -> None:
    variant, dtype = VARIANTS[name]
    shape = DecoderShape(48, 96, 2, 4, 2, 16, vocab_size=40, max_position_embeddings=256, variant=variant)
    decoder = random_decoder(shape, dtype=dtype)
    made = replace(compile_layers([*decoder.layers]), most_rows=MAX_TREE_NODES)
    for parents in ([-1], [-1, 0], [-1, 0, 0, 1, 2, 2], [-1] + [0] * 40):
        check(decoder, made, parents, before=30, slot=1)


def test_rows_that_lie_between_others_features_are_compiled(policy: OpenVLATarget, compiled: CompiledLayers) -> None:
    """Those of Qwen3-VL, each followed by its DeepStack features; compiled layers take every row after the last."""
    decoder = random_decoder(replace(policy.decoder.config, deepstack=1), dtype=policy.decoder.dtype)
    made = replace(compile_layers([*decoder.layers]), most_rows=MAX_TREE_NODES)
    for parents in ([-1], [-1, 0], [-1, 0, 0, 1, 2, 2]):
        check(decoder, made, parents, before=30, slot=1)


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def answers(engine: Engine) -> dict[int, tuple[int, ...]]:
    """Tokens by stamp, of frames that arrive whenever there is room."""
    ended: list[Outcome] = []
    for stamp_ns in range(1, 6):
        ended += engine.submit(Observation(image(stamp_ns), "put carrot on plate", stamp_ns))
        ended += engine.tick()
        while not engine.has_room:
            ended += engine.tick()
    while engine.busy:
        ended += engine.tick()
    return {each.observation.stamp_ns: each.tokens for each in ended if isinstance(each, Action)}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_decodes_the_tokens_of_plain_decoding_without_compiled_layers(
    policy: OpenVLATarget, compiled: CompiledLayers, mode: str
) -> None:
    policy.decoder.compiled = None
    expected = answers(Engine(policy, EngineSettings("ar")))
    used: list[int] = []

    def counting(run: Run) -> Run:
        def counted(given: list[torch.Tensor]) -> list[torch.Tensor]:
            used.append(len(given))
            return run(given)

        return counted

    policy.decoder.compiled = replace(
        compiled, one_row=counting(compiled.one_row), several_rows=counting(compiled.several_rows)
    )
    assert answers(Engine(policy, EngineSettings(mode))).items() <= expected.items()
    policy.decoder.compiled = compiled
    assert used, "no forward was compiled"


def test_an_engine_compiles_in_its_warm_up_and_says_so(policy: OpenVLATarget) -> None:
    policy.decoder.compiled = None
    engine = Engine(policy, EngineSettings("ar"))
    assert "compiled_layers" not in engine.describe()
    engine.warm_up()
    assert policy.decoder.compiled is not None
    assert policy.decoder.compiled.compile_s == 0, "they were on disk"
    assert engine.describe()["compiled_layers"].startswith("for trees of up to ")


def from_the_disk(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """In place of the compiler: copies what is in the cache now, and counts."""
    (kept,) = cache_folder().iterdir()
    packages = {each.name: each.read_bytes() for each in kept.glob("*.pt2")}
    made: list[Path] = []

    def copies(layer: nn.Module, folder: Path) -> None:
        made.append(folder)
        for name, content in packages.items():
            (folder / name).write_bytes(content)

    monkeypatch.setattr(compiled_layers, "_compile_apart", copies)
    return made


@pytest.fixture
def alone(policy: OpenVLATarget, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with this policy's layers only."""
    shutil.copytree(home / "specvla_ros/layers" / compiled_layers._key(policy.decoder.layers[0]), tmp_path / "kept")
    folder = tmp_path / "specvla_ros" / "layers" / compiled_layers._key(policy.decoder.layers[0])
    shutil.copytree(tmp_path / "kept", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder


def test_a_damaged_result_is_made_anew(policy: OpenVLATarget, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = from_the_disk(monkeypatch)
    whole = (alone / "one_row.pt2").read_bytes()
    (alone / "one_row.pt2").write_bytes(whole[: len(whole) // 2])
    compile_layers([*policy.decoder.layers])
    assert len(made) == 1
    assert (alone / "one_row.pt2").read_bytes() == whole
    compile_layers([*policy.decoder.layers])
    assert len(made) == 1


def test_what_another_machine_compiled_is_not_run(
    policy: OpenVLATarget, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = from_the_disk(monkeypatch)
    monkeypatch.setattr(compiled_layers, "_processor", lambda: "one without these instructions")
    compile_layers([*policy.decoder.layers])
    assert len(made) == 1


def test_other_threads_shapes_or_numbers_are_other_layers(policy: OpenVLATarget) -> None:
    def key(layer: Any) -> str:
        return compiled_layers._key(layer)

    first, second = policy.decoder.layers
    assert key(first) == key(second)
    shape = DecoderShape(48, 96, 2, 4, 2, 16, vocab_size=40)
    others = [shape, replace(shape, num_key_value_heads=4), replace(shape, rms_norm_eps=1e-5)]
    others.append(replace(shape, variant=DecoderVariant(gate="gelu_tanh")))
    keys = [key(random_decoder(each).layers[0]) for each in others]
    keys.append(key(random_decoder(shape, dtype=torch.bfloat16).layers[0]))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    keys.append(key(first))
    torch.set_num_threads(threads)
    assert len({key(first), *keys}) == 7


def test_a_link_to_a_removed_source_does_not_matter(
    policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build with symbolic links leaves it behind after an update."""
    (tmp_path / "kernel.py").write_text("")
    monkeypatch.setattr(compiled_layers.specvla_kernels, "__path__", [str(tmp_path)])
    before = compiled_layers._key(policy.decoder.layers[0])
    (tmp_path / "removed.py").symlink_to(tmp_path / "nowhere.py")
    assert compiled_layers._key(policy.decoder.layers[0]) == before


def test_a_cache_that_cannot_be_written_is_told(
    policy: OpenVLATarget,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from_the_disk(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_layers([*policy.decoder.layers]).most_rows >= 0
    assert "the compiled layers cannot be kept, so each start compiles them again: " in caplog.text


def test_without_a_compiler_the_engine_tells_it_and_decodes(
    policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    policy.decoder.compiled = None
    engine = Engine(policy, EngineSettings("ar"))
    engine.warm_up()
    assert policy.decoder.compiled is None
    assert "No working C++ compiler found" in engine.describe()["compiled_layers"]
    assert engine.describe()["compiled_layers"].endswith("apt install g++, or set CXX")
    assert "decoding without compiled layers" in caplog.text
    assert len(answers(engine)) == 5


def test_layers_that_compute_something_else_are_not_used(
    policy: OpenVLATarget, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = from_the_disk(monkeypatch)
    for layer in policy.decoder.layers:
        monkeypatch.setattr(layer, "gate_name", "gelu_tanh")  # compiled were those with silu
    policy.decoder.compiled = None
    engine = Engine(policy, EngineSettings("ar"))
    engine.warm_up()
    assert len(made) == 1 and policy.decoder.compiled is None
    assert engine.describe()["compiled_layers"].startswith("off: the compiled layer is off by 0.")


def test_the_environment_turns_it_off(policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    policy.decoder.compiled = None
    engine = Engine(policy, EngineSettings("ar"))
    engine.warm_up()
    assert policy.decoder.compiled is None
    assert engine.describe()["compiled_layers"] == "off: TORCH_COMPILE_DISABLE is set"


def test_layers_in_8_bits_run_as_they_are(policy: OpenVLATarget) -> None:
    decoder = random_decoder(DecoderShape(64, 128, 1, 4, 4, 16, vocab_size=40))
    assert are_compilable([*decoder.layers])
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    quantize_layer(layer, "w8a8")
    assert not are_compilable([*decoder.layers])
