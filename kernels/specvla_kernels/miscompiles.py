# SPDX-License-Identifier: Apache-2.0
"""Known faults of Triton's compiler, by architecture.

`test/kernels/test_miscompiles.py` asserts that no kernel contains the pattern that gives wrong results. A fault that is
not known yet is found on the device: the engine compares the kernels with their references before it captures anything.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Miscompile:
    """A pattern of code that a compiler turns into a wrong program, or cannot compile."""

    pattern: str
    architectures: tuple[str, ...]  # on which it was reported
    versions: str  # of Triton
    effect: str
    source: str


MISCOMPILES = (
    Miscompile(
        pattern="two products added to one accumulator in one iteration of a loop, in tiles of 64 rows or more",
        architectures=("sm_100", "sm_103"),
        versions="3.6 to 3.8",
        effect="wrong results, the same in every run",
        source="triton-lang/triton#10821, linkedin/Liger-Kernel#1435",
    ),
    Miscompile(
        pattern="a matrix product added to an accumulator, in loops with several products",
        architectures=("sm_100",),
        versions="3.5 and later",
        effect="the compiler fails: operand #2 does not dominate this use",
        source="triton-lang/triton#8695",
    ),
)


def known_for(architecture: str) -> str:
    """Sources of the faults that are known for an architecture such as sm_103; empty if there are none."""
    return "; ".join(each.source for each in MISCOMPILES if architecture in each.architectures)
