"""The fault zoo: for each code a training loop that has the fault, and its healthy twin.

for case in ZOO:
    case.write(folder, faulty=True)

A case is one function, so that fault and twin differ only in the fault. Cases that need a GPU are written by hand, as
rows of kernels or as a trace; all others are real loops on the CPU.
"""

from tests.findings.zoo import (
    autocast,
    cpu_traces,
    damage,
    forms,
    hardware,
    jobs,
    loops,
    narrow,
    numbers,
    own_scale,
    programs,
    quantized,
    sharded,
    traces,
    weights,
)
from tests.findings.zoo.case import ZOO, Case

__all__ = [
    "ZOO",
    "Case",
    "autocast",
    "cpu_traces",
    "damage",
    "forms",
    "hardware",
    "jobs",
    "loops",
    "narrow",
    "numbers",
    "own_scale",
    "programs",
    "quantized",
    "sharded",
    "traces",
    "weights",
]
