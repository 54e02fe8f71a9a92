# SPDX-License-Identifier: Apache-2.0
"""The ahead-of-time check: it compiles without a GPU, and says what does not fit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.compile_kernels import Usage, spills_in_loop

pytest.importorskip("triton")

TEST = Path(__file__).parents[1]


# Not the interpreter's. What `make kernels` has compiled is found in Triton's cache, by what it was compiled from.
COMPILING = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(TEST), os.environ.get("PYTHONPATH", ""))))
}


def run(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernels.compile_kernels", "--only", *words]
    return subprocess.run(command, cwd=TEST.parent, env=environment, capture_output=True, text=True, timeout=600)


def test_the_widest_tile_of_attention_does_not_spill() -> None:
    """Gemma's: the results of 64 rows with a head of 256."""
    made = run("packed_attention, pi0-fast bf16, 64 rows, split", "sm_120", environment=COMPILING)
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.splitlines()[-1] == "1 kernels compiled, for 1 of launches; 0 do not fit"


@pytest.mark.nightly
def test_every_kernel_of_the_smallest_policy_compiles_for_every_device() -> None:
    made = run("nano bf16", environment=COMPILING)
    assert made.returncode == 0, made.stdout + made.stderr
    lines = made.stdout.splitlines()
    for kernel in ("rope_write_kv", "packed_attention", "commit_kv"):
        for device in ("sm_87", "sm_90", "sm_110", "sm_120"):
            assert any(f" {kernel} " in line and f" {device} " in line for line in lines), (kernel, device)
    counted = re.fullmatch(r"(\d+) kernels compiled, for (\d+) of launches; 0 do not fit", lines[-1])
    assert counted and int(counted[1]) < int(counted[2]) == sum(" sm_" in line for line in lines)


FEW = """
import triton
import kernels.compile_kernels as launches
with launches._compiling_for(90) as kernels:
    for n in (1, 2, 5, 16, 17, 31, 32, 33, 50, 64):
        for levels in (0, 1, 5, 7, 8, 15, 16, 31, 32, 63):
            for loose in (False, True):
                launches._accept(n, levels, loose=loose)
            launches._commit(launches._SHAPES["nano bf16"], levels + 1)
for name in ("_compare_drafts", "_accept_tree", "_commit_kv"):
    print(len({kernel.hash for kernel in kernels if kernel.metadata.name == name}))
"""


def test_few_compilations_serve_every_tree_and_rule() -> None:
    """One that is met in a tick takes as long as many ticks."""
    made = subprocess.run([sys.executable, "-c", FEW], env=COMPILING, capture_output=True, text=True, timeout=180)
    assert [int(line) for line in made.stdout.split()] == [3, 3 * 4, 4], made.stderr


def test_interpreted_kernels_are_refused() -> None:
    made = run("sm_90", environment=COMPILING | {"TRITON_INTERPRET": "1"})
    assert made.returncode == 1
    assert "unset TRITON_INTERPRET" in made.stderr


@pytest.mark.parametrize(
    ("spilled", "looped", "shared", "fault"),
    [
        (0, False, 99 << 10, ""),
        (16, False, 0, ""),
        (24, False, 0, "24 bytes spilled"),
        (8, True, 0, "8 bytes spilled in a loop"),
        (0, False, (99 << 10) + 1, "101377 bytes of shared memory, the device has 101376"),
    ],
)
def test_what_does_not_fit_is_named(spilled: int, looped: bool, shared: int, fault: str) -> None:
    assert Usage(registers=32, spilled=spilled, looped=looped, shared=shared).fault(120) == fault


PARKED = """
        /*0700*/                   STL [R1+0x4], R22 ;
        /*1120*/               @P2 BRA `(.L_x_0) ;
.L_x_5:
        /*1130*/                   IADD3 R3, R3, 0x1, RZ ;
        /*2580*/              @!P2 BRA `(.L_x_5) ;
.L_x_0:
        /*3190*/                   LDL.LU R87, [R1+0x4] ;
.L_x_12:
        /*5f50*/                   BRA `(.L_x_12);
"""


def test_registers_in_memory_are_a_fault_in_loops_alone() -> None:
    assert not spills_in_loop(PARKED)
    assert spills_in_loop(PARKED.replace("IADD3 R3, R3, 0x1, RZ", "LDL R3, [R1]"))


AWAITED = """
        /*1b30*/              @!P4 BRA `(.L_x_10) ;
.L_x_15:
        /*1f20*/                   STL.64 [R1], R6 ;
        /*24b0*/                   LDL.LU.64 R14, [R1] ;
        /*3650*/                   EXIT ;
.L_x_10:
        /*3680*/              @!P4 BRA `(.L_x_10) ;
        /*3690*/                   BRA `(.L_x_15) ;
"""


def test_a_wait_that_jumps_back_is_no_loop() -> None:
    assert not spills_in_loop(AWAITED)
    assert spills_in_loop(AWAITED.replace("EXIT", "@P1 BRA `(.L_x_15)"))


def test_triton_is_left_alone_where_it_cannot_run() -> None:
    """It brings an LLVM: imported behind Mesa's, as in the simulated robot's process, it ends the process."""
    if torch.cuda.is_available():
        pytest.skip("a GPU's kernels need it")
    code = "import sys, specvla_ros.engine.engine; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=COMPILING).returncode == 0
