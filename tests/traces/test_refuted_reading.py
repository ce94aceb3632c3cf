"""What a trace is of, and what of it was recorded: statements that real traces refuted."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.schema import RunError
from amp_core.traces import import_traces, read_trace
from tests.traces.made import Made, run_of, write


def refusal(folder, document):
    with pytest.raises(RunError) as caught:
        read_trace(write(folder / "t.json", document))
    return str(caught.value)


def functions(*names):
    """Functions of Python, each called by the one before."""
    trace = Made()
    for number, name in enumerate(names):
        trace.event("python_function", name, number, 2000 - 2 * number, 1)
    return trace.document()


STOP = "torch/profiler/profiler.py(623): stop"
START = "torch/profiler/profiler.py(130): start_trace"


@pytest.mark.parametrize("outer", [STOP, STOP.replace("stop", "__exit__")])
def test_a_profiler_that_starts_within_its_stop_is_told_to_have_an_inactive_schedule(tmp_path, outer):
    text = refusal(tmp_path, functions("main.py(3): run", outer, START))
    assert "stopped before its schedule became active; call prof.step()" in text and "server" not in text


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("<built-in method poll of select.epoll object at 0x1>", True),
        ("<built-in method acquire of _thread.lock object at 0x1>", True),
        ("main.py(3): parse", False),
        (START, False),
    ],
)
def test_a_server_is_named_only_where_functions_wait(tmp_path, name, waits):
    text = refusal(tmp_path, functions("main.py(1): run", name))
    assert "this process computes nothing" in text and ("of a server" in text) == waits


def test_a_trace_of_a_browser_is_told_to_be_none_of_torchs(tmp_path):
    event = {"ph": "X", "pid": 1, "tid": 1, "ts": 5, "dur": 3, "args": {}}
    events = [event | {"name": "Draw", "cat": "cc"}, event | {"name": "Task", "cat": "cc,devtools", "ph": "B"}]
    text = refusal(tmp_path, events)
    assert "no trace of torch.profiler" in text and "'cc', 'cc,devtools'" in text and "schedule" not in text


def test_an_empty_trace_of_torchs_is_not_told_to_be_anothers(tmp_path):
    event = {"ph": "X", "pid": 1, "tid": 1, "ts": 5, "dur": 3, "args": {}}
    events = [event | {"name": "x", "cat": "ac2g", "ph": "s"}, event | {"name": "PyTorch Profiler (0)", "cat": "Trace"}]
    assert "since a profiler is empty after its last active step" in refusal(tmp_path, {"traceEvents": events})


@pytest.mark.parametrize("legacy", [True, False])
def test_the_format_of_the_older_profiler_is_why_kernels_are_missing(tmp_path, legacy):
    event = {"ph": "X", "name": "aten::cudnn_convolution", "tid": 1, "ts": 5, "dur": 3, "args": {}}
    trace = Made("list")
    trace.events = [event | ({"pid": "CPU functions"} if legacy else {"pid": 1, "cat": "cpu_op"})]
    (finding,) = diagnose(load_run(import_traces([write(tmp_path / "t.json", trace.document())], tmp_path / "run")))
    assert finding.code == "device-not-recorded" and ("torch.autograd.profiler" in finding.advice) == legacy
    assert ("permission" in finding.advice) != legacy


@pytest.mark.parametrize(
    ("thread", "others", "product", "on_device"),
    [(2, 0, "aten::addmm", True), (1, 0, "aten::addmm", False), (2, 4, "aten::addmm", False),
     (2, 0, "aten::mkldnn_convolution", False)],
)  # fmt: skip
def test_a_backward_on_a_thread_of_its_own_is_that_of_a_device(tmp_path, thread, others, product, on_device):
    trace = Made()
    for number in range(20):
        trace.op(product, 20 * number, 15)
    for number in range(5):
        trace.op("autograd::engine::evaluate_function: AddmmBackward0", 500 + 20 * number, 15, thread)
        trace.op("aten::mm", 501 + 20 * number, 10, thread)
    for number in range(others):
        trace.op("aten::relu", 800 + 20 * number, 10, thread)
    run = run_of(tmp_path, trace, gpu="NVIDIA RTX A1000")
    assert first_sentence(run).startswith("No device activity was recorded") == on_device
    (finding,) = [f for f in diagnose(run) if f.code in ("device-not-recorded", "idle-gpu")]
    assert ("(NVIDIA RTX A1000) was not recorded" in finding.title) == on_device
    assert ("model.to" in finding.snippet) != on_device
