"""The fault zoo: for each code a training loop that has the fault, and its healthy twin.

for case in ZOO:
    case.write(folder, faulty=True)

A case is one function, so that fault and twin differ in nothing but the fault. What needs a GPU is written by hand, as
rows of kernels or as a trace; all else is a real loop on the CPU.
"""

from tests.findings.zoo import hardware, loops, numbers, programs, traces
from tests.findings.zoo.case import ZOO, Case

__all__ = ["ZOO", "Case", "hardware", "loops", "numbers", "programs", "traces"]
