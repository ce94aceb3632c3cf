"""Traces of AMD's rocprof: processes tell what an event is, and its arguments when it began."""

import json

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.schema import RunError
from amp_core.traces import import_traces, read_trace

COPIES, CALLS, GPU = 1, 2, 7
GEMM = "_gemm_afp4_wfp4_kernel"


def process(number, name):
    return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}


def event(name, start_us, us, pid, **args):
    began = round(1e3 * start_us)
    times = {"BeginNs": str(began), "EndNs": str(began + round(1e3 * us))}
    return {"ph": "X", "name": name, "pid": pid, "tid": 77, "ts": str(int(start_us)), "dur": str(int(us))} | {
        "args": times | args
    }


def trace_of(folder, *events):
    agents = {
        "Agent1.DeviceType": "CPU",
        "Agent2.DeviceType": "GPU",
        "Agent2.Name": "gfx942",
        "Agent2.Node": "1",
        "Agent2.ComputeUnit": "304",
        "Agent2.MemoryProperties.WavefrontSize": "64(0x40)",
    }
    names = [
        process(COPIES, "COPY"),
        process(CALLS, "CPU HIP API"),
        process(GPU, "GPU1"),
        process(518, "GPU Barriers0"),
    ]
    folder.mkdir(exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps({"traceEvents": [{}, *names, *events], "otherData": agents}))
    return path


def kernels():
    """Ten products of 90.5 µs, one each 100 µs."""
    return [event(f"{GEMM} [clone .kd]", 100 * n + 0.25, 90.5, GPU, **{"queue-id": "3"}) for n in range(10)]


def test_kernels_are_those_of_the_processes_named_as_gpus_in_nanoseconds(tmp_path):
    trace = read_trace(trace_of(tmp_path, *kernels()))
    assert trace.kernels["name"] == [GEMM] and trace.kernels["count"] == [10]
    assert trace.kernels["total_us"] == [pytest.approx(905.0)] and trace.kernels["tensor_core"] == ["yes"]
    assert trace.kernels["device"] == ["cuda:1"] and trace.windows["wall_us"] == [pytest.approx(990.5)]
    assert trace.windows["device_name"] == ["AMD Instinct MI300X"]
    assert trace.gpus[0]["name"] == "AMD Instinct MI300X" and trace.gpus[0]["multiprocessors"] == 304


def test_calls_and_copies_are_read_and_barriers_are_not(tmp_path):
    others = [
        event("CopyHostToDevice", 1000, 50, COPIES, **{"dev-id": 0}),
        event("hipLaunchKernel", 1, 5, CALLS),
        event("hipMemcpy", 990, 70, CALLS),
        event("<barrier packet>", 1060, 9, 518),
    ]
    trace = read_trace(trace_of(tmp_path, *kernels(), *others))
    assert dict(zip(trace.kernels["name"], trace.kernels["count"], strict=True)) == {GEMM: 10, "CopyHostToDevice": 1}
    assert trace.launches == 1


def test_a_trace_of_kernels_alone_is_diagnosed(tmp_path):
    run = load_run(import_traces([trace_of(tmp_path, *kernels())], tmp_path / "run"))
    assert "on matrix cores" in first_sentence(run)
    assert not [f for f in diagnose(run) if f.code in ("unknown-kernels", "device-not-recorded")]


@pytest.mark.parametrize("broken", ["", "x", -1, None, 1.5, "9" * 30])
def test_times_that_are_none_leave_an_event_out(tmp_path, broken):
    wrong = event(GEMM, 5000, 10, GPU)
    wrong["args"]["EndNs"] = broken
    trace = read_trace(trace_of(tmp_path, *kernels(), wrong))
    assert trace.kernels["count"] == [10]


def test_agents_of_other_kinds_are_no_gpus(tmp_path):
    path = trace_of(tmp_path, *kernels())
    whole = json.loads(path.read_text())
    whole["otherData"] |= {"Agent2.Name": ["gfx942"], "Agent2.ComputeUnit": {}, "Agent3.DeviceType": 7}
    path.write_text(json.dumps(whole))
    assert [gpu["name"] for gpu in read_trace(path).gpus] == ["AMD GPU"]


def test_a_trace_without_any_of_these_is_refused(tmp_path):
    with pytest.raises(RunError, match="no operator and no kernel"):
        read_trace(trace_of(tmp_path, event("<barrier packet>", 1060, 9, 518)))


@pytest.mark.parametrize(
    ("dispatched_us", "code"), [(1_990, "host-bound"), (1_100, "kernel-wait"), (None, "unexplained-idle")]
)
def test_when_a_kernel_was_dispatched_tells_whether_the_host_was_late(tmp_path, dispatched_us, code):
    later = {"DispatchNs": str(1000 * dispatched_us)} if dispatched_us else {}
    events = [*kernels(), event(GEMM, 2_000, 90, GPU, **{"queue-id": "3"}, **later)]
    if dispatched_us:
        for number, one in enumerate(events[:-1]):
            one["args"]["DispatchNs"] = str(100 * number + 1)
    run = load_run(import_traces([trace_of(tmp_path, *events)], tmp_path / "run"))
    assert code in [f.code for f in diagnose(run)]
