"""What diagnose says first of a trace, and what it must not say."""

import tarfile

import pytest

from amp_core import diagnose, load_run
from amp_core.__main__ import main
from amp_core.analysis import step_cost
from amp_core.analysis.performance.saving import Saving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, products, read, run_of, write
from tests.traces.test_step_windows import host_bound


def test_findings_come_by_what_there_is_to_win_and_the_first_is_the_first_sentence(tmp_path):
    run = run_of(tmp_path, products(backward=True))
    wins = [f.win_ms for f in diagnose(run) if f.severity == "warning"]
    assert wins == sorted(wins, reverse=True) and len(wins) == 2
    assert diagnose(run)[0].code == "fp32-products"
    assert "80 % of the step in FP32" in first_sentence(run)
    # 800 µs at 125 / 15.7 of the rate
    assert wins[0] == pytest.approx(0.8 * (1 - 15.7 / 125))


def test_a_trace_that_trains_nothing_gets_no_advice_on_training(tmp_path):
    findings = diagnose(run_of(tmp_path, products()))
    assert findings[0].code == "fp32-products"
    assert not [f for f in findings if "loss" in f.snippet or "optimizer" in f.snippet or "GradScaler" in f.advice]


def test_a_trace_with_nothing_to_win_says_so(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 990, 2)
    run = run_of(tmp_path, trace)
    assert first_sentence(run).startswith(
        "Nothing beside GEMM/conv would save 5.00 % or more of the step: it takes 99.0 %"
    )
    assert [f for f in diagnose(run) if f.severity == "warning"] == []


@pytest.mark.parametrize(("count", "says"), [(60, "in buckets"), (2, "smaller buckets")])
def test_gradients_that_are_reduced_one_by_one_are_not_told_to_take_smaller_buckets(tmp_path, count, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1200, 1)
    trace.op("MmBackward0", 1, 400, 2)
    trace.op("aten::mm", 2, 8, 2, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 300, 3, 2)
    for n in range(count):
        trace.op("c10d::allreduce_", 20 + 5 * n, 4, 2)
        trace.op("record_param_comms", 20.5 + 5 * n, 3, 2)
        trace.kernel(made.NCCL, 320 + 840 // count * n, 800 // count, 21 + 5 * n, 2, call_us=1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "exposed-communication"]
    assert says in finding.advice


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


@pytest.mark.parametrize(("each_us", "code"), [(250, "launch-bound"), (500, "host-bound")])
def test_idle_time_is_dispatch_in_short_gaps_and_other_work_in_long_ones(tmp_path, each_us, code):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 8 * each_us, 1)
    for at in range(0, 8 * each_us, each_us):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 10, 50, at + 2)
    first = diagnose(run_of(tmp_path, trace))[0]
    assert (first.code, first.where) == (code, "host")


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


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_that_is_compiled_already_is_not_told_to_be_compiled(tmp_path, compiled):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    for n in range(20):
        name = "triton_poi_fused_add_mul_0" if compiled and n % 2 else made.RELU
        trace.op("triton_poi_fused_add_mul_0" if compiled and n % 2 else "aten::relu", 100 * n, 20)
        trace.kernel(name, 100 * n + 20, 5, 100 * n + 10)
    finding = diagnose(run_of(tmp_path, trace))[0]
    assert finding.code == "launch-bound" and ("compile the model" in finding.advice) != compiled
    assert ("graph_breaks" in finding.snippet) == compiled


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


@pytest.mark.parametrize(
    ("copy", "trains", "says"),
    [
        ("Memcpy HtoD (Pageable -> Device)", False, "pin_memory"),
        ("Memcpy HtoD (Pinned -> Device)", False, "stream"),
        ("Memcpy DtoD (Device -> Device)", False, "compile"),
        ("Memset (Device)", True, "set_to_none"),
        ("Memset (Device)", False, "torch.empty"),
    ],
)
def test_copies_are_advised_on_by_their_direction(tmp_path, copy, trains, says):
    trace = products(backward=trains)
    trace.kernel(copy, 810, 150, 430, sort="copy")
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert finding.where == copy and says in finding.snippet
    assert ("pin_memory" in finding.snippet) == ("Pageable" in copy)


@pytest.mark.parametrize(("stream", "already"), [(7, False), (20, True)])
def test_copies_on_a_stream_of_their_own_are_not_told_to_move_to_one(tmp_path, stream, already):
    trace = products()
    trace.kernel(made.COPY, 810, 150, 430, sort="copy", stream=stream)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert ("on a stream of their own" in finding.advice) == already


def test_pageable_copies_in_both_directions_are_told_to_pin(tmp_path):
    trace = products()
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 810, 80, 800, sort="copy")
    trace.kernel("Memcpy DtoH (Device -> Pageable)", 890, 100, 880, sort="copy")
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert "DtoH" in finding.where and "pin_memory=True" in finding.snippet


@pytest.mark.parametrize(
    ("collective", "mark", "says"),
    [
        ("ReduceScatter", "backward", "Each rank reduces its shard"),
        ("ReduceScatter", "Optimizer.step#Muon.step", "The optimizer exchanges shards"),
        ("AllGather", "Optimizer.step#Muon.step", "The optimizer exchanges shards"),
        ("AllGather", "forward", "Sharded weights are gathered"),
    ],
)
def test_exchanged_shards_are_not_told_to_take_buckets(tmp_path, collective, mark, says):
    trace = products(backward=True)
    trace.event("mark", mark, 420, 100, 1)
    trace.op(f"c10d::{collective.lower()}_", 425, 30)
    trace.kernel(f"ncclDevKernel_{collective}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 810, 150, 430)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "exposed-communication"]
    assert finding.advice.startswith(says) and "DistributedDataParallel" not in finding.snippet


def test_exposed_exchanges_get_no_advice_on_buckets(tmp_path):
    trace = products(backward=True)
    trace.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", 810, 150, 430)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "exposed-communication"]
    assert "SendRecv" in finding.where and "bucket" not in finding.advice + finding.snippet


def test_a_trace_of_a_cpu_names_its_longest_operator(tmp_path):
    trace = Made()
    trace.op("aten::mkldnn_convolution", 0, 900)
    trace.op("aten::relu", 900, 100)
    assert "on the CPU, aten::mkldnn_convolution takes 90.0 %" in first_sentence(run_of(tmp_path, trace))


def test_a_cpu_that_loads_data_or_runs_no_operator_is_told_so(tmp_path):
    def sentence(name, data_us, rest_us):
        trace = Made()
        trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, data_us, 1)
        trace.op("aten::addmm", data_us, 400)
        trace.op("aten::relu", data_us + 400 + rest_us, 100)
        return first_sentence(run_of(tmp_path / name, trace))

    assert "on the CPU, loading data takes 50.0 % of the time; aten::addmm" in sentence("data", 500, 0)
    assert "the operators' time. Loading data takes 16.7 % of the time. The machine's GPU, Tesla" in sentence(
        "little", 100, 0
    )
    assert "no operator runs for 60.0 % of the 1.50 ms, in which Python" in sentence("python", 100, 900)


def test_an_optimizer_that_takes_more_than_any_operator_is_named_first(tmp_path):
    trace = Made()
    trace.op("aten::addmm", 0, 300)
    trace.event("mark", "Optimizer.step#Adam.step", 300, 500, 1)
    for number in range(10):
        trace.op(("aten::mul", "aten::add", "aten::sqrt", "aten::div", "aten::lerp")[number % 5], 300 + 50 * number, 50)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "on the CPU, the optimizer takes 62.5 % of the operators' time, in 10.0 operators: fused=True" in sentence
    assert "aten::addmm takes 37.5 % of the operators' time." in sentence


def test_products_of_several_operators_are_added_up(tmp_path):
    trace = Made()
    for number, name in enumerate(("aten::mm", "aten::addmm", "aten::bmm")):
        trace.op(name, 200 * number, 200 - 20 * number)
    trace.op("aten::relu", 600, 60)
    assert "aten::mm takes 33.3 % of the operators' time, and all matrix products take 90.0 %." in first_sentence(
        run_of(tmp_path, trace)
    )


def test_small_operators_are_said_to_cost_their_calls(tmp_path):
    trace = Made()
    for number in range(100):
        trace.op(f"aten::op{number % 10}", 2 * number, 1)
    assert "on the CPU, 100 operators take 1.00 µs each on average" in first_sentence(run_of(tmp_path, trace))


def test_a_step_without_operators_leaves_the_rest_of_a_cpu_trace_to_be_told(tmp_path):
    trace = Made()
    trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 600, 1)
    trace.op("aten::stack", 100, 250)
    trace.op("aten::copy_", 400, 150)
    trace.op("aten::addmm", 600, 300)
    trace.event("mark", "ProfilerStep#1", 1000, 10, 1)
    assert "loading data takes 57.1 % of the operators' time; " in first_sentence(run_of(tmp_path, trace))


def test_a_convolution_without_onednn_is_named_as_such(tmp_path):
    trace = Made()
    trace.op("aten::_slow_conv2d_forward", 0, 900)
    assert "is_available()" in first_sentence(run_of(tmp_path, trace))


@pytest.mark.parametrize(("inside", "named"), [("", True), ("cudaStreamSynchronize", False)])
def test_the_operator_that_keeps_the_host_busy_is_named_though_the_device_was_not_recorded(tmp_path, inside, named):
    trace = Made()
    trace.op("aten::normal_", 0, 800)
    if inside:
        trace.event("call", inside, 10, 780, 1, correlation=3)
    trace.op("aten::pow", 800, 200)
    trace.event("call", "cudaLaunchKernel", 810, 5, 1, correlation=4)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.startswith("No device activity was recorded")
    assert ("On the host, aten::normal_ takes 80.0 % of the time, and launches nothing." in sentence) == named


def test_the_longest_part_of_the_host_is_named_where_the_device_was_not_recorded(tmp_path):
    def sentence(name, made_of):
        trace = Made()
        trace.op("aten::cudnn_convolution", 900, 100)
        made_of(trace)
        return first_sentence(run_of(tmp_path / name, trace, "")).partition("On the host, ")[2]

    def calls(trace):
        trace.event("call", "cudaFree", 0, 500, 1, correlation=3)
        trace.event("call", "cudaMalloc", 500, 100, 1, correlation=4)
        trace.event("call", "cudaDeviceSynchronize", 600, 200, 1, correlation=5)
        trace.event("call", "cudaLaunchKernel", 910, 5, 1, correlation=6)

    loading = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert sentence("data", lambda t: t.event("mark", loading, 0, 800, 1)) == "loading data takes 80.0 % of the time."
    assert sentence("calls", calls) == (
        "the most time, 60.0 %, goes to calls into the device's runtime (cudaFree, cudaMalloc)."
    )
    steps = "the optimizer's steps take 40.0 % of the time."
    assert sentence("optimizer", lambda t: t.event("mark", "Optimizer.step#AdamW.step", 0, 400, 1)) == steps
    assert sentence("op", lambda t: t.op("aten::zeros", 0, 700)) == (
        "aten::zeros takes 70.0 % of the time: launching, waiting for the device, or its first call."
    )
    assert sentence("nothing", lambda t: t.op("aten::zeros", 0, 300)) == (
        "no operator runs for 60.0 % of the time, in which Python or other code does."
    )


def test_operators_that_torch_timed_on_the_device_are_named(tmp_path):
    """As torch.autograd.profiler wrote them up to PyTorch 1.7, with operators inside others."""
    host, device = {"pid": "CPU functions", "tid": 1}, {"pid": "CUDA functions", "tid": 0}
    calls = [
        ("aten::conv2d", 0, 90, host),
        ("aten::conv2d", 50, 950, device),
        ("aten::cudnn_convolution", 60, 900, device),
    ]
    events = [{"name": name, "ph": "X", "ts": start, "dur": us, **place} for name, start, us, place in calls]
    run = load_run(import_traces([write(tmp_path / "t.json", events)], tmp_path / "run"))
    assert first_sentence(run).startswith("No kernel was recorded")
    assert first_sentence(run).endswith("aten::cudnn_convolution takes 90.0 % of the time on the device.")


def test_allocations_are_part_of_the_operators_time(tmp_path):
    trace = Made()
    trace.op("aten::normal_", 0, 600)
    trace.op("aten::empty_strided", 600, 400)
    assert "aten::normal_ takes 60.0 % of the operators' time" in first_sentence(run_of(tmp_path, trace))


@pytest.mark.parametrize(("op", "says"), [("aten::copy_", "pin_memory"), ("aten::item", "loss.item()")])
def test_syncs_are_advised_on_by_their_operator(tmp_path, op, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.op(op, 20, 300)
    trace.event("call", "cudaStreamSynchronize", 21, 295, 1, correlation=77)
    trace.op("aten::mm", 590, 8)
    trace.kernel(made.GEMM, 600, 400, 592)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-syncs"]
    assert finding.where == op and says in finding.snippet and "fused" not in finding.snippet


def test_thousands_of_syncs_are_written_as_a_whole_number(tmp_path):
    trace = Made()
    for at in range(0, 1200 * 100, 100):
        trace.op("aten::mm", at, 8)
        trace.kernel(made.GEMM, at + 10, 40, at + 2)
        trace.event("call", "cudaStreamSynchronize", at + 11, 40, 1, correlation=77)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-syncs"]
    assert "1,200 synchronizations" in finding.title


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
    assert first.evidence()[1].startswith("79.0 % of the step and the time before it saved")


def test_a_nanosecond_beside_the_wait_before_the_first_kernel_is_none():
    saving = Saving("host-bound", 88.001, 366.0, "", "", lead_us=88.0)
    assert saving.how_much() == "up to 0.0880 ms before the first kernel"
    both = Saving("host-bound", 188.0, 366.0, "", "", lead_us=88.0)
    assert both.how_much("step") == "up to 0.100 of 0.366 ms per step, and 0.0880 ms before the first kernel"


def test_the_step_of_a_finding_is_that_of_the_step_cost(tmp_path):
    """Three steps of 1,000 µs whose first kernels come 400 µs late, 300 of which are data loading: the wait before the
    first one counts like those before the others, which lie between steps that the device marks."""
    run = load_run(import_traces([write(tmp_path / "t.json", host_bound(steps=3))], tmp_path / "run"))
    savings, cost = possible_savings(run), step_cost(run)
    assert {c.step_us for c in savings.ranked} == {cost.step_us} == {2900 / 3}
    assert cost.parts["us"].sum() == pytest.approx(cost.step_us)
    by_code = {c.code: (c.saved_us, c.lead_us) for c in savings.ranked}
    assert by_code["waiting-for-data"] == (pytest.approx(300), 0)
    assert "waits for data 31 % of the step" in diagnose(run)[0].title


def test_the_profilers_own_time_is_no_idle_time_of_a_trace_without_steps(tmp_path):
    trace = Made()
    trace.op("aten::mm", 5, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 5000, 1000, 6)
    trace.event("call", "cudaDeviceSynchronize", 100, 20_000, 1, correlation=9)
    run = run_of(tmp_path, trace)
    text = first_sentence(run)
    assert text.startswith("Nothing beside GEMM/conv would save") and diagnose(run) == []
    assert "Left out are the 4.99 ms before" in text and "or the profiler starts" in text


def test_a_window_that_is_hardly_used_is_told_to_be_start_up(tmp_path):
    trace = Made()
    for at in (0, 90_000):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 10, 100, at + 2)
    text = first_sentence(run_of(tmp_path, trace))
    assert "idle for 100 % of the profiled window" in text and text.endswith("profile after a warm-up.")


def test_another_accelerator_is_no_gpu_and_gets_no_advice_on_cuda(tmp_path):
    trace = Made()
    trace._names = {**trace._names, "call": "xpu_runtime"}
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 20, 8, **{"Input type": ["float"] * 2})
    trace.kernel("gemm_kernel", 500, 400, 22)
    run = run_of(tmp_path, trace, gpu="")
    assert "the device is idle" in first_sentence(run)
    assert not [f for f in diagnose(run) if "cuda" in f.snippet]


def test_ranges_of_nccl_without_a_kernel_show_that_the_device_was_not_recorded(tmp_path):
    trace = Made()
    trace.op("record_param_comms", 10, 60)
    trace.event("mark", "nccl:all_to_all", 14, 40, 1)
    assert [f.code for f in diagnose(run_of(tmp_path, trace))] == ["device-not-recorded"]


def tiny_kernels(optimizer):
    """A loop that is bound by launches, whose optimizer is of the kind given."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("MmBackward0", 780, 10, 2)
    for at in range(0, 800, 100):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 50, 4, at + 40)
    trace.event("mark", "Optimizer.step#Adagrad.step", 900, 80, 1)
    trace.op(optimizer, 905, 60)
    trace.kernel(made.ADAM, 950, 4, 910)
    return trace


@pytest.mark.parametrize(
    ("call", "around", "category", "says", "refuted"),
    [
        ("cudaLaunchKernel", None, "cuda_runtime", "capture CUDA graphs", "already"),
        ("cudaGraphLaunch", None, "cuda_runtime", "Graphs are replayed already", "compile the model"),
        ("cudaLaunchKernel", "Torch-Compiled Region", "cuda_runtime", "compiled already", "compile the model"),
        ("mtiaLaunch", None, "mtia_runtime", "compile the model", "graphs"),
    ],
)
def test_launch_bound_loops_are_not_advised_to_do_what_they_do(tmp_path, call, around, category, says, refuted):
    trace = tiny_kernels("aten::_fused_adagrad_")
    trace.event("call", call, 2, 5, 1, correlation=99)
    for at in range(0, 800, 100) if around else ():
        trace.op(around, at - 0.5, 60)
    for event in trace.events:
        event["cat"] = category if event["cat"] == "cuda_runtime" else event["cat"]
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert says in finding.advice and refuted not in finding.advice
    assert ("reduce-overhead" in finding.snippet) == (category == "cuda_runtime" and call != "cudaGraphLaunch")


def test_a_loop_of_short_calls_is_not_taken_for_the_start_of_a_program(tmp_path):
    trace = Made()
    for at in range(0, 20_000, 200):
        trace.op("aten::addmv", at, 60, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 70, 6, at + 50)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "launches too late" in sentence and "warm-up" not in sentence


@pytest.mark.parametrize(("optimizer", "fused"), [("aten::_foreach_add_", True), ("aten::_fused_adagrad_", False)])
def test_launch_bound_loops_are_advised_on_their_own_optimizer(tmp_path, optimizer, fused):
    (finding,) = [f for f in diagnose(run_of(tmp_path, tiny_kernels(optimizer))) if f.code == "launch-bound"]
    assert ("fused=True" in finding.snippet) == fused and "AdamW(" not in finding.snippet


def test_a_loop_that_trains_is_not_taken_for_an_idle_server(tmp_path):
    trace = tiny_kernels("aten::_foreach_add_")
    trace.events = [event for event in trace.events if "ProfilerStep" not in event["name"]]
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "launches too late" in sentence and "idle server" not in sentence


def test_copies_alone_are_the_largest_saving_of_a_trace_without_kernels(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel("Memcpy DtoH (Device -> Pageable)", 10, 900, 2, sort="copy")
    run = run_of(tmp_path, trace)
    assert first_sentence(run).startswith("Largest possible saving: copies and fills take 90 % of the step")
    assert diagnose(run)[0].code == "copies"


def test_the_start_of_a_program_is_one_cause(tmp_path):
    """A first launch, the driver's memory and the streams take the host's time between two kernels."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.kernel(made.GEMM, 10, 10, 2)
    for call, at, us in (("cudaFree", 100, 3000), ("cudaMalloc", 3200, 1000), ("cudaStreamCreate", 4300, 1500)):
        trace.event("call", call, at, us, 1, correlation=at)
    trace.kernel(made.GEMM, 9_500, 10, 6000, call_us=3400)
    finding = diagnose(run_of(tmp_path, trace))[0]
    assert finding.code == "host-bound" and "setting up the device (" in finding.title
    assert "warm-up" in finding.advice


def test_a_trace_is_diagnosed_as_the_run_that_is_imported_from_it(tmp_path, capsys):
    file = write(tmp_path / "a.pt.trace.json", products().document())
    assert main(["diagnose", str(file)]) == 0
    at_once = capsys.readouterr().out
    assert main(["import-trace", str(file), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == at_once and "GEMM/conv" in at_once
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt.trace.json", "run"]
    assert main(["diagnose", str(file), "--mute", "host-bound"]) == 2
    assert "import the trace" in capsys.readouterr().err


def test_a_report_takes_traces_and_runs(tmp_path, capsys):
    file, out = write(tmp_path / "a.pt.trace.json", products().document()), tmp_path / "r.html"
    assert main(["import-trace", str(file), "--out", str(tmp_path / "run"), "--name", file.name]) == 0
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == 0
    before, settings, _ = out.read_text(encoding="utf-8").partition("Settings and environment")  # with the run's id
    capsys.readouterr()
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith(before + settings) and "GEMM/conv" in before
    assert "1 run," in capsys.readouterr().out
    assert main(["pack", str(tmp_path / "run"), "--out", str(tmp_path / "packed")]) == 0  # not called .zip
    assert main(["report", str(tmp_path / "packed"), str(file), "--out", str(out)]) == 0
    assert "2 runs," in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt.trace.json", "packed", "r.html", "run"]


def test_files_that_are_no_packed_runs_are_refused_with_what_to_do(tmp_path, capsys):
    file = write(tmp_path / "a.pt.trace.json", products().document())
    assert main(["pack", str(file)]) == 2
    assert "import a profiler trace with ampscope import-trace" in capsys.readouterr().err
    (tmp_path / "b.json").write_text("[1, 2]")
    assert main(["diagnose", str(tmp_path / "b.json")]) == 2
    assert "trace='b.json' has a int among its events" in capsys.readouterr().err
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(file, "a.json")
    assert main(["import-trace", str(archive), "--out", str(tmp_path / "run")]) == 2
    assert "is an archive; unpack it" in capsys.readouterr().err


def test_who_has_all_ranks_is_not_asked_for_them(tmp_path):
    def of(ranks):
        files = []
        for rank in range(ranks):
            trace = Made()
            trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
            trace.op("MmBackward0", 1, 10, 2)
            trace.kernel(made.GEMM, 10, 100, 2, 2)
            trace.kernel(made.NCCL, 120, 800, 12)
            document = trace.document(distributedInfo={"rank": rank, "world_size": 2})
            files.append(write(tmp_path / f"{ranks}-{rank}.json", document))
        findings = diagnose(load_run(import_traces(files, tmp_path / f"run{ranks}")))
        return next(f for f in findings if f.code == "exposed-communication")

    assert "import the traces of all ranks" in of(1).advice
    complete = of(2).advice
    assert "all ranks" not in complete and complete.endswith(".")


def queued(tmp_path, ranks):
    """The `kernel-wait` of this many of two ranks, each with a product that a host function may hold up."""
    files = []
    for rank in range(ranks):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 10, 400, 2)
        trace.event("call", "cudaLaunchHostFunc", 15, 5, 1, correlation=99)
        trace.op("aten::mm", 21, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 800, 200, 25)
        document = trace.document(distributedInfo={"rank": rank, "world_size": 2})
        files.append(write(tmp_path / f"{ranks}-{rank}.json", document))
    run = load_run(import_traces(files, tmp_path / f"run{ranks}"))
    return next(f for f in diagnose(run) if f.code == "kernel-wait")


def test_queued_work_of_all_ranks_asks_for_no_more_ranks(tmp_path):
    some, complete = queued(tmp_path, 1), queued(tmp_path, 2)
    assert "Traces of all ranks" in some.advice and "all ranks" in some.snippet
    assert "all ranks" not in complete.advice + complete.snippet and "sync_events" in complete.snippet


ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def inference_with(collectives):
    """A product, then collectives (kernel, microseconds) with nothing beside them."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 90, 2)
    at = 100
    for number, (kernel, us) in enumerate(collectives):
        trace.kernel(kernel, at, us, 20 + 3 * number)
        at += us
    return trace


@pytest.mark.parametrize(
    ("collectives", "call"),
    [
        ([(ALL_GATHER, 100)] * 4 + [(REDUCE_SCATTER, 200)], "all_gather_into_tensor("),  # together longer
        ([(ALL_GATHER, 100), (REDUCE_SCATTER, 200)], "reduce_scatter_tensor("),
        ([(made.NCCL, 300)], "all_reduce("),
        ([("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 300)], "irecv("),
        ([("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300)], "broadcast("),
    ],
)
def test_inference_is_shown_the_collective_that_takes_most(tmp_path, collectives, call):
    run = run_of(tmp_path, inference_with(collectives))
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert call in finding.snippet


@pytest.mark.parametrize(("kernel", "narrower"), [(made.NCCL, False), (REDUCE_SCATTER, True)])
def test_inference_that_communicates_16_bits_is_not_advised_to(tmp_path, kernel, narrower):
    run = run_of(tmp_path, inference_with([(kernel, 300)]))
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert ("16-bit activations" in finding.advice) == narrower


@pytest.mark.parametrize(("before_us", "named"), [(90_000, True), (400, False)])
def test_data_that_is_loaded_before_the_first_kernel_of_a_trace_without_steps_counts(tmp_path, before_us, named):
    trace = Made()
    at = before_us + 5000  # what else happens before the first kernel is the start of the program
    for start, us in ((0, before_us), (at + 1, 3)):  # the second batch is that of the loop
        trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, us, 1)
    for number in range(2):
        trace.op("aten::mm", at + 5 + 500 * number, 8)
        trace.kernel(made.GEMM, at + 20 + 5000 * number, 5000, at + 6 + 500 * number)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("waits for data 90.0 ms before the first kernel of the profiled window" in sentence) == named
    assert "launches too late" not in sentence


@pytest.mark.parametrize(("us", "named"), [(20, True), (150, False)])
def test_long_kernels_are_not_what_short_gaps_are_between(tmp_path, us, named):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    for at in range(0, 4000, 250):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 240 - us, us, at + 230 - us)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert ("on average" in finding.title) == named


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
    ("names", "says"),
    [([made.GEMM] * 3, "no launches that would show why"), ([made.NCCL] * 3, "it holds collectives alone")],
)
def test_idle_time_without_launches_is_blamed_on_nobody(tmp_path, names, says):
    run = run_of(tmp_path, cut_out(names))
    assert says in first_sentence(run) and "host" not in first_sentence(run)
    assert "unexplained-idle" in {f.code for f in diagnose(run)}
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
    assert "the host waits meanwhile, in 4 synchronizations (aten::_coalesce)" in sentence


@pytest.mark.parametrize(
    ("ops", "apple"),
    [
        (("aten::linear", "aten::linear_backward"), True),
        (("aten::linear", "aten::_mps_convolution"), True),
        (("aten::_nested_tensor_from_mask", "aten::linear_backward"), False),
        (("aten::linear", "aten::mm"), False),
    ],
)
def test_apples_gpus_are_not_taken_for_the_cpu(tmp_path, ops, apple):
    trace = Made()
    for number, op in enumerate(ops):
        trace.op(op, 100 * number, 90)
    run = run_of(tmp_path, trace, "")
    assert first_sentence(run).startswith(
        "No device activity was recorded" if apple else "The trace contains no device"
    )
    assert ["Instruments" in f.advice for f in diagnose(run) if f.code == "device-not-recorded"] == [True] * apple


@pytest.mark.parametrize(("kernel", "us", "told"), [("gemvx", 900, True), ("gemvx", 90, False), ("gemmx", 900, False)])
def test_products_with_a_vector_that_take_nearly_all_time_are_told(tmp_path, kernel, us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(f"void {kernel}::kernel<int, int, __half, __half>", 10, us, 2)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith("Products of a matrix and a vector take 100 % of the kernel time") == told
