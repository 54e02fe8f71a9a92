# SPDX-License-Identifier: Apache-2.0
"""A kernel that computes something else than its reference is found before it decodes, and no kernel is used then."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.checkpoints import load_openvla, write_checkpoint
from support.static_forwards import use_table

from benchmarks.random_policy import random_decoder
from specvla_kernels import (
    accept_within,
    commit_kv,
    device,
    gated_unit,
    greedy_choice,
    packed_attention,
    repetition_penalty,
    rope_write_kv,
    uncertainty,
)
from specvla_ros.engine import engine as engines
from specvla_ros.engine import kernel_check
from specvla_ros.engine.cuda_graphs import ForwardSizes
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kernel_check import kernel_fault
from specvla_ros.engine.kv_cache import KVCache, new_cache
from specvla_ros.engine.runner import Runner
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.config import DecoderShape
from specvla_ros.speculation.settings import DraftSettings, adjusted

OPERATORS: dict[str, ModuleType] = {
    "gated_unit": gated_unit,
    "rope_write_kv": rope_write_kv,
    "greedy_choice": greedy_choice,
    "accept_within": accept_within,
    "commit_kv": commit_kv,
    "penalised_choice": repetition_penalty,
    "uncertainty": uncertainty,
}
TEMPORAL = adjusted(DraftSettings(nodes=8), temporal=True)
SHAPE = DecoderShape(32, 40, 2, 4, 2, 16, vocab_size=50, max_position_embeddings=128)


def kernels_wanted(_: torch.Tensor) -> bool:
    return not getattr(device._wanted_here, "references", False)


def wrong(run: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if out is None:  # what it writes is wrong
            return args[0].add_(1)
        return out * 2 if out.is_floating_point() else out + 1

    return computed


@pytest.mark.parametrize("broken", ["", "packed_attention", *OPERATORS])
def test_a_kernel_that_differs_from_its_reference_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch)
    monkeypatch.setattr(kernel_check, "has_kernels", kernels_wanted)
    for name, module in {**OPERATORS, "packed_attention": packed_attention}.items():
        monkeypatch.setattr(module, "has_kernels", kernels_wanted)
        right = getattr(module, f"{name}_triton" if name == "packed_attention" else f"{name}_reference")
        monkeypatch.setattr(module, f"{name}_triton", wrong(right) if name == broken else right)
    decoder = random_decoder(SHAPE)
    sizes = ForwardSizes(slots=2, nodes=8, prompts=(20,))
    found = kernel_fault(decoder, new_cache(decoder, slots=2, slot_rows=48), sizes)
    assert found.startswith("a kernel differs from its reference: ") == bool(broken), found
    of_layer = broken in ("packed_attention", "gated_unit", "rope_write_kv")
    assert ("first layer" in found) == of_layer


def checked(monkeypatch: pytest.MonkeyPatch, operator: ModuleType, name: str, kernel: Callable[..., Any]) -> str:
    """What is found with this kernel, the others being right."""
    monkeypatch.setattr(kernel_check, "has_kernels", kernels_wanted)
    monkeypatch.setattr(operator, "has_kernels", kernels_wanted)
    monkeypatch.setattr(operator, name, kernel)
    decoder = random_decoder(SHAPE)
    sizes = ForwardSizes(slots=2, nodes=8, prompts=tuple(range(20, 40)))  # instructions of any length
    return kernel_fault(decoder, new_cache(decoder, slots=2, slot_rows=48), sizes)


def test_a_kernel_that_is_wrong_for_trees_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch)
    right = packed_attention.packed_attention_triton  # that of the table

    def sees_siblings(q: Any, keys: Any, values: Any, ancestors: torch.Tensor, *others: Any) -> torch.Tensor:
        return right(q, keys, values, torch.full_like(ancestors, -1), *others)

    found = checked(monkeypatch, packed_attention, "packed_attention_triton", sees_siblings)
    assert found.startswith("a kernel differs from its reference: the first layer on "), found


def test_a_kernel_that_does_not_compile_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):
        """Triton's errors are of no class that torch has."""

    def refused(*_: Any) -> torch.Tensor:
        raise OutOfResources("out of resource: shared memory, Required: 98304, Hardware limit: 65536")

    found = checked(monkeypatch, gated_unit, "gated_unit_triton", refused)
    assert found.startswith("a kernel cannot run on this GPU: OutOfResources: out of resource: shared memory"), found


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
    ids=["torch", "Jetson"],
)
def test_a_full_card_says_nothing_of_its_kernels(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(kernel_check, "has_kernels", kernels_wanted)
    monkeypatch.setattr(kernel_check, "_first_layer", full)
    decoder = random_decoder(SHAPE)
    cache = new_cache(decoder, slots=2, slot_rows=48)
    assert kernel_fault(decoder, cache, ForwardSizes(slots=2, nodes=8, prompts=(20,))) == ""
    assert "not compared with their references" in caplog.text


def test_without_kernels_there_is_nothing_to_check() -> None:
    decoder = random_decoder(SHAPE)
    cache = new_cache(decoder, slots=2, slot_rows=48)
    cache.keys.normal_()  # a new cache holds whatever was in its memory, also NaN, which equals nothing
    before = cache.keys.clone()
    assert kernel_fault(decoder, cache, ForwardSizes(slots=2, nodes=8, prompts=(20,))) == ""
    assert cache.keys.equal(before)


def test_an_engine_whose_kernels_fail_decodes_on_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_openvla(write_checkpoint(tmp_path, seed=4), device="cpu")
    said: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(engines, "kernel_fault", lambda *_: "it is wrong")
    monkeypatch.setattr(engines, "distrust_kernels", lambda *fault: said.append(fault))
    Engine(policy, EngineSettings("ar")).warm_up()
    assert said == [(torch.device("cpu"), "it is wrong")]


def test_kernels_that_cannot_run_decode_no_test_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the policy would be refused for a fault of the kernels, which it can do without."""
    policy = load_openvla(write_checkpoint(tmp_path, seed=4), device="cpu")
    right, distrusted = Runner.run, list[str]()

    def run(*args: Any) -> Any:
        if not distrusted:
            raise RuntimeError("PassManager::run failed")
        return right(*args)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(engines, "kernel_fault", lambda *_: "a kernel cannot run on this GPU")
    monkeypatch.setattr(engines, "distrust_kernels", lambda _, fault: distrusted.append(fault))
    Engine(policy, EngineSettings("ar")).warm_up()
    assert distrusted == ["a kernel cannot run on this GPU"]


def test_a_switch_checks_the_kernels_on_its_own_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding has trees of one node, on which a wrong mask shows nothing."""
    policy = load_openvla(write_checkpoint(tmp_path, seed=4), device="cpu")
    said: list[str] = []

    def fault(_: Any, cache: KVCache, sizes: ForwardSizes) -> str:
        return f"wrong for {sizes.nodes} nodes" if sizes.nodes > 1 else ""

    monkeypatch.setattr(engines, "kernel_fault", fault)
    monkeypatch.setattr(engines, "distrust_kernels", lambda _, fault: said.append(fault))
    engine, spec = Engine(policy, EngineSettings("ar")), EngineSettings("spec", draft=TEMPORAL)
    engine.switch(spec)
    assert not said, "nothing is checked that was not warmed up"
    engine.switch(EngineSettings("ar"))
    engine.warm_up()
    engine.switch(spec)
    assert said == ["wrong for 8 nodes"]


def test_no_kernel_runs_on_a_device_whose_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_distrusted", {})
    gpu, other = torch.device("cuda:0"), torch.device("cuda:1")
    device.distrust_kernels(gpu, "a kernel differs")
    try:
        assert device.why_no_kernels(gpu, torch.bfloat16) == "a kernel differs"
        assert device.operators_on(gpu, torch.float32) == "PyTorch references: a kernel differs"
        if torch.cuda.device_count() != 1:  # a GPU that is not there cannot be asked beside one that is
            assert device.why_no_kernels(other, torch.bfloat16) != "a kernel differs"
    finally:
        device.why_no_kernels.cache_clear()
