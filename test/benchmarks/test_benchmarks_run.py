# SPDX-License-Identifier: Apache-2.0
"""The benchmark scripts run end to end at their smallest size; what is asserted cannot fail by a slow machine."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.benchmark_runs import run
from support.text_models import write_text_model

from benchmarks.acceptance_trace import Trace, trace_lengths
from benchmarks.gpu import kernels
from benchmarks.harness import ColdTimer, command
from benchmarks.papers.spec_vla import PAPERS_R, threshold
from benchmarks.random_policy import SIZES, random_decoder
from benchmarks.results_page import RESULTS
from benchmarks.robot.fast_bound import first_action_bounds_mm
from benchmarks.robot.joint_actions import success_share
from specvla_kernels.layout import Ancestry
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.paired import PairedComparison
from specvla_ros.lab.planning.limits import AcceptanceLengths, spec_vla_relaxed
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.fast_tokenizer import cosines
from specvla_ros.models.quantization import QUANTIZATIONS
from specvla_ros.speculation.tree import Tree


def test_every_published_figure_is_emulated(tmp_path: Path):
    result = run("benchmarks.papers.emulation", tmp_path / "out.json")
    assert {"orin", "rtx5090", "a100"} <= set(result["devices"])
    assert all(figure["device"] in result["devices"] and figure["emulated"] > 0 for figure in result["figures"])


def test_one_frame_in_flight_is_plain_decoding_and_each_more_is_older(tmp_path: Path):
    result = run("benchmarks.papers.actionflow", tmp_path / "out.json", "--tokens", "3,5", "--prompts", "290")
    for device in result["devices"].values():
        depths = {tokens: [row for row in device["depth"] if row["tokens"] == tokens] for tokens in (3, 5)}
        for plain, rows in zip(device["lengths"], depths.values(), strict=True):
            assert rows[0]["actions_per_s"] == pytest.approx(plain["ar_hz"], rel=1e-3)
            assert rows[-1]["actions_per_s"] == pytest.approx(plain["pipeline_hz"], rel=1e-3)
            for key in ("actions_per_s", "latency_s"):
                values = [row[key] for row in rows]
                assert values == sorted(values)
        naive, shift, slots = (row["emulated"] for row in device["layouts"])
        assert naive < shift < slots
        parts = device["breakdown"]["ar"]
        assert sum(parts.values()) == pytest.approx(1 / 1.2663 if "Orin" in device["name"] else 1 / 7.763, rel=1e-3)


@pytest.mark.nightly
def test_the_demo_is_counted_beside_busy_loops(tmp_path: Path):
    options = "--robot", "table", "--loops", "0", "--work", tmp_path
    result = run("benchmarks.robot.busy_demo", tmp_path / "out.json", *options)
    assert result["success"]["episodes"] > 0 and min(result["load"]) >= 0


def test_the_papers_threshold_is_the_papers_preset():
    assert threshold(PAPERS_R).preset_summary == "spec-vla-paper"
    assert threshold(3).acceptance.bins == (3,) and threshold(3).acceptance.gripper_bins == 3


@pytest.mark.nightly
def test_formats_are_compared_alone_for_longer_answers(tmp_path: Path):
    chosen = ["--quantization", "none,w8a8", "--tokens", 9, "--formats-only", "--actions", 1, "--repeats", 1]
    result = run("benchmarks.speed.decode_modes", tmp_path / "out.json", *chosen)
    tiny = result["sizes"]["tiny"]
    assert "modes" not in tiny and result["tokens"] == 9 and result["pictures"].startswith("every frame is an image")
    for found in tiny["quantized"].values():
        assert found["modes"]["ar"]["forwards_per_action"] == 9
        assert found["modes"]["ar"]["rate_over_ar_of_format"] == 1 and found["modes"]["ar"]["pictures_s"] > 0


@pytest.mark.nightly
def test_chunks_and_points_are_compared_on_the_same_starts(tmp_path: Path):
    smallest = ["--episodes", 1, "--rates", "20"]
    points, chunks = run("benchmarks.robot.chunk_output", tmp_path / "out.json", *smallest)["rows"]
    assert set(points["ratio"].values()) == {1.0} and points["against"]["difference"] == 0
    assert points["success"]["episodes"] == chunks["success"]["episodes"] == 5
    assert all(value > 0 for row in (points, chunks) for value in row["median"].values())


@pytest.mark.nightly
def test_a_policy_of_joints_is_judged_on_the_starts_of_one_of_the_tool(tmp_path: Path):
    smallest = ["--episodes", 1, "--work", tmp_path / "work"]
    found = run("benchmarks.robot.joint_actions", tmp_path / "out.json", *smallest)["policies"]
    assert list(found) == ["nano", "joints", "joint_digits"] and found["nano"]["against"]["only_second"] == 0
    assert found["nano"]["share"]["ratio"] == 1
    assert all(each["success"]["episodes"] == 5 and len(each["tasks"]) == 5 for each in found.values())


def test_a_share_of_success_is_the_surer_the_more_pairs_agree() -> None:
    def share(only_first: int, only_second: int, both: int) -> dict[str, float]:
        pairs = [(True, False)] * only_first + [(False, True)] * only_second + [(True, True)] * both
        return success_share(PairedComparison.from_pairs(pairs))

    found = share(6, 1, 91)
    assert found["ratio"] == pytest.approx(92 / 97) and found["low"] < found["ratio"] < found["high"]
    back = share(1, 6, 91)
    assert back["low"] == pytest.approx(1 / found["high"]), "the second's share of the first is the inverse"
    assert found["low"] < share(18, 3, 273)["low"] < share(0, 0, 300)["low"] < 1
    assert share(5, 0, 0)["low"] < share(5, 0, 0)["ratio"] < 1


@pytest.mark.nightly
def test_compiled_layers_are_timed_beside_the_layers_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    found = run("benchmarks.speed.compiled_layers", tmp_path / "out.json", "--repeats", 3)
    assert found["compile_s"] > 0 and [*found["ticks"]] == ["ar", "spec"]
    for seconds in (*(each["seconds"] for each in found["forwards"]), *found["ticks"].values()):
        assert [*seconds] == ["eager", "compiled"] and min(seconds.values()) > 0


@pytest.mark.nightly
def test_each_mechanism_makes_the_image_younger_in_closed_loop(tmp_path: Path):
    shortest = ("benchmarks.robot.mechanisms", tmp_path / "out.json", "--episodes", 1, "--cells")
    found = [run(*shortest, cell) for cell in ("digits-thor", "reasoning-orin-w8a8")]
    (alone, first, commit, everything), (thinking, *given_texts) = (result["rows"] for result in found)
    assert alone["with"] == thinking["with"] == "auto" and alone["age_ratio"]["ratio"] == 1
    assert alone["given_actions"] == first["given_actions"] == 0 and commit["given_actions"] > 0.2
    assert everything["picture_age_s"] < min(first["picture_age_s"], commit["picture_age_s"]) < alone["picture_age_s"]
    assert commit["jump"]["mm_median"] < alone["jump"]["mm_median"]
    assert thinking["given_texts"] == 0 and all(row["given_texts"] > 0.3 for row in given_texts)
    assert all(row["forwards_to_first"] < thinking["forwards_to_first"] for row in given_texts)
    assert all(row["success"]["first"]["episodes"] == 5 for row in (first, commit, everything, *given_texts))


@pytest.fixture(scope="module")
def fast_codec() -> FastCodec:
    codec = load_target(bundled_policy("fast"), device="cpu").codec
    assert isinstance(codec, FastCodec)
    return codec


@given(known=st.integers(0, 56), seed=st.integers(0, 2**32 - 1))
def test_no_answer_in_fast_tokens_leaves_the_bound_of_its_first_coefficients(
    fast_codec: FastCodec, known: int, seed: int
):
    codec = fast_codec
    rng, low = np.random.default_rng(seed), codec.tokenizer.min_token
    written = rng.integers(low, -low, 56, endpoint=True)
    middle = np.where(np.arange(56) < known, written, 0)
    positions = [
        codec.statistics.unnormalise((cosines(8).T @ (each.reshape(8, 7) / codec.tokenizer.scale))[0])[:3]
        for each in (written, middle)
    ]
    bound_mm = first_action_bounds_mm(codec)[known]
    assert np.linalg.norm(positions[0] - positions[1]) * 1e3 <= bound_mm * (1 + 1e-9) + 1e-9


@pytest.mark.nightly
def test_a_bundled_policys_modes_take_turns(tmp_path: Path):
    chosen = ["--policies", "nano", "--actions", 2, "--repeats", 1]
    modes = run("benchmarks.speed.decode_modes", tmp_path / "out.json", *chosen)["policies"]["nano"]["modes"]
    assert modes["ar"]["forwards_per_action"] == 7 <= modes["auto, no drafter"]["forwards_per_action"]
    assert modes["spec"]["forwards_per_action"] < 7 and modes["ar"]["first_over_ar"] == 1


@pytest.mark.nightly
def test_modes_take_the_forwards_that_their_trace_leaves_them(tmp_path: Path):
    weights = ["--quantization", "none,w8a8,int4,fp8"]
    result = run("benchmarks.speed.decode_modes", tmp_path / "out.json", "--actions", 3, "--repeats", 1, *weights)
    tiny = result["sizes"]["tiny"]
    modes = tiny["modes"]
    assert tiny["parameters"] > 0
    assert "accelerators only" in modes["transformers, compiled"]["skipped"]
    assert modes["transformers"]["rate_over_transformers"] == modes["ar"]["rate_over_ar"] == 1
    assert modes["ar"]["forwards_per_action"] == 7
    assert modes["pipeline"]["forwards_per_action"] == 7
    assert modes["pipeline, 3 chunks"]["forwards_per_action"] == 9
    assert all(modes[name]["same_tokens"] for name in ("ar", "pipeline", "pipeline, 2 chunks", "pipeline, 3 chunks"))
    assert 2 <= modes["spec"]["forwards_per_action"] < 7
    assert modes["ar"]["in_flight"] == modes["spec"]["in_flight"] == 1
    assert modes["pipeline"]["peak_bytes"] == 7 * modes["ar"]["peak_bytes"]
    assert all(row["latency_s"]["p50"] <= row["latency_s"]["p95"] for row in modes.values() if "skipped" not in row)
    quantized = tiny["quantized"]
    assert list(quantized) == ["none", "w8a8", "int4", "fp8"]
    assert quantized["none"]["modes"]["ar"]["rate_over_ar"] == 1
    assert quantized["w8a8"]["layer_bytes"] < 0.3 * quantized["none"]["layer_bytes"]
    assert all(2 <= quantized["w8a8"]["modes"][mode]["forwards_per_action"] < 7 for mode in ("spec", "specpipe"))
    assert 2 <= quantized["int4"]["modes"]["spec"]["forwards_per_action"] < 7
    assert "needs a CUDA GPU" in quantized["fp8"]["skipped"]


@pytest.mark.nightly
def test_formats_are_held_against_float32(tmp_path: Path):
    formats = run("benchmarks.robot.formats", tmp_path / "out.json", "--pictures", 12, "--episodes", 1)["formats"]
    assert [*formats] == [*QUANTIZATIONS, "w8a8+vision", "fp8+vision"]
    plain = formats["none"]["agreement"]
    assert plain["same_tokens"] == plain["tokens"] == 7 * 12 and not any(plain["deviation"].values())
    for found in formats.values():
        said, pairs = found["agreement"], found["against"]
        assert 7 * said["same_answers"] <= said["same_tokens"] <= said["tokens"] == 7 * said["answers"]
        assert pairs["first"] == formats["none"]["success"] and pairs["second"] == found["success"]
        assert pairs["second"]["successes"] - pairs["first"]["successes"] == pairs["only_second"] - pairs["only_first"]
    assert all(formats[name]["agreement"]["same_tokens"] < plain["tokens"] for name in ("int4", "fp8"))


@pytest.mark.nightly
@torch.inference_mode()
def test_kernels_and_stages_have_bounds():
    decoder, timer = random_decoder(SIZES["tiny"].llama), ColdTimer("cpu", repeats=1)
    limits = kernels.limits(decoder, "cpu")
    found = [kernels.row(kind, case, limits, timer) for kind, case in kernels.cases(decoder)]
    rows = {(row["name"], row["batch"]): row for row in found}
    assert limits.kind == "measured"
    kinds = Counter(row["kind"] for row in rows.values())
    assert kinds == {"kernel": 5 * 4 + 5, "stage": 5 * 4}
    for row in rows.values():
        assert 0 < row["bound_s"] < 1
        reference = row["contestants"]["PyTorch"]
        assert reference["share_of_bound"] * reference["seconds"] == pytest.approx(row["bound_s"])
        assert "GPU only" in row["contestants"]["Triton"]["skipped"]
    decoded = rows["packed_attention", "7 x 1 node"]
    row_bytes = 4 * 64 * 4  # 4 heads of 64 in float32: of a query, of what it becomes, of a key and of a value
    assert decoded["bytes"] == 2 * row_bytes * (7 + 7 * 291)
    assert decoded["operations"] == 4 * 7 * 291 * 4 * 64
    assert rows["rmsnorm_residual", "prompt of 290"]["contestants"]["torch.compile"]["skipped"]
    assert rows["whole forward", "prompt of 290"]["operations"] > 4 * 2 * 290 * (4 * 256 + 3 * 688) * 256


@pytest.mark.nightly
def test_fly_compares_every_row_with_plain_decoding(tmp_path: Path):
    target = write_text_model(tmp_path / "target", positions=128, end=49)
    options = ["--target", target, "--draft", target, "--tokens", 12, "--lengths", 5, "--per-kind", 1]
    options += ["--repeats", 1, "--work", tmp_path / "work"]
    result = run("benchmarks.papers.fly", tmp_path / "out.json", *options)
    rows = {row["name"]: row for row in result["rows"]}
    assert result["prompts"] == len(result["kinds"]) == 4
    assert rows["plain"]["forwards_per_token"] == rows["transformers, plain"]["forwards_per_token"] == 1
    assert all(row["recovery"] == row["as_plain"] == 1 for row in rows.values())  # the target drafts for itself
    assert rows["strict, K 5"]["forwards_per_token"] == 3 / 12 and rows["strict, K 5"]["tau"] == 11 / 2
    assert rows["transformers, assisted, K 5"]["forwards_per_token"] == 2 / 12
    assert result["goals"]["forwards"]["reached"]
    assert list(result["goals"]["time"]["ratios"]) == ["5"]


@pytest.mark.nightly
def test_robots_that_share_a_forward_wait_less_than_those_that_take_turns(tmp_path: Path):
    result = run("benchmarks.robot.robots_per_device", tmp_path / "out.json", "--robots", "1,3", "--share", 0.06)
    for device in ("orin", "rtx5090"):  # by the emulated clock, the same wherever it runs
        ways = result["devices"][device]["rows"]
        rows = {way: [each["actions_per_s"] for each in found] for way, found in ways.items()}
        assert rows["ar, packed"][0] == rows["ar, in turns"][0] == rows["ar, an engine each"][0]
        assert rows["ar, packed"][1] > 1.5 * rows["ar, in turns"][1]


def test_published_strict_answers_differ_first_at_a_near_tie_and_in_float32_nowhere():
    """What the explanation of rounding says of them."""
    rows = json.loads((RESULTS / "near_ties.json").read_text())["rows"]
    assert {row["mode"] for row in rows} == {"spec", "specpipe"}
    assert {row["dtype"] for row in rows} == {"float32", "float16", "bfloat16"}
    assert all(row["differing"] == row["ties"] for row in rows)
    assert not any(row["differing"] or row["near_ties"] for row in rows if row["dtype"] == "float32")
    assert any(row["differing"] for row in rows if row["dtype"] == "bfloat16")


def test_a_contestant_that_fails_says_why():
    def fail() -> None:
        raise RuntimeError("no such instruction\nat line 3")

    found = ColdTimer("cpu", repeats=1).seconds({"works": lambda: None, "fails": fail})
    assert found["fails"] == "RuntimeError: no such instruction"
    assert isinstance(found["works"], float)


def test_a_command_names_what_was_chosen():
    options = {"sizes": "tiny", "device": "cpu", "dtype": "", "vision": False, "wide": True}
    assert command("benchmarks.speed.decode_modes", options) == (
        "python -m benchmarks.speed.decode_modes --sizes tiny --device cpu --no-vision --wide"
    )


@pytest.mark.parametrize("suite", ["goal", "long"])
def test_a_trace_deals_its_distribution(suite: str):
    lengths = spec_vla_relaxed(suite)
    deck = Counter(Trace(lengths)._deck)
    cards = deck.total()
    assert all(abs(deck[n] / cards - share) < 0.01 for n, share in enumerate(lengths.probabilities))


def test_a_trace_cuts_a_chain_to_its_length():
    trace = Trace(AcceptanceLengths("always two", (0.0, 0.0, 1.0)))
    root = Tree.from_root(torch.tensor(1))
    yes = torch.ones(4, dtype=torch.bool)
    chain = Tree(torch.arange(4), Ancestry.from_parents((-1, 0, 1, 2)), torch.zeros(4), yes, yes, depth=3)
    assert trace.cut(root) is root
    assert trace.cut(chain).valid.tolist() == [True, True, True, False]


def test_a_trace_that_nobody_recorded_is_refused():
    with pytest.raises(UserError, match=r"no policy 'words'; it has: fast"):
        trace_lengths("chunks:words", 16)
    with pytest.raises(UserError, match=r"has trees of 8, .* nodes, not of 17"):
        trace_lengths("chunks:digits-2", 17)


@pytest.mark.parametrize("nodes", (8, 16, 48))
def test_a_trace_of_chunks_takes_the_forwards_that_were_recorded(nodes: int):
    found = json.loads((RESULTS / "draft_nodes.json").read_text())["policies"]["digits-2"]
    lengths = trace_lengths("chunks:digits-2", nodes)
    forwards = lengths.verifications(round(found["plain"]["forwards_per_action"]))
    assert forwards == pytest.approx(found["nodes"][str(nodes)]["forwards_per_action"], abs=0.1)
    assert lengths.mean < nodes


@pytest.mark.nightly
def test_a_larger_tree_takes_fewer_forwards_of_the_same_answers(tmp_path: Path):
    small = ["--policies", "fast", "--nodes", "8,32", "--frames", 6]
    found = run("benchmarks.speculation.draft_nodes", tmp_path / "out.json", *small)["policies"]["fast"]
    few, many = (found["nodes"][nodes] for nodes in ("8", "32"))
    assert many["forwards_per_action"] < few["forwards_per_action"] < found["plain"]["forwards_per_action"]
    assert few["latency_s"].keys() == many["latency_s"].keys() == {"orin", "rtx5090"}
    assert max(few["latency_s"].values()) < found["plain"]["latency_s"]["orin"]
