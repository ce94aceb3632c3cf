"""A gate on the machine code of the CUDA kernels: what keeps them as fast as memory stays that way."""

import re

import pytest

from tests.record.stats.cuda.machine_code import ARCHITECTURES, compilers, kernels, knows, tool

BUDGET = {
    "measure": {"fp32": 8.5, "fp16": 8, "bf16": 8.5, "fp64": 22, "fp8-e4m3": 12.5, "fp8-e5m2": 8.8},
    "capped": {"fp32": 14.5, "fp16": 12, "bf16": 13.5, "fp64": 35},
    "norms": {"fp32": 2, "fp16": 2, "bf16": 2, "fp64": 2.5},
    "channels": {"fp32": 7.2},
    "largest": {"fp32": 6.5},
    "distances": {"fp32": 34},
}
"""Integer operations for each value, by kernel and format, with any compiler on any generation. Those of `channels` and
`largest` are at most these: their loops for 16 bits read twice as many values as are counted."""
BAR_TERABYTES_PER_S = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
"""What integer arithmetic must allow at least on an H100, of which memory gives 3.4."""
MAX_REGISTERS = 63

CASES = [(compiler, architecture) for compiler in compilers() for architecture in ARCHITECTURES]

pytestmark = pytest.mark.skipif(
    not CASES or not tool("nvdisasm") or not tool("cuobjdump"),
    reason="needs NVIDIA's compilers: pip install -e '.[test-gpu-code]', 88 MB",
)


@pytest.fixture(params=CASES, ids=[" ".join(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    compiler, architecture = request.param
    if not knows(compiler, architecture):
        pytest.skip(f"NVRTC {compiler} does not know {architecture}")
    return compiler, architecture


@pytest.mark.parametrize("form", BUDGET["measure"])
def test_kernels_stay_in_registers_and_within_their_budget(case: tuple[str, str], form: str) -> None:
    compiler, architecture = case
    compiled = kernels(compiler, form, architecture)
    assert set(compiled) == {name for name, budget in BUDGET.items() if form in budget}
    for name, code in compiled.items():
        assert code.stack == 0, name
        assert code.registers <= MAX_REGISTERS, name
        assert code.loop.integer_ops <= BUDGET[name][form], name


@pytest.mark.parametrize("form", BUDGET["measure"])
def test_loops_read_sixteen_bytes_at_a_time_and_wait_for_nobody(case: tuple[str, str], form: str) -> None:
    compiler, architecture = case
    for name, code in kernels(compiler, form, architecture).items():
        loads = [i for i in code.loop.whole if re.search(r"\bLDG", i)] if name == "distances" else code.loop.loads
        values = [load for load in loads if ".128" in load]
        assert values and (name in ("capped", "distances") or len(values) == len(loads)), name
        for instruction in code.loop.whole:
            assert not re.search(r"\b(MEMBAR|ERRBAR|FENCE|BAR)\b", instruction), name
            assert "__cuda" not in instruction, f"{name} calls a function: {instruction}"  # division of 64 bits
            assert not re.search(r"\b(LDL|STL)\b", instruction), name


@pytest.mark.parametrize("form", BAR_TERABYTES_PER_S)
def test_arithmetic_allows_more_than_memory_gives(form: str) -> None:
    for compiler in compilers():
        compiled = kernels(compiler, form, "sm_90")
        for name in ("measure", "capped"):
            assert compiled[name].terabytes_per_s(form) >= BAR_TERABYTES_PER_S[form], (name, compiler)
