# SPDX-License-Identifier: Apache-2.0
"""Every launch of a tick is counted, and none is added unnoticed.

In processes of their own: the kernels must be Triton's from the first import on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "benchmarks" / "results" / "launches.json"

ADDED = """
import json
import sys
import torch
from launches import launches
from specvla_ros.engine.verifier import Verifier

verify, found = Verifier.verify, {}
more = {
    "launches": lambda result: result.logits.add(1),
    "copies": lambda _: torch.empty(1, device="cuda").copy_(torch.empty(1), non_blocking=True),
    "waits": lambda _: torch.empty(1, device="cuda").copy_(torch.empty(1)),
    "read_backs": lambda result: result.logits.cpu(),
}
for counted, ask in more.items():
    Verifier.verify = lambda self, result, *others: (ask(result), verify(self, result, *others))[1]
    found[counted] = [tick[counted] for tick in launches.count(sys.argv[1])["ticks"]]
print(json.dumps(found))
"""
MEANT = "if it is meant: PYTHONPATH=test python -m launches.launches; python -m benchmarks.results_page"


def run(*arguments: str) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    cases: dict[str, Any] = json.loads(WRITTEN.read_text())["cases"]
    return cases


@pytest.mark.parametrize("case", ["orin.yaml", "spec, drafts from one forward", "specpipe, temporal, rule fly"])
def test_ticks_and_graphs_launch_what_is_written_down(case: str, written: dict[str, Any]):
    found = json.loads(
        run("-c", f"import json; from launches import launches; print(json.dumps(launches.count('{case}')))")
    )
    assert found == written[case], MEANT


def test_every_case_is_written_down(written: dict[str, Any]):
    cases = run("-c", "from launches import launches; print(*launches.CASES, sep='\\n')").splitlines()
    assert [*written] == cases, MEANT


@pytest.mark.nightly
def test_every_cases_ticks_and_graphs_launch_what_is_written_down(written: dict[str, Any], tmp_path: Path):
    out = tmp_path / "launches.json"
    run("-m", "launches.launches", "--out", str(out))
    for mode, found in json.loads(out.read_text())["cases"].items():
        assert found == written[mode], MEANT


def test_a_draft_from_one_forward_takes_few_launches_at_any_depth(written: dict[str, Any]):
    graphs = written["spec, drafts from one forward"]["graphs"]
    drafts = {each["graph"]: each["launches"] for each in graphs if each["graph"].startswith("draft from")}
    assert len(drafts) == 5 and max(drafts.values()) <= 15, drafts


def test_every_tick_keeps_to_the_goals(written: dict[str, Any]):
    unfused = {"spec, rule lvspec", "spec, rule composite"}
    for name, case in written.items():
        for tick in case["ticks"]:
            kept = (tick["launches"] <= 12 or name in unfused, tick["behind"] <= 4, tick["copies"] <= 6)
            assert kept == (True,) * 3, (name, tick)


def test_no_tick_waits_for_the_device_but_for_its_one_read_back(written: dict[str, Any]):
    ticks = [tick for case in written.values() for tick in case["ticks"]]
    assert ticks
    assert all(tick["waits"] == 0 and tick["read_backs"] <= 1 for tick in ticks)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", ["ar", "spec, temporal", "spec, repetition penalty", "orin.yaml", "qwen2.5-vl-3b: specpipe, temporal"]
)
def test_one_more_of_each_is_noticed(case: str, written: dict[str, Any]):
    for counted, found in json.loads(run("-c", ADDED, case).splitlines()[-1]).items():
        for more, tick in zip(found, written[case]["ticks"], strict=True):
            assert more == tick[counted] + 1, counted
