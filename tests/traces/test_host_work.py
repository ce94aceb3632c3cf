"""What the host does while a device waits: work on results that it waited for, captures of graphs, a first part."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of

TO_HOST = "Memcpy DtoH (Device -> Pageable)"


def chunks(op, python_us, count=8):
    """Chunks of 2 ms on the device, each copied to the host by `op`; `python_us` of Python before the next launch."""
    trace, at = Made(), 0
    for _ in range(count):
        trace.op("aten::mm", at + 1, 8)
        trace.kernel(made.GEMM, at + 10, 2000, at + 2)
        trace.op(op, at + 20, 2100)
        trace.kernel(TO_HOST, at + 2010, 50, at + 25, sort="copy", call_us=2060)
        trace.events[-1]["args"]["bytes"] = 2**20 if op == "aten::copy_" else 4
        at += 2120 + python_us
    return trace


@pytest.mark.parametrize(
    ("op", "python_us", "hidden"),
    [
        ("aten::copy_", 1000, False),
        ("aten::_local_scalar_dense", 1000, True),
        ("aten::copy_", 200, True),
    ],
)
def test_python_on_results_is_hidden_by_no_wait_left_out(tmp_path, op, python_us, hidden):
    (window,) = run_of(tmp_path, chunks(op, python_us)).windows.to_dict("records")
    assert window["unwaited_us"] == pytest.approx(7 * (python_us + 60) if hidden else 0, abs=7 * 75)


def test_what_is_told_first_is_the_python(tmp_path):
    run = run_of(tmp_path, chunks("aten::copy_", 1000))
    assert "because the host launches too late" in first_sentence(run)
    assert not [f for f in diagnose(run) if f.title.startswith("The host launches late after")]


def test_one_idle_time_is_told_once(tmp_path):
    """Without the waits nothing is left of the late launches of a graph."""
    trace, at = Made(), 0
    for _ in range(8):
        trace.event("call", "cudaGraphLaunch", at + 2, 400, 1)
        trace.kernel(made.GEMM, at + 410, 900, at + 402)
        trace.op("aten::_local_scalar_dense", at + 420, 920)
        trace.kernel(TO_HOST, at + 1312, 4, at + 425, sort="copy", call_us=910)
        at += 1500
    run = run_of(tmp_path, trace)
    assert run.windows["unwaited_us"].iloc[0] == pytest.approx(7 * 590, rel=0.05)
    assert "The next:" not in first_sentence(run)


def test_a_capture_of_compiled_code_is_no_compilation(tmp_path):
    trace = Made()
    trace.kernel(made.GEMM, 10, 50, 2)
    trace.op("Torch-Compiled Region: 0/0", 20, 1600)
    trace.event("mark", "CUDAGraphNode.record (dynamo_timed)", 30, 1500, 1)
    trace.event("call", "cudaStreamBeginCapture", 40, 5, 1)
    trace.event("call", "cudaStreamEndCapture", 1500, 5, 1)
    trace.event("call", "cudaGraphLaunch", 1600, 10, 1)
    trace.kernel(made.GEMM, 1612, 50, 1602)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert "building or launching graphs (CUDAGraphNode.record" in finding.title and "compiling" not in finding.title
    assert "captures its graphs in its first calls" in finding.advice and "across a wait" not in finding.advice


@pytest.mark.parametrize(("ahead", "told"), [(40, True), (4, False)])
def test_a_first_part_in_which_the_device_waits_is_told_apart(tmp_path, ahead, told):
    """Ten kernels are launched one by one, and the host is ahead of so many others, in passes that decode."""
    trace = Made()
    trace.event("mark", "step[DECODE bs=1]", 0, 2000 + 50 * ahead, 1)
    for number in range(10):
        at = 200 * number
        trace.kernel(made.RELU, at + 10, 20, at + 2)
    for number in range(ahead):
        trace.kernel(made.RELU, 2000 + 50 * number, 50, 1900 + 2 * number)
    run = run_of(tmp_path, trace)
    finding = finding_of(run, "launch-bound")
    assert ("nearly all within its first 1.99 ms" in finding.title) == told, finding.title
    assert ("From then on the host is ahead of the device" in finding.advice) == told
    assert first_sentence(run).startswith("Largest possible saving") or not told
