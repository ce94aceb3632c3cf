"""Faults that an imported trace shows, as traces of a few kernels."""

import tempfile
from pathlib import Path

from amp_core.traces import import_traces
from tests.findings.zoo.case import case
from tests.traces import made
from tests.traces.made import Made


def import_into(into: Path, trace: Made, **head: object) -> None:
    """The run that importing `trace` makes."""
    with tempfile.TemporaryDirectory() as folder:
        import_traces([made.write(Path(folder) / "trace.json", trace.document(**head))], into)


@case("device-not-recorded", "cuda")
def kernels_missing(into: Path, faulty: bool) -> None:
    """Two launches; the profiler lacked the permission to record what they launched."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 200, 1)
    for at in (10, 90):
        trace.op("aten::mm", at, 20)
        trace.kernel(made.GEMM, at + 10, 80, at + 5)
    if faulty:
        trace.events = [event for event in trace.events if event["cat"] != "kernel"]
    import_into(into, trace)
