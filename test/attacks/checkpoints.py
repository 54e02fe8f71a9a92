# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with damaged files, weights of other formats, and nonsense in every field of every JSON file.

A case is right where the checkpoint is refused, acts as before, or acts otherwise because of a field that decides how
it acts and holds a value of its type.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attacks.tally import Silent, Tally
from safetensors.torch import load_file, save_file

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import require_openvla
from specvla_ros.models.observation import Observation

# Stand for what Python's json does not write; replaced in the text.
_MANY_DIGITS, _DEEP = "many digits", "deep"
_RAW = {_MANY_DIGITS: "9" * 5000, _DEEP: "[" * 10**5 + "]" * 10**5}
_GONE = object()
_NASTY: tuple[Any, ...] = (
    *(_GONE, None, True, False, 0, 1, -1, 3, 10**6, 2**31, 2**63, 10**30, 0.0, -0.5, 1e-300, 1e300, 64.0),
    *(float("inf"), float("nan"), "", "false", "7", "\ud800", "x" * 10**5, "../../etc/passwd"),
    *([], {}, [[]], [None], ["x"], [0.5], {"x": 1}, {"": None}, _MANY_DIGITS, _DEEP),
)
# Fields that decide what a policy does, wherever a value of their type stands: another value is another policy.
_DECIDING = (
    *("norm_stats", "q01", "q99", "mask", "rope_theta", "rms_norm_eps", "num_attention_heads", "head_dim", "num_heads"),
    *("num_key_value_heads", "means", "stds", "interpolations", "image_resize_strategy", "tvf_letterbox_fill"),
    *("pad_to_multiple_of", "n_action_bins", "llm_backbone_id", "instructions", "action_codec", "vocab", "model"),
    *("normalizer", "pre_tokenizer", "post_processor", "added_tokens", "decoder", "image_sizes", "input_sizes"),
    *("max_position_embeddings", "weights"),
)
_JSON = ("config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors.index.json")
_LEAVES = 12  # tried of one list or object whose entries are all alike, such as a vocabulary


def attack_json(source: Path, scratch: Path, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Replaces each value of each JSON file by each of the nasty ones.

    Args:
        source: a checkpoint in shards, small.
        scratch: directory for copies.
        limit: number of cases, drawn at random; None: all.
        seed: of the drawing.
    """
    cases = [
        (name, path, value)
        for name in _JSON
        for path in _paths(json.loads((source / name).read_text()), random.Random(seed))
        for value in range(len(_NASTY))
    ]
    if limit is not None:
        cases = random.Random(seed).sample(cases, min(limit, len(cases)))
    tally, usual = Tally(), _act(source)
    victim = Path(shutil.copytree(source, scratch / "victim"))
    for name, path, number in cases:
        original = (source / name).read_text()
        nasty = _NASTY[number]
        (victim / name).write_bytes(_mutated(original, path, nasty))
        where = f"{name}: {'.'.join(map(str, path))} = {'gone' if nasty is _GONE else repr(nasty)[:40]}"
        tally.judge(where, partial(_compare, victim, usual, path))
        (victim / name).write_text(original)
    return tally


def attack_files(source: Path, scratch: Path, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Damages files, swaps them, and writes weights of other formats; arguments as of `attack_json`."""
    cases = [*_damages(source, random.Random(seed)), *_other_weights(source)]
    if limit is not None:
        cases = random.Random(seed).sample(cases, min(limit, len(cases)))
    tally, usual = Tally(), _act(source)
    for name, damage in cases:
        victim = Path(shutil.copytree(source, scratch / "victim", symlinks=True))
        damage(victim)
        # Another bit in a weight is another weight, which no file format in use here can tell.
        field = "weights" if name.startswith("flip") and "header" not in name else ""
        tally.judge(name, partial(_compare, victim, usual, (field,)))
        shutil.rmtree(victim)
    return tally


def _compare(victim: Path, usual: list[Any], path: tuple[Any, ...]) -> str:
    acted = _act(victim)
    if acted == usual:
        return "same action"
    if any(str(step) in _DECIDING for step in path):
        return "another action, by a field that decides it"
    raise Silent(f"acts otherwise: {acted} for {usual}")


def _act(directory: Path) -> list[Any]:
    """What the policy answers to two instructions, and how it calls it."""
    target = require_openvla(load_target(directory, device="cpu", dtype="float32"))
    engine = Engine(target, EngineSettings("ar"))
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    answers: list[Any] = []
    for stamp, instruction in enumerate(("lift the red cube", "lift the blue cube"), start=1):
        engine.check_instruction(instruction)
        outcome = engine.act(Observation(image, instruction, stamp_ns=stamp))
        if isinstance(outcome, Action):
            answers.append([*outcome.tokens, *outcome.values.tolist(), *target.prompt.ids(instruction)])
        elif outcome.reason is DropReason.ENGINE_FAULT:
            raise RuntimeError(outcome.detail)
        else:
            answers.append([outcome.reason.value])
    return answers


def _paths(value: Any, rng: random.Random, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    for key in inner if len(inner) <= 3 * _LEAVES else sorted(rng.sample(inner, _LEAVES)):
        yield from _paths(value[key], rng, (*path, key))


def _mutated(text: str, path: tuple[Any, ...], nasty: Any) -> bytes:
    value = {"": json.loads(text)}
    holder: Any = value
    path = ("", *path)
    for step in path[:-1]:
        holder = holder[step]
    if nasty is _GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = nasty
    written = json.dumps(value.get("", {}))
    for name, raw in _RAW.items():
        written = written.replace(f'"{name}"', raw)
    return written.encode()


def _damages(source: Path, rng: random.Random) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Each file missing, empty, cut, with flipped bytes, a directory, another file, no text."""
    for file in sorted(path.name for path in source.iterdir() if path.suffix in (".json", ".safetensors")):
        content = (source / file).read_bytes()
        header = 8 + struct.unpack("<Q", content[:8])[0] if file.endswith("safetensors") else 0

        def put(data: bytes, file: str = file) -> Callable[[Path], object]:
            return lambda victim: (victim / file).write_bytes(data)

        def directory(victim: Path, file: str = file) -> None:
            (victim / file).unlink()
            (victim / file).mkdir()

        yield f"missing {file}", lambda victim, file=file: (victim / file).unlink()  # type: ignore[misc]
        yield f"directory {file}", directory
        for name, data in (
            ("empty", b""),
            ("zeros", bytes(4096)),
            ("utf-16", "{}".encode("utf-16")),
            ("null", b"null"),
        ):
            yield f"{name} {file}", put(data)
        for _ in range(40):
            yield f"cut {file}", put(content[: rng.randrange(len(content))])
        for i in range(60):
            at = rng.randrange(header if header and i % 2 else len(content))
            damaged = bytearray(content)
            damaged[at] ^= 1 << rng.randrange(8)
            part = "header " if at < header else ""
            if not file.endswith("json"):  # a flipped letter in a JSON file is another name, or another number
                yield f"flip {part}{file}", put(bytes(damaged))
        for another in sorted(path.name for path in source.iterdir() if path.name != file):
            yield f"{another} as {file}", put((source / another).read_bytes())
        if header:
            for length in (0, 1, 2**32, 2**63, 2**64 - 1, header + 10**6):
                yield f"header of {length} in {file}", put(struct.pack("<Q", length) + content[8:])


def _other_weights(source: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Tensors of other number formats, with what belongs to them; more and fewer layers; NaN."""
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    matrix = ".mlp.up_proj.weight"

    def converted(dtype: torch.dtype, beside: str = "", only: str = "") -> Callable[[Path], object]:
        def change(victim: Path) -> None:
            for shard in shards:
                tensors = load_file(victim / shard)
                extra = {}
                for name, tensor in tensors.items():
                    if only in name:
                        tensors[name] = tensor.to(dtype)
                        if beside:
                            extra[name + beside if beside.startswith("_") else name.removesuffix("weight") + beside] = (
                                torch.ones(tensor.shape[0])
                            )
                save_file(tensors | extra, victim / shard)

        return change

    formats = {
        "bitsandbytes int8": (torch.int8, "SCB"),
        "fp8 with scales": (torch.float8_e4m3fn, "_scale_inv"),
        "fp8": (torch.float8_e5m2, ""),
        "GPTQ": (torch.int32, "qzeros"),
        "float with SCB": (torch.float32, "SCB"),
        **{str(each): (each, "") for each in (torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool)},
        "complex": (torch.complex64, ""),
    }
    for only in ("", matrix, "layers.0" + matrix, "projector.fc1", "lm_head", "norm"):
        for name, (dtype, beside) in formats.items():
            yield f"weights {name} {only}", converted(dtype, beside, only)
    for method in ("bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", 7):
        for place in ("", "text_config"):
            yield f"quantization_config {method} {place}", _config(place, quantization_config={"quant_method": method})
    for layers in (0, 1, 3, 4, 10**6):
        yield f"num_hidden_layers {layers}", _config("text_config", num_hidden_layers=layers)
    for tie in (True, "false", "true", 0, 1):
        yield f"tie_word_embeddings {tie!r}", _config("text_config", tie_word_embeddings=tie)


def _config(place: str, **values: Any) -> Callable[[Path], object]:
    def change(victim: Path) -> None:
        path = victim / "config.json"
        config = json.loads(path.read_text())
        (config[place] if place else config).update(values)
        path.write_text(json.dumps(config))

    return change
