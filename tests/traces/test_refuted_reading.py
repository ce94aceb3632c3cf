"""What a trace is of, and what of it was recorded: statements that real traces refuted."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.findings.trace_launches import launch_remedy
from amp_core.schema import RunError
from amp_core.traces import import_traces, read_trace
from tests.traces.made import RELU, SIMT, Made, run_of, write
from tests.traces.test_ascend import CANN, HCCL, LAUNCHER, MAIN, PYTHON, of_two
from tests.traces.test_refuted_advice import finding_of


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


def exchanging(rank, waits):
    """A step of an NPU with two all-reduces, the shorter of more bytes, and what the rank waits for others in them."""
    trace = of_two()
    trace.events[0]["dur"] = 7000
    for place, (us, count) in enumerate(((4000, 4_000_000), (600, 16_000_000))):
        trace.op("c10d::allreduce_", 95 + 2 * place, 1)
        trace.row(f"hcom_allReduce__868_{place}_1", 1100 + 5000 * place, us, 95 + 2 * place, process=HCCL, row=0)
        trace.events[-3]["args"] |= {"count": count, "data_type": "FP32"}
    for other, us in waits.items():
        trace.event("Notify_Wait", 1100, us, HCCL, 10 + other, {"src rank": rank, "dst rank": other})
    return trace


def exchanges_of(folder, *traces):
    files = [write(folder / f"{number}.json", trace.events) for number, trace in enumerate(traces)]
    return load_run(import_traces(files, folder / "run"))


@pytest.mark.parametrize(
    ("waits", "awaited"),
    [
        (({1: 10, 2: 20, 3: 390}, {0: 10, 2: 15, 3: 380}), 3),
        (({1: 10, 2: 380, 3: 20}, {0: 10, 2: 15, 3: 380}), None),  # each waits for another one, as in a ring
        (({1: 390, 2: 20, 3: 20}, {0: 10, 2: 15, 3: 380}), None),  # one that is here
        (({1: 10, 2: 300, 3: 390}, {0: 10, 2: 15, 3: 380}), None),
        (({1: 10, 2: 20, 3: 390},), 3),
        (({1: 10, 3: 390},), None),  # which of the others wait for the fourth is not known
    ],
)
def test_the_rank_that_all_traces_of_an_npu_wait_for_is_named(tmp_path, waits, awaited):
    run = exchanges_of(tmp_path, *(exchanging(rank, us) for rank, us in enumerate(waits)))
    assert run.head.config.get("awaited_rank") == awaited
    finding = finding_of(run, "exposed-communication")
    assert ("wait longest for rank 3, so record that one too" in finding.advice) == (awaited is not None)
    assert "torch.profiler" not in finding.snippet and "torch_npu.profiler" in finding.snippet


@pytest.mark.parametrize("trains", [True, False])
def test_graphs_for_inference_are_not_advised_to_a_training_on_an_npu(tmp_path, trains):
    trace = of_two()
    if trains:
        trace.event("Optimizer.step#SGD.step", 55, 600, PYTHON, MAIN, cat="cpu_op")
    remedy = launch_remedy(trace.run(tmp_path))
    assert ("torchair" in remedy.snippet) != trains and ("NpuFusedSGD" in remedy.snippet) == trains


@pytest.mark.parametrize(("kernels", "advised"), [(12, "allow_internal_format = False"), (0, "jit_compile=False")])
def test_compiled_operators_of_an_npu_are_not_advised_where_it_takes_them(tmp_path, kernels, advised):
    trace = of_two()
    for number in range(kernels):
        trace.op("aten::add", 3 + number, 0.5)
        trace.row("aclnnAdd_Add_Add", 101 + number, 0.5, 3 + number, 90)
    trace.event("AscendCL@aclopCompileAndExecute", 310, 380, CANN, LAUNCHER, {"Mode": "ACL_OP", "level": "acl"})
    assert advised in finding_of(trace.run(tmp_path), "host-bound").snippet


@pytest.mark.parametrize(("op", "named"), [("aten::item", False), ("aten::unique_dim", True)])
def test_an_operator_that_waits_is_no_cause_of_late_launches_of_an_npu(tmp_path, op, named):
    trace = of_two()
    trace.op(op, 300, 385)
    assert (op in finding_of(trace.run(tmp_path), "host-bound").title) == named


@pytest.mark.parametrize("product", [False, True])
def test_no_advice_about_a_model_where_the_trace_may_lack_it(tmp_path, product):
    trace = Made()
    for number in range(30):
        trace.op("aten::mm" if product else "aten::cumsum", 100 * number, 90)
        trace.kernel(SIMT if product else f"{RELU}_{number}", 100 * number + 50, 4, 100 * number + 45)
    trace.op("aten::expand", 3100, 9000)
    run = run_of(tmp_path, trace)
    assert ("the model may not be in the trace" in first_sentence(run)) != product
    assert ("torch.compile" in finding_of(run, "launch-bound").snippet) == product


@pytest.mark.parametrize(("whole_us", "stacks", "told"), [(900_000, False, True), (900_000, True, False),
                                                          (60_000, False, False), (9000, False, False)])  # fmt: skip
def test_operators_that_run_for_little_of_the_profilers_time_are_told_first(tmp_path, whole_us, stacks, told):
    trace = Made()
    trace.op("aten::addmm", 4000, 3000)
    trace.event("Trace", "PyTorch Profiler (0)", 0, whole_us, "PyTorch Profiler")
    if stacks:
        trace.event("python_function", "main.py(3): load", 7000, 800_000, 1)
    text = first_sentence(run_of(tmp_path, trace, gpu=""))
    assert text.startswith("Operators run within 3.00 of the 900 ms that the profiler ran (0.333 %): the 4.00") == told
    assert told or text.startswith("The trace contains")
