"""Time in which a CPU frees large tensors, which only what is recorded of memory tells."""

import pytest

from amp_core.findings import first_sentence
from tests.traces.made import Made, run_of

MIB = 2**20


def freed(*, us, mib=64, count=8):
    """Products of a CPU, each with a tensor that is freed after it; the next operator starts `us` later."""
    trace = Made()
    for n in range(count):
        start = 10_000.0 * n
        trace.op("aten::mm", start, 9000 - us, **{"Input Dims": [[512, 512]] * 2, "Input type": ["float"] * 2})
        memory = {"Bytes": -mib * MIB, "Device Type": 0, "Device Id": -1, "Total Allocated": 4096 * MIB}
        trace.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1}
            | {"ts": trace.events[-1]["ts"] + 9000 - us + 1, "s": "t", "args": memory}
        )
        trace.op("aten::relu", start + 9001, 900, **{"Input Dims": [[512, 512]], "Input type": ["float"]})
    return trace


@pytest.mark.parametrize(
    ("us", "mib", "count", "told"),
    [
        (4000.0, 64, 8, True),  # 17 GB/s
        (4000.0, 8, 8, False),  # the allocator may keep a small one
        (8000.0, 16, 8, False),  # 2 GB/s: something else takes that time
        (1.0, 64, 8, False),  # the allocator kept it
        (4000.0, 64, 2, False),
    ],
)
def test_frees_at_the_rate_at_which_pages_go_back_are_told(tmp_path, us, mib, count, told):
    sentence = first_sentence(run_of(tmp_path, freed(us=us, mib=mib, count=count), gpu=""))
    assert sentence.startswith("The trace contains no device activity")
    assert ("Freeing 8 tensors of up to 64.0 MiB takes 32.0 of the 79.9 ms (40.0 %)" in sentence) == told
    assert ("Freeing" in sentence) == told
