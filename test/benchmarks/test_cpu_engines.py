# SPDX-License-Identifier: Apache-2.0
"""Contestants on a CPU are timed over the tokens after the first, and compared with our text."""

import pytest

from benchmarks.speed import cpu_engines
from benchmarks.speed.cpu_engines import NAMES, TOKENS, Times, contestant


class Process:
    """A contestant's end of the pipe: a prompt takes a second, each further token 10 ms."""

    def __init__(self, text):
        self._text = text

    def send(self, request):
        self._tokens = request[1]

    def recv(self):
        return 1.0 + 0.01 * (self._tokens - 1), self._text[: self._tokens]


def timed(text):
    times = Times()
    for index in range(len(times.texts)):
        times.add(index, Process(text), [1, 2, 3])  # type: ignore[arg-type]
    return times


def test_a_prompt_and_its_tokens_are_timed_apart_and_texts_compared_as_far_as_they_agree():
    right, other = timed("a" * TOKENS), timed("a" * (TOKENS // 4) + "b" * TOKENS)
    found = other.summary(right)
    assert found["prompt_s"] == pytest.approx(1.0) and found["token_s"] == pytest.approx(0.01)
    assert found["token_range_s"] == pytest.approx([0.01, 0.01])
    assert found["same"] == 0.25 and right.summary(right)["same"] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_each_row_names_its_engine_weights_and_drafting(name, monkeypatch, tmp_path):
    made = []

    def noted(engine, file_at):
        return lambda *given, lookup, **_: made.append((engine, given[file_at].name if file_at >= 0 else "", lookup))

    for engine, file_at in {"ours": -1, "transformers": -1, "llama_cpp": 0, "openvino": 1}.items():
        monkeypatch.setattr(cpu_engines, engine, noted(engine, file_at))
    monkeypatch.setattr(cpu_engines, "gguf_file", lambda work, kind: work / kind)
    target = type("Target", (), {"decoder": type("Decoder", (), {"layers": ()})})
    contestant(name, target, tmp_path, threads=1)  # type: ignore[arg-type]
    engine, weights, *drafting = name.split(", ")
    file = {"llama.cpp, float32": "F32", "llama.cpp, 8 bits": "Q8_0", "OpenVINO, float16 weights": "F16"}
    expected = file.get(f"{engine}, {weights}", "Q8_0" if engine == "OpenVINO" else "")
    assert made == [({"llama.cpp": "llama_cpp", "OpenVINO": "openvino"}.get(engine, engine), expected, bool(drafting))]
