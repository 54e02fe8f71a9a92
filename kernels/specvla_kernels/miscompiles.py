# SPDX-License-Identifier: Apache-2.0
"""Known faults of Triton's compiler, by architecture.

`test/kernels/test_miscompiles.py` asserts that no kernel contains the pattern that gives wrong results. A fault that is
not known yet is found on the device: the engine compares the kernels with their references before it captures anything.
"""

# Sources of the faults by architecture.
#
# triton#10821: two products added to one accumulator in one iteration of a loop, in tiles of 64 rows or more, give
# wrong results, the same in every run; Triton 3.6 to 3.8.
# triton#8695: a matrix product added to an accumulator, in loops with several products, fails to compile ("operand #2
# does not dominate this use"); Triton 3.5 and later.
_TWO_PRODUCTS = "triton-lang/triton#10821, linkedin/Liger-Kernel#1435"
_SOURCES = {"sm_100": f"{_TWO_PRODUCTS}; triton-lang/triton#8695", "sm_103": _TWO_PRODUCTS}


def known_for(architecture: str) -> str:
    """Sources of the faults that are known for an architecture such as sm_103; empty if there are none."""
    return _SOURCES.get(architecture, "")
