"""What NVIDIA's compilers make of the kernels, read from machine code. None of it needs a GPU.

    python -m tests.record.stats.cuda.machine_code        # a table of all kernels, formats, generations and compilers

The compilers, `nvdisasm` and `cuobjdump` come from PyPI: the extra `test-gpu-code`.
"""

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from amp_core.formats import FORMATS
from amp_core.record.stats.cuda.nvrtc import NAMES, compile_kernels, open_package

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MARKERS = {**dict.fromkeys(("measure", "capped", "norms"), ("DFMA", 1)), "distances": ("DMUL", 1)}
"""By kernel: an instruction of its loop, and for how many values it stands; a load for others."""
INTEGER_UNITS, MULTIPROCESSORS, CLOCK_GHZ = 64, 132, 1.755
"""Of an H100 SXM: 32-bit integer operations in each clock of a multiprocessor (CUDA C++ programming guide, arithmetic
throughput of 9.0), multiprocessors, and the clock that it boosts to under load; its highest is 1.98."""

_INTEGER = re.compile(
    r"(IADD|VIADD|LOP|SHF|SHL|SHR|LEA|ISETP|SEL|IMNMX|VIMNMX|IMAD|PRMT|MOV|PLOP|FLO|POPC|BFE|BFI|IABS|P2R|R2P|BMSK|SGXT)"
)
"""What counts as an integer operation; IMAD and MOV too, although other units execute them."""


@dataclass(frozen=True)
class Loop:
    """The loop that reads a kernel's values, along the path without rare cases."""

    values: int
    integer_ops: float
    """For each value."""
    instructions: float
    """For each value, all of them."""
    loads: tuple[str, ...]
    """The global loads on the path."""
    whole: tuple[str, ...]
    """Everything in the loop, rare cases too."""


@dataclass(frozen=True)
class Code:
    """One kernel."""

    registers: int
    stack: int
    loop: Loop

    def terabytes_per_s(self, form: str) -> float:
        """What integer arithmetic would allow on an H100, in 10^12 bytes of values a second."""
        values_per_s = INTEGER_UNITS * MULTIPROCESSORS * CLOCK_GHZ * 1e9 / self.loop.integer_ops
        return values_per_s * FORMATS[form].bits / 8 / 1e12


def tool(name: str) -> Path | None:
    """`nvdisasm` or `cuobjdump`; None where it is not installed."""
    found = shutil.which(name)
    installed = (p for folder in sys.path for p in Path(folder).glob(f"nvidia/*/bin/{name}"))
    return Path(found) if found else next(installed, None)


@cache
def compilers() -> dict[str, ctypes.CDLL]:
    """The NVRTC libraries that are installed as packages, by version, the oldest first."""
    found = {}
    for path in {p for folder in sys.path for p in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")}:
        library = open_package(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        found[major.value, minor.value] = library
    return {f"{major}.{minor}": found[major, minor] for major, minor in sorted(found)}


def knows(compiler: str, architecture: str) -> bool:
    """Whether a compiler knows the generation."""
    library, count = compilers()[compiler], ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(known)
    return int(architecture.removeprefix("sm_")) in known


@cache
def kernels(compiler: str, form: str, architecture: str) -> dict[str, Code]:
    """The kernels for a format, by name."""
    disassembler, reader = tool("nvdisasm"), tool("cuobjdump")
    assert disassembler is not None and reader is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cubin"
        file.write_bytes(compile_kernels(compilers()[compiler], form, architecture))
        used, text = (
            subprocess.run([command, option, str(file)], capture_output=True, text=True, check=True).stdout
            for command, option in ((reader, "--dump-resource-usage"), (disassembler, "--print-code"))
        )
    sizes = {name: (int(r), int(s)) for name, r, s in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", used)}
    code = {}
    for section in re.split(r"\.section\s+\.text\.", text)[1:]:
        name = re.match(r"\w+", section)
        assert name is not None
        marker, values = MARKERS.get(name[0], ("LDG.E.128", 128 // FORMATS[form].bits))
        code[name[0]] = Code(*sizes[name[0]], _loop(section.splitlines(), marker, values))
    return code


def _loop(lines: list[str], marker: str, values: int) -> Loop:
    """The loop with most instructions that contain `marker`, each of which stands for so many values; of several the
    one with most integer operations."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in lines:
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(found[1])

    def target(instruction: str) -> int | None:
        branch = re.search(r"\b(?:BRA|CALL)\b.*`\(([.$\w]+)\)", instruction)
        return labels.get(branch[1]) if branch else None

    def marked(places: list[int]) -> int:
        return sum(marker in instructions[i] for i in places)

    def path(first: int, last: int) -> list[int]:
        """Of the paths once through these instructions the one with the most that are marked and, of those, with the
        fewest in all: it leaves out rare cases. Empty where there is none."""
        best: dict[int, tuple[tuple[int, int], int | None]] = {last: ((marker in instructions[last], -1), None)}
        for i in range(last - 1, first - 1, -1):
            instruction, to = instructions[i], target(instructions[i])
            conditional = instruction.startswith("@") or re.search(r"BRA\S*\s+!?U?P\d", instruction)
            following = ([to] if to is not None else []) + ([i + 1] if to is None or conditional else [])
            choices = [(best[j][0], j) for j in following if j in best and j > i]
            if choices and not instruction.startswith(("EXIT", "RET")):
                (many, short), chosen = max(choices)
                best[i] = ((many + (marker in instruction), short - 1), chosen)
        taken, at = [], first if first in best else None
        while at is not None:
            taken.append(at)
            at = best[at][1]
        return taken

    backwards = [(start, i) for i, ins in enumerate(instructions) if (start := target(ins)) is not None and start < i]
    loops = [(taken[0], taken[-1], taken) for ends in backwards if marked(taken := path(*ends))]
    inner = [(a, b, t) for a, b, t in loops if not any(a <= c <= d <= b and (a, b) != (c, d) for c, d, _ in loops)]

    def names_of(taken: list[int]) -> list[str]:
        return [re.sub(r"^@!?U?P\w+\s+", "", instructions[i]).split()[0] for i in taken]

    def integers(taken: list[int]) -> int:
        return sum(bool(_INTEGER.match(name)) for name in names_of(taken))

    first, last, taken = max(inner, key=lambda loop: (marked(loop[2]), integers(loop[2])))
    names = names_of(taken)
    count = marked(taken) * values
    return Loop(
        count,
        integers(taken) / count,
        len(names) / count,
        tuple(name for name in names if name.startswith("LD")),
        tuple(instructions[first : last + 1]),
    )


if __name__ == "__main__":
    print("| NVRTC | GPU | format | kernel | integer | all | registers | stack | loads | TB/s |")
    for compiler in compilers():
        for architecture in (a for a in ARCHITECTURES if knows(compiler, a)):
            for form in NAMES:
                for name, code in kernels(compiler, form, architecture).items():
                    loop, loads = code.loop, " ".join(sorted(set(code.loop.loads)))
                    print(
                        f"| {compiler} | {architecture} | {form} | {name} | {loop.integer_ops:.2f}"
                        f" | {loop.instructions:.2f} | {code.registers} | {code.stack} | {loads}"
                        f" | {code.terabytes_per_s(form):.1f} |",
                        flush=True,
                    )
