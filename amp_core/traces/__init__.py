"""Traces that torch.profiler exported, read without torch.

from amp_core.traces import import_traces, read_trace

read_trace("rank0.pt.trace.json.gz").kernels         # columns of rows
import_traces(["rank0.json.gz", "rank1.json.gz"], "runs/profiled")
"""

from amp_core.traces.importing import import_notes, import_traces
from amp_core.traces.read import read_trace
from amp_core.traces.trace import Trace

__all__ = ["Trace", "import_notes", "import_traces", "read_trace"]
