# SPDX-License-Identifier: Apache-2.0
"""A GPU that is too small, or that this torch was not built for, is said before anything moves. No GPU here."""

from pathlib import Path

import pytest
import torch
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.errors import UserError
from specvla_ros.models import checkpoint
from specvla_ros.models.checkpoint import explained_shortage
from specvla_ros.models.weights import tensor_sizes

GPU = torch.device("cuda", 0)
LAYERS, OTHERS = 6_500_000_000, 1_000_000_000


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A GPU's free memory in GiB, and a checkpoint of OpenVLA's size."""
    found = {"gib": 24.0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(found["gib"] * 2**30), 0))
    sizes = {"model.layers.0.mlp.up_proj.weight": LAYERS, "model.embed_tokens.weight": OTHERS}
    monkeypatch.setattr(checkpoint, "tensor_sizes", lambda _: sizes)
    monkeypatch.setattr(checkpoint, "_runs", lambda kind, _: kind != "fp8")
    return found


def load(dtype: torch.dtype, quantization: str, error: Exception, *, quantizes: bool = True) -> None:
    with explained_shortage(Path("policy"), GPU, dtype, quantization, quantizes=quantizes):
        raise error


@pytest.mark.parametrize(
    ("gib", "dtype", "kind", "said"),
    [
        (24.0, torch.float32, "none", "27.9 GiB in float32, .*24.0 GiB free: choose dtype bfloat16 .14.0 GiB. or"),
        (12.0, torch.bfloat16, "none", r"14.0 GiB in bfloat16, .*: choose model.quantization int4 \(5.2 GiB\) or"),
        (12.0, torch.bfloat16, "none", r"quantization w8a8_hadamard \(8.0 GiB\), or stop other processes on the GPU$"),
        (4.0, torch.bfloat16, "w8a8", "8.0 GiB in bfloat16 with w8a8 layers, .*too little for any format"),
    ],
)
def test_too_little_memory_says_what_fits(
    free: dict[str, float], gib: float, dtype: torch.dtype, kind: str, said: str
) -> None:
    free["gib"] = gib
    with pytest.raises(UserError, match=said) as raised:
        load(dtype, kind, torch.OutOfMemoryError("CUDA out of memory"))
    assert "fp8" not in str(raised.value), "this GPU cannot compute with it"


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float32, r"27\.9 GiB in float32, .*: choose dtype bfloat16 \(14\.0 GiB\), or stop"),
        (torch.bfloat16, r"14\.0 GiB in bfloat16, .* free, too little for any format"),
    ],
)
def test_a_family_without_quantisation_is_not_told_to_quantise(
    free: dict[str, float], dtype: torch.dtype, said: str
) -> None:
    free["gib"] = 24.0 if dtype == torch.float32 else 12.0
    with pytest.raises(UserError, match=said) as raised:
        load(dtype, "none", torch.OutOfMemoryError("CUDA out of memory"), quantizes=False)
    assert "quantization" not in str(raised.value)


def test_memory_that_runs_out_while_loading_is_not_blamed_on_the_format_in_use(free: dict[str, float]) -> None:
    free["gib"] = 15.5
    with pytest.raises(UserError, match=r"choose model\.quantization int4") as raised:
        load(torch.bfloat16, "none", torch.OutOfMemoryError("CUDA out of memory"))
    assert "dtype bfloat16" not in str(raised.value)


def test_quantised_layers_in_float32_are_told_to_change_the_dtype_too(free: dict[str, float]) -> None:
    free["gib"] = 9.5
    with pytest.raises(UserError, match=r"dtype bfloat16 with model\.quantization int4 \(5\.2 GiB\) or"):
        load(torch.float32, "w8a8", torch.OutOfMemoryError("CUDA out of memory"))


def test_files_in_another_place_have_no_sizes_and_say_so(
    free: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_files(_: Path) -> dict[str, int]:
        raise UserError("policy holds no model.safetensors")

    monkeypatch.setattr(checkpoint, "tensor_sizes", no_files)
    with pytest.raises(UserError, match=r"^policy: the weights do not fit; cuda:0 has 24\.0 GiB free: stop other"):
        load(torch.bfloat16, "none", torch.OutOfMemoryError("CUDA out of memory"), quantizes=False)


def test_only_loaders_that_take_quantisation_are_told_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_checkpoint(tmp_path, seed=1, hidden_size=64, layers=2)
    monkeypatch.setattr(checkpoint, "_device", lambda _: GPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 0))
    monkeypatch.setattr(checkpoint, "_BESIDE", 0)
    monkeypatch.setattr(checkpoint, "_runs", lambda *_: True)
    with pytest.raises(UserError, match=r"dtype bfloat16 with model\.quantization"):
        checkpoint.load_target(tmp_path, dtype="float32")
    monkeypatch.setattr(checkpoint, "loader_of", lambda _: lambda directory, **_: None)
    with pytest.raises(UserError) as raised:
        checkpoint.load_target(tmp_path, dtype="float32")
    assert "quantization" not in str(raised.value)


def test_other_faults_stay_what_they_are(free: dict[str, float]) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        load(torch.bfloat16, "none", RuntimeError("a shape"))


def test_sizes_come_from_the_headers(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, seed=1, hidden_size=64, layers=2)
    sizes = tensor_sizes(tmp_path)
    layers = [name for name in sizes if checkpoint._QUANTISED.search(name)]
    assert len(layers) == 2 * 7 and sum(sizes.values()) > sum(sizes[name] for name in layers) > 0


def test_a_gpu_that_this_torch_was_not_built_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_image(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    for name, value in (
        ("is_available", lambda: True),
        ("get_device_capability", lambda _: (13, 0)),
        ("get_device_name", lambda _: "GPU of tomorrow"),
        ("get_arch_list", lambda: ["sm_90", "sm_120"]),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", no_image)
    with pytest.raises(UserError, match=r"GPU of tomorrow, which is sm_130 .*built for sm_90, sm_120: install a build"):
        checkpoint._device("cuda")
