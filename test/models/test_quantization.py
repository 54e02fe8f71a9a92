# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: near the unquantised ones, smaller, and refused where they cannot run, saying what can."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from support.checkpoints import load_openvla, shard, write_checkpoint
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import predict
from specvla_ros.lab.planning.cost import OPENVLA_7B
from specvla_ros.models import checkpoint as checkpoints
from specvla_ros.models import quantization
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.decoder import DecoderLayer
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.quantization import (
    MATRICES,
    QUANTIZATIONS,
    Int4Linear,
    RoundedLinear,
    check_quantization,
)
from specvla_ros.policy_parameters import PolicyParameters
from specvla_ros.settings.parameter import walk

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
CHECKPOINT = dict(seed=3, hidden_size=96, layers=4)


def needs_torchao() -> Any:
    return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path, **CHECKPOINT)
    return tmp_path


def stored_bytes(policy: OpenVLATarget) -> int:
    """Of the decoder's layers."""
    layers = policy.decoder.layers
    return sum(tensor.nbytes for tensor in (*layers.parameters(), *layers.buffers()))


def logits(policy: OpenVLATarget, seed: int) -> torch.Tensor:
    prompt = torch.randint(80, (40,), generator=torch.Generator().manual_seed(seed))
    cache = new_cache(policy.decoder, slots=1, slot_rows=64)
    return packed_forward(policy.decoder, [Segment(0, 0, prompt, wanted=40)], cache).logits


@pytest.mark.parametrize(("how", "cosine", "share"), [("w8a8", 0.99, 0.3), ("int4", 0.7, 0.25)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_rounded_weights_are_near_the_unquantised_model_and_smaller(
    checkpoint: Path, dtype: str, how: str, cosine: float, share: float
) -> None:
    exact = load_openvla(checkpoint, device="cpu", dtype=dtype)
    rounded = load_openvla(checkpoint, device="cpu", dtype=dtype, quantization=how)
    for seed in range(4):
        wanted, found = logits(exact, seed), logits(rounded, seed)
        assert found.dtype == wanted.dtype == torch.float32
        assert F.cosine_similarity(wanted, found, dim=1).min() > cosine
        assert not torch.equal(wanted, found)
    assert stored_bytes(rounded) < share * stored_bytes(exact) * (1 if dtype == "float32" else 2)
    assert rounded.describe()["quantization"] == how
    assert exact.describe()["quantization"] == "none"
    assert rounded.describe()["parameters"] == exact.describe()["parameters"]


def test_only_the_layers_matrices_are_quantised(checkpoint: Path) -> None:
    exact = dict(load_openvla(checkpoint, device="cpu").model.named_parameters())
    model = load_openvla(checkpoint, device="cpu", quantization="w8a8").model
    matrices = {f"decoder.layers.{i}.{name}" for i in range(CHECKPOINT["layers"]) for name in MATRICES}
    assert {name for name, module in model.named_modules() if isinstance(module, RoundedLinear)} == matrices
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in matrices:
            assert torch.equal(parameter, exact[name]), name
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@torch.inference_mode()
def test_vision_is_quantised_if_asked_for(checkpoint: Path) -> None:
    load = partial(load_openvla, checkpoint, device="cpu")
    exact, layers, whole = load(), load(quantization="w8a8"), load(quantization="w8a8", quantize_vision=True)
    pixels = torch.randn(exact.model.pixel_shape, generator=torch.Generator().manual_seed(0))
    wanted, same, found = (policy.model.image_embeddings(pixels) for policy in (exact, layers, whole))
    assert torch.equal(wanted, same)
    assert 0.99 < F.cosine_similarity(wanted, found, dim=1).min() < 0.999999
    rounded = {name for name, module in whole.model.named_modules() if isinstance(module, RoundedLinear)}
    beside = {name for name in rounded if not name.startswith("decoder.")}
    vision = [each for each in exact.model.named_modules() if each[0].startswith(("towers.", "projector."))]
    products = {name: module for name, module in vision if isinstance(module, torch.nn.Linear)}
    fit = {name for name, matrix in products.items() if matrix.in_features % 8 == matrix.out_features % 8 == 0}
    assert beside == fit and len(fit) > len(products) / 2
    assert whole.describe()["quantization"] == "w8a8, vision too"
    assert whole.describe()["parameters"] == exact.describe()["parameters"]


@pytest.mark.parametrize("how", ["none", "int4"])
def test_vision_is_not_quantised_without_8_bits(checkpoint: Path, how: str) -> None:
    with pytest.raises(UserError, match=rf"model.quantize_vision needs 8 bits, but model.quantization is {how}: set"):
        load_target(checkpoint, device="cpu", quantization=how, quantize_vision=True)


def test_an_incomplete_checkpoint_is_refused_as_ever_and_progress_ends_at_one(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "sharded")
    *_, last = shard(directory)
    told: list[float] = []
    load_target(directory, device="cpu", quantization="w8a8", progress=lambda _, done: told.append(done))
    assert told == sorted(told)
    assert told[-1] == 1.0
    (directory / last).unlink()
    with pytest.raises(UserError, match=rf"is incomplete: {last} missing, of 2 shards"):
        load_target(directory, device="cpu", quantization="w8a8")


_LOAD = """
import sys
from pathlib import Path
from specvla_ros.models.checkpoint import load_target
def rss():
    status = Path("/proc/self/status").read_text()
    return {key: int(status.split(key + ":")[1].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")}
load_target(sys.argv[2], device="cpu", quantization="w8a8")  # what the libraries take on first use is not the model's
before = rss()["VmRSS"]
policy = load_target(sys.argv[1], device="cpu", quantization="w8a8")
print(rss()["VmHWM"] - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")
def test_the_unquantised_model_is_never_whole_in_memory(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    write_random_checkpoint(large, hidden_size=1024, layers=9)
    write_random_checkpoint(small, hidden_size=64, layers=2)
    command = [sys.executable, "-c", _LOAD, str(large), str(small)]
    # Of matrices below 32 MiB the allocator keeps what was freed; a real checkpoint's are larger.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    unquantised = (large / "model.safetensors").stat().st_size
    assert unquantised > 450e6
    assert int(done.stdout.splitlines()[-1]) < 0.6 * unquantised


Capability = Callable[[tuple[int, int]], None]


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Capability:
    def give(found: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)

    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda _: object())
    return give


@pytest.mark.parametrize(("found", "others"), [((7, 5), False), ((8, 0), True)])
def test_what_openvla_7b_needs_while_it_is_loaded(
    capability: Capability, monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], others: bool
) -> None:
    capability(found)
    with torch.device("meta"):
        model = OpenVLA(OPENVLA_7B)
    sizes = {name: tensor.numel() for name, tensor in model.checkpoint_tensors().items()}
    monkeypatch.setattr(checkpoints, "tensor_sizes", lambda _: sizes)

    def load(wanted: str, free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 8 << 30))
        with checkpoints.explained_shortage(Path("policy"), CUDA, torch.bfloat16, wanted, quantizes=True):
            pass

    load("int4", 6)
    advice = r" model\.quantization int4 \(5\.\d GiB\), or" if others else "too little for any format"
    for wanted, message in (("w8a8", r"take 8\.\d GiB"), ("none", rf"take 14\.\d GiB.*{advice}")):
        with pytest.raises(UserError, match=message):
            load(wanted, 7)


def test_a_cpu_is_told_what_it_can_do(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="'fp8' needs a CUDA GPU; on a CPU choose w8a8, int4 or none"):
        load_target(checkpoint, device="cpu", quantization="fp8")


@pytest.mark.parametrize("shape", [(6, 300), (4, 128), (3, 7)])
def test_int4_is_half_a_step_of_each_group_off_at_most(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0.5  # a group without a range
    packed = Int4Linear(weight)
    assert packed.weight.dtype is torch.uint8 and packed.unpacked().shape == weight.shape
    for start in range(0, shape[1], 128):
        group = weight[:, start : start + 128]
        # The last group is filled up with zeros.
        filled = F.pad(group, (0, 128 - group.shape[1]))
        half = (filled.amax(1, keepdim=True) - filled.amin(1, keepdim=True)) / 15 / 2
        error = (packed.unpacked()[:, start : start + 128] - group).abs()
        assert (error <= half * (1 + 1e-4) + 1e-7).all()
    x = torch.randn(5, shape[1])
    assert torch.equal(packed(x), F.linear(x, packed.unpacked()))


@pytest.mark.parametrize(
    ("wanted", "found", "dtype", "message"),
    [
        ("fp8", (8, 7), torch.bfloat16, r"needs compute capability 8\.9, but cuda:0 has 8\.7 .*: choose w8a8 or int4"),
        ("int4", (7, 5), torch.bfloat16, r"needs compute capability 8\.0, but cuda:0 has 7\.5 .*: choose w8a8$"),
        ("int4", (8, 7), torch.float16, "bfloat16 only, not for float16: set dtype to bfloat16, or choose w8a8"),
        ("fp8", (9, 0), torch.float32, "bfloat16 only, not for float32: set dtype to bfloat16, or choose w8a8"),
    ],
)
def test_a_gpu_that_lacks_it_is_told_what_it_can_do(
    capability: Capability, wanted: str, found: tuple[int, int], dtype: torch.dtype, message: str
) -> None:
    capability(found)
    with pytest.raises(UserError, match=message):
        check_quantization(wanted, CUDA, dtype)


@pytest.mark.parametrize(("wanted", "found"), [("fp8", (8, 9)), ("fp8", (12, 0)), ("int4", (8, 7)), ("w8a8", (8, 7))])
def test_a_gpu_that_has_it_is_let_pass(capability: Capability, wanted: str, found: tuple[int, int]) -> None:
    capability(found)
    check_quantization(wanted, CUDA, torch.bfloat16)


def test_int4_on_a_gpu_names_the_way_to_torchao(capability: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    capability((8, 7))
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"'int4' needs torchao: pip install torchao .*`specvla doctor`"):
        check_quantization("int4", CUDA, torch.bfloat16)
    for ours in ("w8a8", "none"):
        check_quantization(ours, CUDA, torch.bfloat16)


def test_a_torchao_without_the_configuration_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(needs_torchao(), "Int4WeightOnlyConfig")
    with pytest.raises(UserError, match="this torchao is too old for 'int4'"):
        quantization._by_torchao(torch.nn.Linear(96, 288, bias=False))


def test_a_matrix_that_torchao_leaves_as_it_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs_torchao(), "quantize_", lambda *_: None)
    with pytest.raises(UserError, match=r"shape \[288, 96\] cannot be quantised as 'int4'"):
        quantization._by_torchao(torch.nn.Linear(96, 288, bias=False))


@torch.inference_mode()
def test_float8_is_near_the_unquantised_model_on_its_reference(checkpoint: Path) -> None:
    exact, rounded = (load_openvla(checkpoint, device="cpu") for _ in range(2))
    for layer in rounded.decoder.layers:
        assert isinstance(layer, DecoderLayer)
        quantization.quantize_layer(layer, "fp8")
    for seed in range(4):
        wanted, found = logits(exact, seed), logits(rounded, seed)
        near = F.cosine_similarity(wanted, found, dim=1)  # 3 bits of mantissa, in four layers of random weights
        assert near.mean() > 0.97 and near.min() > 0.85
    assert stored_bytes(rounded) < 0.3 * stored_bytes(exact)


def test_an_unknown_quantisation_is_refused() -> None:
    with pytest.raises(UserError, match="must be one of: none, int4, w8a8, w8a8_hadamard, fp8"):
        check_quantization("int3", CPU, torch.float32)


def test_node_and_command_line_offer_the_same() -> None:
    (declared,) = (each for each in walk(PolicyParameters()) if each.name == "model.quantization")
    offered = get_args(inspect.signature(predict).parameters["quantization"].annotation)[0]
    assert declared.parameter.choices == QUANTIZATIONS == tuple(each.value for each in offered)


@pytest.mark.nightly
def test_torchao_says_nothing_in_the_users_terminal(checkpoint: Path) -> None:
    load = f"load_target({str(checkpoint)!r}, quantization='w8a8')"
    code = f"from specvla_ros.models.checkpoint import load_target; {load}"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (loaded.stdout, loaded.stderr) == ("", "")
