"""Memory events in traces: a timeline of each step, its peak, by phase and module."""

from amp_core import load_run
from amp_core.analysis import memory_breakdown, memory_modules, memory_phases
from amp_core.traces import import_traces, read_trace
from amp_core.traces.memory_rows import MAX_MOMENTS
from tests.traces.made import BASE, GEMM, Made, write

MIB = 2**20


def allocate(trace, at, allocated, *, thread=1, device_type=1, device=0):
    """An event of torch's allocator, after which `allocated` MiB are allocated."""
    arguments = {"Device Type": device_type, "Device Id": device, "Addr": 1, "Bytes": MIB}
    arguments |= {"Total Allocated": allocated * MIB, "Total Reserved": 100 * MIB}
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 77, "tid": thread}
    trace.events.append(event | {"ts": BASE + at, "args": arguments})


def training():
    """A step: the module `fc` keeps 2 MiB and takes 5 at most, its backward takes 9, the optimizer frees."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.event("mark", "ampscope.module:fc", 10, 100, 1)
    trace.op("aten::mm", 20, 50, **{"Sequence number": 7, "Fwd thread id": 0})
    for at, held in ((25, 13), (30, 15), (40, 12)):
        allocate(trace, at, held)
    trace.kernel(GEMM, 100, 50, 60)
    back = {"Sequence number": 7, "Fwd thread id": 1}
    trace.op("autograd::engine::evaluate_function: MmBackward0", 200, 60, 2, **back)
    trace.op("MmBackward0", 201, 50, 2, **back)
    allocate(trace, 210, 19, thread=2)
    allocate(trace, 220, 14, thread=2)
    trace.event("mark", "Optimizer.step#SGD.step", 300, 50, 1)
    trace.op("aten::_foreach_add_", 310, 20)
    allocate(trace, 320, 10)
    allocate(trace, 321, 999, device_type=0, device=-1)
    return trace


def test_memory_events_are_a_timeline_by_module_and_phase(tmp_path):
    rows = read_trace(write(tmp_path / "t.json", training().document())).memory
    assert rows["name"] == ["fc", "fc", "aten::_foreach_add_"]
    assert rows["phase"] == ["forward", "backward", "optimizer"] and rows["moment"] == [
        "module",
        "operator",
        "operator",
    ]
    assert [n / MIB for n in rows["allocated_bytes"]] == [12, 14, 10]
    assert [n / MIB for n in rows["peak_bytes"]] == [15, 19, 10] and set(rows["device"]) == {"cuda:0"}


def test_the_peak_is_told_with_its_place_and_without_categories(tmp_path):
    run = load_run(import_traces([write(tmp_path / "t.json", training().document())], tmp_path / "run"))
    breakdown = memory_breakdown(run)
    assert (breakdown.total_bytes, breakdown.reserved_bytes) == (19 * MIB, 100 * MIB)
    assert (breakdown.moment, breakdown.phase, breakdown.categories_known) == ("in fc", "backward", False)
    phases = memory_phases(run).set_index("phase")["peak_bytes"] / MIB
    assert phases.to_dict() == {"forward": 15, "backward": 19, "optimizer": 10}
    modules = memory_modules(run).set_index(["name", "phase"])
    assert modules.loc[("fc", "backward"), "kept_bytes"] == 2 * MIB
    assert modules.loc[("aten::_foreach_add_", "optimizer"), "kept_bytes"] == -4 * MIB
    assert run.steps[["memory_allocated_bytes", "memory_peak_bytes"]].to_numpy().tolist() == [[10 * MIB, 19 * MIB]]


def test_without_steps_the_whole_trace_is_one(tmp_path):
    trace = training()
    del trace.events[0]
    rows = read_trace(write(tmp_path / "t.json", trace.document())).memory
    assert set(rows["step"]) == {0} and len(rows["step"]) == 3


def test_events_after_the_work_do_not_lengthen_a_trace_without_steps(tmp_path):
    trace = Made()
    trace.op("aten::mm", 10, 20)
    trace.kernel(GEMM, 30, 70, 12)
    plain = read_trace(write(tmp_path / "a.json", trace.document())).windows["wall_us"]
    allocate(trace, 5000, 3)
    assert read_trace(write(tmp_path / "b.json", trace.document())).windows["wall_us"] == plain == [70]


def test_many_moments_are_merged_and_the_peak_stays(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100_000, 1)
    for n in range(5000):
        trace.op(f"aten::op{n % 2}", 10 * n, 9)
        allocate(trace, 10 * n + 1, 900 if n == 3333 else 1 + n % 7)
    rows = read_trace(write(tmp_path / "t.json", trace.document())).memory
    assert len(rows["number"]) == MAX_MOMENTS and max(rows["peak_bytes"]) == 900 * MIB


def test_damaged_memory_events_are_left_out(tmp_path):
    trace = training()
    for event in trace.events:
        if event["name"] == "[memory]":
            event["args"] = {"Device Type": 1, "Total Allocated": "much"}
    assert read_trace(write(tmp_path / "t.json", trace.document())).memory == {}
