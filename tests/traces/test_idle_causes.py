"""Causes of idle time: calls of the host, functions, graphs, late starts, waits before the first kernel."""

import pandas as pd
import pytest

from amp_core import diagnose, load_run
from amp_core.analysis import step_cost
from amp_core.analysis.performance.saving import Saving
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from amp_core.traces.waits import is_wait
from tests.traces import made
from tests.traces.made import Made, products, read, run_of, write


def test_a_short_wait_does_not_explain_a_long_gap_after_it(tmp_path):
    """The host waits 15 µs and then does something else for 9 ms: without the wait the gap would be 15 µs shorter."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.event("call", "cudaStreamSynchronize", 300, 15, 1, correlation=77)
    trace.op("aten::sort", 400, 8000)
    trace.op("aten::mm", 9_490, 8)
    trace.kernel(made.GEMM, 9_500, 400, 9_492)
    run = run_of(tmp_path, trace)
    (window,) = run.windows.to_dict("records")
    assert (window["idle_sync_us"], window["idle_dispatch_us"]) == (15, 110)  # the start and the end
    assert (window["host_op"], window["host_op_us"]) == ("aten::sort", 8000)
    first, *others = diagnose(run)
    assert (first.code, first.where) == ("host-bound", "aten::sort") and "8.00 ms of it in aten::sort" in first.title
    assert not [f for f in others if f.code == "host-syncs"]


def with_calls(names, *, each_us=400, late_us=4500):
    """Two products with a gap of `late_us`, in which the host makes these calls of `each_us` inside `aten::empty`."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000 + late_us, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.op("aten::empty", 310, len(names) * each_us + 5)
    for number, name in enumerate(names):
        trace.event("call", name, 311 + number * each_us, each_us, 1, correlation=100 + number)
    trace.op("aten::mm", late_us + 290, 8)
    trace.kernel(made.GEMM, late_us + 310, 300, late_us + 300)
    return trace


@pytest.mark.parametrize(
    ("names", "where", "kind"),
    [
        (["cudaFree", "cudaMalloc", "cudaFree", "cudaMalloc", "cudaFree"] * 2, "cudaFree, cudaMalloc", "allocation"),
        (["hipMalloc"] * 6 + ["hipHostFree"] * 4, "hipMalloc, hipHostFree", "allocation"),
        (["cudaHostAlloc"] * 10, "cudaHostAlloc", "allocation"),
        (["cuModuleLoadDataEx", "cudaFuncGetAttributes"] * 5, "cuModuleLoadDataEx, cudaFuncGetAttributes", "loading"),
        (["cudaLaunchKernel"] * 9, "cudaLaunchKernel", "loading"),
        (["cudaGraphInstantiate"] * 7, "cudaGraphInstantiate", "graphs"),
        (["cudaMemcpyAsync"] * 7, "cudaMemcpyAsync", "copies"),
        (["cudaStreamCreateWithFlags"] * 7, "cudaStreamCreateWithFlags", "setup"),
        (["cudaDeviceSetLimit"] * 7, "cudaDeviceSetLimit", "other"),
    ],
)
def test_idle_time_in_which_the_host_is_in_one_kind_of_call_names_the_call(tmp_path, names, where, kind):
    windows = read(tmp_path, with_calls(names).document())[0].windows
    assert (windows["host_call"], windows["host_call_kind"]) == ([where], [kind])
    assert windows["host_call_us"] == [400 * len(names)]


def test_the_finding_says_how_long_the_host_is_in_which_calls(tmp_path):
    first = diagnose(run_of(tmp_path, with_calls(["cudaFree", "cudaMalloc"] * 5)))[0]
    assert (first.code, first.where) == ("host-bound", "cudaFree, cudaMalloc")
    assert "4.00 ms of it allocating or freeing memory" in first.title and "in aten::empty" in first.title


def test_many_short_allocations_are_no_launch_bound_trace(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 3000, 1)
    for at in range(0, 3000, 300):
        trace.op("aten::mm", at, 270)
        trace.event("call", "cudaMalloc", at, 200, 1, correlation=77)
        trace.kernel(made.GEMM, at + 260, 40, at + 250)
    first = diagnose(run_of(tmp_path, trace))[0]
    assert (first.code, first.where) == ("host-bound", "cudaMalloc") and "expandable_segments" in first.snippet


def test_calls_that_wait_return_at_once_or_leave_the_device_busy_are_no_cause(tmp_path):
    waiting = with_calls(["cudaStreamSynchronize"] * 5)
    short = with_calls(["cudaMalloc"] * 100, each_us=40)
    other_time = with_calls(["cudaFree"], each_us=20)
    other_time.event("call", "cudaFree", 20, 280, 1, correlation=99)  # while the first product runs
    for number, trace in enumerate((waiting, short, other_time)):
        (tmp_path / str(number)).mkdir()
        windows = run_of(tmp_path / str(number), trace).windows
        assert windows["host_call"].isna().all() and windows["host_call_us"].tolist() == [0]


@pytest.mark.parametrize(("begins", "code"), [(600, "kernel-wait"), (60, "launch-bound")])
def test_a_kernel_that_begins_long_after_its_launch_waits_for_other_work(tmp_path, begins, code):
    """Both are launched while the device is idle: the second 40 µs after the first one ended."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, begins + 50, 1)
    trace.op("aten::mm", 0, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 5, 10, 1)
    trace.op("aten::mm", 50, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, begins, 50, 53)
    first = diagnose(run_of(tmp_path, trace))[0]
    assert first.code == code


@pytest.mark.parametrize(("frees", "alone", "kind"), [(1, range(30), "uncached"), (30, (5, 15, 25), "allocation")])
def test_a_free_between_most_launches_is_an_allocator_without_its_cache(tmp_path, frees, alone, kind):
    """With the cache, all frees come at once, when memory is short."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 60_000, 1)
    for n in range(30):
        at = 2000 * n
        for one in range(frees if n in alone else 0):
            trace.event("call", "cudaFree", at + 10 + 60 * one, 1900 if frees == 1 else 60, 1, correlation=900 + n)
        trace.op("aten::mm", at + 1920, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 1930, 60, at + 1921)
    run = run_of(tmp_path, trace)
    (window,) = run.windows.to_dict("records")
    assert (window["host_call_kind"], window["host_call"]) == (kind, "cudaFree")
    if kind == "uncached":
        (finding,) = [f for f in diagnose(run) if f.code == "host-bound"]
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in finding.snippet and "without a cache" in finding.title
        assert "the calls themselves take long" in finding.advice and "each free waits" not in finding.advice


@pytest.mark.parametrize(("call_us", "kind"), [(381_000, "setup"), (9_000, "allocation")])
def test_one_long_first_free_is_the_start_of_the_runtime_and_not_the_allocators(tmp_path, call_us, kind):
    trace = Made()
    trace.kernel(made.RELU, 10, 3, 5)
    trace.event("call", "cudaFree", 100, call_us, 1, correlation=9)
    trace.op("aten::conv2d", 20, call_us + 150)
    trace.kernel(made.GEMM, call_us + 200, 100, call_us + 120)
    run = run_of(tmp_path, trace)
    (window,) = run.windows.to_dict("records")
    assert (window["host_call_kind"], window["host_call"]) == (kind, "cudaFree")
    (finding,) = [f for f in diagnose(run) if f.code == "host-bound"]
    assert ("expandable_segments" in finding.snippet) == (kind == "allocation")


@pytest.mark.parametrize(("with_data", "code"), [(False, "host-bound"), (True, "waiting-for-data")])
def test_the_python_function_in_which_the_device_waits_is_named(tmp_path, with_data, code):
    """Without the longer functions that it calls, and only on the thread of the loop."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    if with_data:
        trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1000, 7000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 900, 2)
    trace.event("python_function", "/home/someone/project/train.py(10): step", 0, 9_000, 1)
    trace.event("python_function", "<built-in function zoom of object at 0x7f00aa>", 2_000, 5_000, 1)
    trace.event("python_function", "short.py(1): part", 2_100, 200, 1)
    trace.event("python_function", "threading.py(1): wait", 0, 10_000, 9)
    trace.op("aten::mm", 9_100, 20)
    trace.kernel(made.GEMM, 9_130, 870, 9_102)
    finding = diagnose(run_of(tmp_path, trace))[0]
    assert finding.code == code and finding.where == "<built-in function zoom of object>"
    assert "5.00 ms of it in <built-in function zoom of object>" in finding.title
    if not with_data:
        assert "this function" in finding.advice and "with_stack" not in finding.snippet


def frames_of(*calls):
    """The host's functions (name, start, duration) between two kernels, 10 ms apart."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 90, 2)
    for name, start, lasts in calls:
        trace.event("python_function", name, start, lasts, 1)
    trace.op("aten::mm", 9_100, 20)
    trace.kernel(made.GEMM, 9_130, 870, 9_102)
    return trace


@pytest.mark.parametrize(("second_us", "told"), [(3_000, True), (1_000, False)])
def test_a_second_function_in_which_the_device_waits_nearly_as_long_is_named_too(tmp_path, second_us, told):
    trace = frames_of(
        ("src/train.py(10): step", 0, 9_050),
        ("src/cache.py(20): load", 200, 4_000),
        ("src/cache.py(40): store", 4_300, second_us),
    )
    title = diagnose(run_of(tmp_path, trace))[0].title
    assert "4.00 ms of it in src/cache.py(20): load" in title
    assert (" and 3.00 ms in src/cache.py(40): store" in title) == told


def test_a_second_function_is_not_told_without_the_first(tmp_path):
    """Neither is much of a time that is mostly spent in no function."""
    trace = frames_of(("src/cache.py(20): load", 200, 450), ("src/cache.py(40): store", 4_300, 440))
    assert "src/cache.py" not in diagnose(run_of(tmp_path, trace))[0].title


def test_the_second_function_does_not_call_the_first(tmp_path):
    trace = frames_of(("src/train.py(10): step", 0, 9_050), ("src/cache.py(20): load", 200, 5_000))
    (window,) = run_of(tmp_path, trace).windows.to_dict("records")
    assert (window["host_function"], window["host_function_us"]) == ("src/cache.py(20): load", 5_000)
    assert window["host_second_us"] == 0


@pytest.mark.parametrize(("copied", "told"), [(1 << 20, True), (4, False), (None, False)])
def test_a_function_beside_copies_of_tensors_to_the_host_is_advised_to_work_on_the_device(tmp_path, copied, told):
    trace = frames_of(("src/boxes.py(20): suppress", 200, 8_000))
    if copied is not None:
        trace.kernel("Memcpy DtoH (Device -> Pinned)", 9_050, 20, 9_040, sort="copy")
        trace.events[-1]["args"]["bytes"] = copied
    finding = diagnose(run_of(tmp_path, trace))[0]
    assert finding.where == "src/boxes.py(20): suppress"
    assert ("copies of tensors to the host" in finding.advice) == told
    assert ("instead of on x.cpu()" in finding.snippet) == told


@pytest.mark.parametrize(("each_us", "told"), [(2_000, "src/cache.py(20): load"), (1_200, "src/train.py(10): step")])
def test_a_function_around_everything_is_told_by_what_it_calls_if_one_of_that_takes_much(tmp_path, each_us, told):
    """The function around everything does more itself than each of the innermost."""
    trace = frames_of(
        ("src/train.py(10): step", 0, 9_095),
        ("src/cache.py(20): load", 200, 2 * each_us),
        ("src/cache.py(30): read", 200, each_us),
        ("src/cache.py(40): merge", 200 + each_us, each_us),
        ("src/cache.py(50): store", 6_000, 2_000),
    )
    (window,) = run_of(tmp_path, trace).windows.to_dict("records")
    assert window["host_function"] == told


def test_functions_that_call_each_other_in_turn_are_named_by_one_of_them(tmp_path):
    deep = [(f"src/tree.py({1 + n % 2}): {'ab'[n % 2]}", 150 + n, 8_900 - 2 * n) for n in range(40)]
    (window,) = run_of(tmp_path, frames_of(*deep)).windows.to_dict("records")
    assert window["host_function"] in ("src/tree.py(1): a", "src/tree.py(2): b")


def test_functions_are_named_with_one_folder_and_stacks_that_are_there_are_not_asked_for(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 5000, 2)
    trace.event("python_function", "/home/someone/project/train.py(10): step", 5_000, 400, 1)
    trace.op("aten::mm", 9_100, 20)
    trace.kernel(made.GEMM, 9_130, 870, 9_102)
    document = trace.document(with_stack=1)
    run = load_run(import_traces([write(tmp_path / "s.json", document)], tmp_path / "stacks"))
    (window,) = run.windows.to_dict("records")
    assert (window["host_function"], window["host_function_us"]) == ("project/train.py(10): step", 390)
    finding = next(f for f in diagnose(run) if f.code == "host-bound")
    assert "has Python's stacks" in finding.advice


@pytest.mark.parametrize("replayed", [True, False])
def test_a_trace_of_the_capture_of_a_graph_is_told(tmp_path, replayed):
    """What is launched meanwhile does not run. Without a replay nothing can be said of the device."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 33_000, 1)
    trace.kernel(made.RELU, 10, 3, 5)
    trace.event("call", "cudaStreamBeginCapture", 100, 3, 1, correlation=7)
    for n in range(100):
        trace.op("aten::mm", 200 + 300 * n, 200)
        trace.event("call", "cudaLaunchKernel", 300 + 300 * n, 4, 1, correlation=100 + n)
    trace.event("call", "cudaStreamEndCapture", 30_500, 5, 1, correlation=8)
    trace.event("call", "cudaGraphInstantiate", 30_600, 1500, 1, correlation=9)
    trace.kernel(made.RELU, 32_500, 3, 32_400)
    if replayed:
        trace.event("call", "cudaGraphLaunch", 32_600, 5, 1, correlation=99)
    run = run_of(tmp_path, trace)
    if not replayed:
        assert "capture of a graph, 31.9 of 33.0 ms per step, and no launch of one" in first_sentence(run)
        assert "Profile the graph's replays." in first_sentence(run) and diagnose(run) == []
        return
    assert "ms of it building or launching graphs (cudaStreamBeginCapture, cudaGraphInstantiate)" in first_sentence(run)
    (window,) = run.windows.to_dict("records")
    assert window["host_call_us"] == 30_400 + 1500
    assert "before the loop" in diagnose(run)[0].advice


@pytest.mark.parametrize(
    ("beside", "explained"),
    [
        (None, False),
        (("cudaGraphLaunch", None), True),
        (("cudaLaunchHostFunc", None), True),
        (("cudaStreamSynchronize", None), False),
        ((None, made.GEMM), False),  # done by then: an idle device runs nothing to wait for
        ((None, made.NCCL), False),  # it would wait for other ranks while it runs
    ],
)
def test_a_late_start_is_a_wait_only_if_the_trace_has_something_to_wait_for(tmp_path, beside, explained):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 400, 2)
    trace.op("aten::mm", 20, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 800, 200, 25)
    call, kernel = beside or (None, None)
    if call is not None:
        trace.event("call", call, 30, 5, 1, correlation=99)
    if kernel is not None:
        trace.kernel(kernel, 100, 20, 21, stream=20)
    run = run_of(tmp_path, trace)
    finding = diagnose(run)[0]
    assert finding.code == "kernel-wait"
    assert ("another GPU or rank" in finding.title) == explained
    assert ("without the profiler" in finding.advice) != explained
    (window,) = run.windows.to_dict("records")
    assert window["idle_late_start_us"] == (0 if explained else window["idle_wait_us"])


def test_a_graph_that_starts_long_after_its_launch_is_what_the_gpu_waits_for(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(made.GEMM, 10, 400, 2)
    trace.event("call", "cudaGraphLaunch", 25, 5, 1, correlation=99)
    for at in (800, 900):
        trace.event("kernel", made.GEMM, at, 100, "stream 7", correlation=99, device=0, stream=7)
    trace.kernel(made.GEMM, 1000, 10, 32)
    run = run_of(tmp_path, trace)
    finding = diagnose(run)[0]
    assert (finding.code, finding.win_ms) == ("kernel-wait", pytest.approx(0.39, abs=0.01))
    assert "for a captured graph to start" in finding.title and "another GPU" not in finding.title
    assert "uploads" in finding.advice
    (window,) = run.windows.to_dict("records")
    assert window["idle_graph_us"] == window["idle_wait_us"] and window["idle_late_start_us"] == 0


@pytest.mark.parametrize(("stream", "call_us", "left_out"), [(7, 2, True), (20, 2, False), (7, 49_000, False)])
def test_the_wait_for_work_that_was_launched_before_a_trace_and_is_not_in_it_is_no_part_of_it(
    tmp_path, stream, call_us, left_out
):
    """A server's profile begins while its queue is full: the first kernel of the busy stream waits. On a stream that
    ran already, and within a call that loads a kernel, the wait is the program's."""
    trace = Made()
    trace.kernel(made.RELU, 10, 3, 5, stream=20)
    trace.event("call", "hipMemcpyWithStream", 30, 49_000, 1, correlation=5)
    trace.kernel(made.GEMM, 50_000, 900, 15, stream=stream, call_us=call_us)
    trace.kernel(made.GEMM, 50_910, 90, 50_002, stream=stream)
    document = trace.document()
    read_back, _ = read(tmp_path, document)
    assert read_back.windows["wall_us"] == [pytest.approx(1000 if left_out else 50_990)]
    assert any("first 50.0 ms are left out" in note for note in read_back.notes) == left_out
    says = first_sentence(run_of(tmp_path, trace))
    assert says.startswith("Nothing beside GEMM/conv would save") == left_out


@pytest.mark.parametrize(("streams", "first"), [((7, 7), "fp32-products"), ((7, 20), "fp32-products")])
def test_a_wait_that_may_be_the_profilers_comes_after_what_is_surely_in_the_step(tmp_path, streams, first):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    products = ((10, 250, made.SIMT, streams[0]), (600, 200, made.GEMM, streams[1]), (800, 200, made.GEMM, streams[0]))
    for at, us, kernel, stream in products:
        trace.op("aten::mm", 1 + at / 100, 1, **{"Input type": ["float" if kernel == made.SIMT else "c10::Half"] * 2})
        trace.kernel(kernel, at, us, 1.5 + at / 100, stream=stream)
    findings = diagnose(run_of(tmp_path, trace))
    assert next(f.code for f in findings if f.code in ("fp32-products", "kernel-wait")) == first
    (wait,) = [f for f in findings if f.code == "kernel-wait"]
    assert "could save up to 0.340 of 1.00 ms" in wait.title


@pytest.mark.parametrize(("lead_us", "code"), [(200, "launch-bound"), (3_000, "host-bound")])
def test_a_short_wait_before_the_first_kernel_is_dispatch(tmp_path, lead_us, code):
    trace = products()
    trace.event("gpu_user_annotation", "ProfilerStep#3", 10, 800, "stream 7")
    of_device = ("kernel", "gpu_user_annotation")
    trace.events = [{**e, "ts": e["ts"] + lead_us} if e["cat"] in of_device else e for e in trace.events]
    trace.event("mark", "ProfilerStep#3", 0, 1_000 + lead_us, 1)
    found = {f.code: f.title for f in diagnose(run_of(tmp_path, trace)) if f.code in ("launch-bound", "host-bound")}
    assert list(found) == [code] and "before the first kernel of the step because" in found[code]


def test_waiting_before_the_first_kernel_counts_though_the_step_begins_with_it(tmp_path):
    trace = products()
    trace.event("gpu_user_annotation", "ProfilerStep#3", 10, 800, "stream 7")
    late = [{**e, "ts": e["ts"] + 3000} if e["cat"] in ("kernel", "gpu_user_annotation") else e for e in trace.events]
    trace.events = late
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    run = run_of(tmp_path, trace)
    first, cost = diagnose(run)[0], step_cost(run)
    assert first.code == "host-bound" and first.value == pytest.approx(3.01 / 3.81)
    assert cost.step_us == 800  # as the GPU marks it, in every place
    assert "idle for 3.01 ms before the first kernel of the step because" in first_sentence(run)
    assert first_sentence(run).endswith("(up to 3.01 ms per step, all before the first kernel).")
    assert first.evidence()[1].startswith("79.0 % of the step with the time before it saved")


def test_a_nanosecond_beside_the_wait_before_the_first_kernel_is_none():
    saving = Saving("host-bound", 88.001, 366.0, "", "", lead_us=88.0)
    assert saving.how_much() == "up to 0.0880 ms before the first kernel"
    both = Saving("host-bound", 188.0, 366.0, "", "", lead_us=88.0)
    assert both.how_much("step") == "up to 0.100 of 0.366 ms per step, and 0.0880 ms before the first kernel"


def test_the_profilers_own_time_is_no_idle_time_of_a_trace_without_steps(tmp_path):
    trace = Made()
    trace.op("aten::mm", 5, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 5000, 1000, 6)
    trace.event("call", "cudaDeviceSynchronize", 100, 6_000, 1, correlation=9)
    run = run_of(tmp_path, trace)
    text = first_sentence(run)
    assert text.startswith("Nothing beside GEMM/conv would save") and diagnose(run) == []
    assert "Left out are the 5.00 ms before" in text and "or the profiler starts" in text


@pytest.mark.parametrize(("before_us", "named"), [(90_000, True), (400, False)])
def test_data_that_is_loaded_before_the_first_kernel_of_a_trace_without_steps_counts(tmp_path, before_us, named):
    trace = Made()
    at = before_us + 5000  # what else happens before the first kernel is the start of the program
    for start, us in ((0, before_us), (at + 1, before_us // 9)):  # the second batch is that of the loop
        trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, us, 1)
    for number in range(2):
        trace.op("aten::mm", at + 5 + 500 * number, 8)
        trace.kernel(made.GEMM, at + 20 + 5000 * number, 5000, at + 6 + 500 * number)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("waits for data 90.0 ms before the first kernel of the profiled window" in sentence) == named
    assert "launches too late" not in sentence


def test_a_pause_after_earlier_work_counts_where_starting_the_profiler_takes_no_time(tmp_path):
    """Profilers of operators take long to start; one of the device alone does not."""
    trace = Made()
    trace.event("kernel", made.SIMT, 0, 500, 7, correlation=1, device=0, stream=7)
    trace.kernel(made.GEMM, 90_000, 5000, 89_990)
    assert "idle for 89.5 ms before the first kernel" in first_sentence(run_of(tmp_path / "device", trace))
    trace.op("aten::mm", 89_985, 10)
    assert "idle" not in first_sentence(run_of(tmp_path / "operators", trace))


def cut_out(names, us=300):
    """Kernels without launches or operators, with idle time between them."""
    trace = Made()
    for number, name in enumerate(names):
        trace.event("kernel", name, 1000 * number, us, 7, correlation=number, device=0, stream=7)
    return trace


@pytest.mark.parametrize(
    ("names", "says", "told"),
    [
        ([made.GEMM] * 3, "no launches that would show why", True),
        ([made.NCCL] * 3, "The trace holds collectives alone: whether the GPU computes beside", False),
    ],
)
def test_idle_time_without_launches_is_blamed_on_nobody(tmp_path, names, says, told):
    run = run_of(tmp_path, cut_out(names))
    assert says in first_sentence(run) and "host" not in first_sentence(run)
    assert ("idle" in first_sentence(run)) == ("unexplained-idle" in {f.code for f in diagnose(run)}) == told
    assert not {"host-bound", "launch-bound", "kernel-wait", "host-syncs"} & {f.code for f in diagnose(run)}


def test_steps_in_which_nothing_was_launched_do_not_hide_the_work(tmp_path):
    """A profile of the device alone, begun and ended around a synchronization: the step ends before the work runs."""
    trace = cut_out([made.SIMT] * 3, us=500)
    trace.event("mark", "ProfilerStep#0", -40, 22, 1)
    trace.event("call", "cudaDeviceSynchronize", -10, 3000, 1, correlation=77)
    run = run_of(tmp_path, trace)
    assert "60 % of the profiled window in FP32" in first_sentence(run)


def test_late_starts_for_which_the_host_waits_name_the_waits(tmp_path):
    trace = Made()
    for number in range(4):
        at = 1000 * number
        trace.op("aten::_coalesce", at, 990)
        trace.kernel(made.RELU, at + 800, 100, at + 5)
        trace.event("call", "cudaStreamSynchronize", at + 20, 900, 1, correlation=900 + number)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "although work is queued" in sentence
    assert "the host waits meanwhile, in synchronizations (aten::_coalesce)" in sentence


@pytest.mark.parametrize(("own_us", "told"), [(6_000, "60.0 %"), (400, "")])
def test_the_profilers_own_work_is_neither_blamed_on_an_operator_nor_to_be_saved(tmp_path, own_us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.op("aten::sort", 400, 8000)
    trace.event("overhead", "Activity Buffer Request", 1_000, own_us, 0)
    trace.op("aten::mm", 9_490, 8)
    trace.kernel(made.GEMM, 9_500, 400, 9_492)
    run = run_of(tmp_path, trace)
    (window,) = run.windows.to_dict("records")
    assert (window["host_op"], window["host_op_us"]) == ("aten::sort", 8_000 - own_us)
    assert (window["idle_us"], window["idle_profiling_us"]) == (9_300, own_us)
    sentence = first_sentence(run)
    assert f"{(8_000 - own_us) / 1000:.2f} ms of it in aten::sort" in sentence
    assert f"(up to {(9_300 - own_us) / 1000:.2f} of 10.0 ms per step)" in sentence
    own = f"The profiler's own work takes {told} of the profiled time, and is part of no saving."
    assert (own in sentence) if told else ("profiler's own" not in sentence)


def test_the_operator_of_the_longest_idle_time_is_named_for_synchronizations(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    # The host waits long in one operator, for a kernel that runs meanwhile, and the device is idle after the other.
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 20, 9_000, 2)
    trace.op("aten::nonzero", 30, 9_000)
    trace.event("call", "cudaStreamSynchronize", 40, 8_985, 1, correlation=901)
    trace.op("aten::mm", 9_030, 8)
    trace.kernel(made.GEMM, 9_041, 1_000, 9_031)
    for number in range(8):
        at = 10_041 + 1_200 * number
        trace.op("aten::item", at - 400, 800)
        trace.event("call", "cudaStreamSynchronize", at - 300, 650, 1, correlation=910 + number)
        trace.op("aten::mm", at + 390, 8)
        trace.kernel(made.GEMM, at + 400, 800, at + 392)
    (window,) = run_of(tmp_path, trace).windows.to_dict("records")
    assert (window["sync_op"], window["idle_sync_op"]) == ("aten::nonzero", "aten::item")
    assert window["idle_sync_us"] > 2_000


@pytest.mark.parametrize(
    ("name", "waits"),
    [("cudaStreamSynchronize_v3020", True), ("cudaMemcpy_ptsz", True), ("cudaLaunchKernel_v7000", False)],
)
def test_calls_with_a_version_in_their_name_wait_too(name, waits):
    assert is_wait(name) == waits


@pytest.mark.parametrize(("kept", "told"), [(1, False), (4, True)])
def test_of_a_trace_that_lacks_most_operators_the_host_is_unknown(tmp_path, kept, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 60_000, 1)
    for number in range(240):
        trace.op("aten::add", 200 * number, 20)
        if number % 60 == 0:
            trace.kernel(made.RELU, 200 * number + 10, 5, 200 * number + 2)
    operators = [event for event in trace.events if event.get("cat") == "cpu_op"]
    removed = [event for place, event in enumerate(operators) if place % kept]
    trace.events = [event for event in trace.events if event not in removed]
    run = run_of(tmp_path, trace)
    (finding,) = [f for f in diagnose(run) if f.code == "host-bound"]
    assert ("most operators are missing in the file" in finding.title) == told
    assert ("in no operator" in finding.title) != told
    assert ("prof.export_chrome_trace" in finding.snippet) == told


def with_ranges(*ranges, functions=()):
    """Ten short kernels 200 µs apart, then thirty 20 µs apart, and ranges of the program, with start and length."""
    trace = Made()
    starts = [1 + 200 * n for n in range(10)] + [2001 + 20 * n for n in range(30)]
    for start in starts:
        trace.op("aten::mul", start, 6)
        trace.kernel(made.RELU, start + 8, 4, start + 2)
    for name, start, length in ranges:
        trace.event("mark", name, start, length, 1)
    for name, start, length in functions:
        trace.event("python_function", name, start, length, 1)
    return trace


@pytest.mark.parametrize(
    ("ranges", "named"),
    [
        ([("first_sum", 0, 1990), ("second_sum", 1995, 600)], "first_sum"),
        ([("model", 0, 2590), ("first_sum", 0, 1990)], "first_sum"),
        ([("model", 0, 2590)], None),  # all of it: tells nothing
        ([("model", 0, 2450), ("validation", 2460, 140)], "model"),  # there are others beside it
        ([("model", 0, 2590), ("layer", 0, 500), ("head", 600, 500)], None),  # the others are within it
        ([("data_loading", 0, 1990)], None),  # told as loading
        ([(f"layer {n}", 200 * n, 195) for n in range(10)], "layer *"),
        ([("nccl:all_reduce", 0, 1990), ("Optimizer.step#Adam.step", 0, 1990)], None),  # not the program's own
        ([("first_sum", 0, 700)], None),  # a third of it
    ],
)
def test_the_range_in_which_the_device_waits_is_named(tmp_path, ranges, named):
    run = run_of(tmp_path, with_ranges(*ranges))
    (window,) = run.windows.to_dict("records")
    assert window["host_range"] == named if named else pd.isna(window["host_range"])
    finding = next(f for f in diagnose(run) if f.code == "launch-bound")
    assert (f"in {named}" in finding.title) if named else "of it in" not in finding.title


def test_the_function_in_which_short_kernels_are_launched_is_named_before_a_range(tmp_path):
    functions = [("sums.py(3): first_sum", 0, 1990), ("sums.py(9): second_sum", 1995, 600)]
    run = run_of(tmp_path, with_ranges(("timed", 0, 1990), functions=functions))
    finding = next(f for f in diagnose(run) if f.code == "launch-bound")
    assert "in sums.py(3): first_sum" in finding.title and "timed" not in finding.title
