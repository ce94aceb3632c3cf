"""What is said of traces without kernels: those of a CPU, and of devices that were not recorded."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces.made import Made, run_of, write


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

    assert "on the CPU, loading data takes 50.0 % of the time (0.500 ms); aten::addmm" in sentence("data", 500, 0)
    assert (
        "take 20.0 %: torch.compile, from PyTorch 2.0 on (on Windows 2.5), fuses those that follow "
        "one another. Loading data takes 16.7 % of the time. The" in sentence("little", 100, 0)
    )
    of_python = sentence("python", 100, 900)
    assert "no operator runs for 60.0 % of the 1.50 ms, beside loading data, but Python or" in of_python


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        ("data_loading", True),
        ("## Load Batch ##", True),
        ("dataloader", True),
        ("get_batch", True),
        ("data", True),
        ("batch", False),  # a pass over one
        ("data_parallel_forward", False),
        ("database", False),
    ],
)
def test_ranges_in_which_a_program_loads_its_data_are_loading(tmp_path, name, loads):
    trace = Made()
    for number in range(4):
        at = 1000 * number
        trace.event("mark", name, at, 700, 1)
        trace.event("mark", "compute", at + 700, 300, 1)
        trace.op("aten::addmm", at + 700, 290)
    told = first_sentence(run_of(tmp_path, trace))
    assert ("loading data takes 70.0 % of the time" in told) == loads
    assert "data_loading takes" not in told
    assert any(f.code == "waiting-for-data" for f in diagnose(run_of(tmp_path / "again", trace))) == loads


@pytest.mark.parametrize(("drawn_us", "in_operators"), [(600, True), (100, False)])
def test_loading_in_operators_is_told_apart_from_waiting(tmp_path, drawn_us, in_operators):
    trace = Made()
    for number in range(4):
        at = 1000 * number
        trace.event("mark", "data_loading", at, 700, 1)
        trace.op("aten::normal_", at, drawn_us)
        trace.event("mark", "compute", at + 700, 300, 1)
        trace.op("aten::addmm", at + 700, 300)
    run = run_of(tmp_path, trace)
    assert (", 85.7 % of it in operators, most in aten::normal_" in first_sentence(run)) == in_operators
    (finding,) = [f for f in diagnose(run) if f.code == "waiting-for-data"]
    assert ("Do less work per sample" in finding.advice) != in_operators


@pytest.mark.parametrize(("loading_us", "first"), [(700, True), (400, False)])
def test_loading_that_takes_most_of_the_host_comes_before_what_the_trace_lacks(tmp_path, loading_us, first):
    trace = Made()
    trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, loading_us, 1)
    trace.op("aten::addmm", loading_us, 1000 - loading_us)
    trace.event("call", "cudaLaunchKernel", 990, 5, 1, correlation=7)
    run = run_of(tmp_path, trace)
    told = first_sentence(run)
    assert (
        told.startswith("Loading data takes 70.0 % of the host's time (0.700 ms), in the loop's own process.") == first
    )
    assert "No device activity was recorded" in told
    found = [f.code for f in diagnose(run)]
    assert ("waiting-for-data" in found) == first and "device-not-recorded" in found


@pytest.mark.parametrize(("idle_us", "told"), [(0, True), (9000, False)])
def test_nothing_is_advised_on_operators_that_take_little_of_all_time(tmp_path, idle_us, told):
    """Elementwise operators take 30 % of the operators' time, and with a pause before them 3 % of all."""
    trace = Made()
    trace.op("aten::addmm", 0, 700)
    for number, name in enumerate(("aten::relu", "aten::mul", "aten::add")):
        trace.op(name, 700 + idle_us + 100 * number, 100)
    assert ("torch.compile, from PyTorch 2.0 on" in first_sentence(run_of(tmp_path, trace))) == told


def test_an_optimizer_that_takes_more_than_any_operator_is_named_first(tmp_path):
    trace = Made()
    trace.op("aten::addmm", 0, 300)
    trace.event("mark", "Optimizer.step#Adam.step", 300, 500, 1)
    for number in range(10):
        trace.op(("aten::mul", "aten::add", "aten::sqrt", "aten::div", "aten::lerp")[number % 5], 300 + 50 * number, 50)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "the optimizer takes 62.5 % of the time (0.500 ms), in 10.0 operators: fused=True" in sentence
    assert "aten::addmm takes 37.5 % of the operators' time (" in sentence


def test_products_of_several_operators_are_added_up(tmp_path):
    trace = Made()
    for number, name in enumerate(("aten::mm", "aten::addmm", "aten::bmm")):
        trace.op(name, 200 * number, 200 - 20 * number)
    trace.op("aten::relu", 600, 60)
    assert (
        "aten::mm takes 33.3 % of the operators' time (0.200 ms), and all matrix products take 90.0 %."
        in first_sentence(run_of(tmp_path, trace))
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
    run = run_of(tmp_path, trace)
    assert (
        run.steps.empty
        and "loading data takes 59.4 % of the time (0.600 ms), 66.7 % of it in operators" in first_sentence(run)
    )


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
    assert sentence("data", lambda t: t.event("mark", loading, 0, 400, 1)) == "loading data takes 40.0 % of the time."
    assert sentence("calls", calls) == (
        "the most time, 60.0 %, goes to calls into the device's runtime (cudaFree, cudaMalloc)."
    )
    steps = "the optimizer's steps take 40.0 % of the time."
    assert sentence("optimizer", lambda t: t.event("mark", "Optimizer.step#AdamW.step", 0, 400, 1)) == steps
    assert sentence("op", lambda t: t.op("aten::zeros", 0, 700)) == (
        "aten::zeros takes 70.0 % of the time: launching, waiting for the device, or its first call."
    )
    assert sentence("nothing", lambda t: t.op("aten::zeros", 0, 300)) == (
        "neither an operator nor a call of the runtime runs for 60.0 % of the time: Python or other code does."
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
    assert first_sentence(run).endswith("aten::cudnn_convolution takes 94.7 % of their time on the device.")
    (finding,) = [f for f in diagnose(run) if f.code == "device-not-recorded"]
    assert finding.value == 2  # the operators with a time, each once


def test_allocations_are_part_of_the_operators_time(tmp_path):
    trace = Made()
    trace.op("aten::normal_", 0, 600)
    trace.op("aten::empty_strided", 600, 400)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "aten::normal_ takes 60.0 % of the operators' time" in sentence
    assert "or on the device that takes them (device=...)." in sentence


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


@pytest.mark.parametrize(
    ("ops", "apple"),
    [
        (("aten::linear", "aten::linear_backward", "aten::linear_backward"), True),
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
    found = [f for f in diagnose(run) if f.code == "device-not-recorded"]
    assert ["Instruments" in f.advice for f in found] == [True] * apple
    assert all(f.value == sum("linear_backward" in op or "mps" in op for op in ops) for f in found)


@pytest.mark.parametrize(("us", "named"), [(500, True), (100, False)])
def test_the_python_function_that_keeps_operators_from_running_is_named(tmp_path, us, named):
    """A function counts without those that it calls."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.event("python_function", "train.py(3): step", 0, 990, 1)
    trace.event("python_function", "train.py(9): collate", 10, 990 - us, 1) if not named else None
    trace.op("aten::mm", 900, 80)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "no operator runs for" in sentence
    assert ("of it in train.py(3): step" in sentence) == named
    assert ("of it in train.py(9): collate" in sentence) != named


@pytest.mark.parametrize(("op", "missing"), [("aten::cudnn_is_acceptable", False), ("aten::_cudnn_rnn", True)])
def test_asking_for_cudnn_is_no_use_of_a_gpu(tmp_path, op, missing):
    """A recurrent layer of a CPU asks too."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op(op, 10, 5)
    trace.op("aten::mm", 100, 800)
    run = run_of(tmp_path, trace)
    assert ("device-not-recorded" in {f.code for f in diagnose(run)}) == missing


@pytest.mark.parametrize(("us", "told"), [(500, True), (100, False)])
def test_compiling_is_told_as_one_cause(tmp_path, us, told):
    """The ranges of a compilation are nested; each counts without those within it."""
    trace = Made()
    trace.op("_compile.compile_inner (dynamo_timed)", 0, us)
    trace.op("async_compile.wait (dynamo_timed)", 10, us / 2)
    trace.op("aten::mm", us + 10, 300)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("torch.compile compiles for 61.7 % of the time: profile after a warm-up." in sentence) == told
    assert ("aten::mm takes 75.0 %" in sentence) != told


@pytest.mark.parametrize("steps", [0, 2])
def test_a_marked_optimizer_takes_the_python_between_its_operators_too(tmp_path, steps):
    trace = Made()
    for at in (0, 1000):
        if steps:
            trace.event("mark", f"ProfilerStep#{at // 1000 + 3}", at, 1000, 1)
        trace.op("aten::addmm", at, 200)
        trace.event("mark", "Optimizer.step#Adam.step", at + 300, 600, 1)
        for number in range(10):
            trace.op(f"aten::{('mul', 'add', 'sqrt', 'div', 'lerp')[number % 5]}", at + 300 + 60 * number, 15)
        trace.op("aten::zero_", at + 950, 50)
    sentence = first_sentence(run_of(tmp_path, trace))
    each = "(0.600 ms per step), in 10.0 operators per step" if steps else "(1.20 ms), in 20.0 operators"
    assert f"the optimizer takes 60.0 % of the time {each}" in sentence


def warming_up(name="aten::cudnn_convolution", first_us=9_000, sizes=(), calls=20):
    """Calls of an operator for 10 µs each; the first one takes longer."""
    trace, at = Made(), 0
    for number in range(calls):
        args = {"Input Dims": [sizes[min(number, len(sizes) - 1)]]} if sizes else {}
        us = first_us if number == 0 else 10
        trace.op(name, at, us, **args)
        at += us + 5
    return trace


FIRST = ", 9.00 ms of it in its first call: profile after a warm-up."


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ({}, True),
        ({"first_us": 400}, False),  # a clock that is still low
        ({"first_us": 1_000, "calls": 24}, True),
        ({"sizes": [[8, 8]]}, True),
        ({"sizes": [[800, 8], [8, 8]]}, True),  # to launch on more takes no longer
        ({"sizes": [[8000, 800], [8, 8]]}, False),  # which may be on the host
        ({"calls": 2}, True),
    ],
)
def test_an_operator_whose_first_call_takes_nearly_all_of_its_time_is_told_so(tmp_path, case, told):
    sentence = first_sentence(run_of(tmp_path, warming_up(**case)))
    assert "On the host, aten::cudnn_convolution takes" in sentence
    first = f", {case.get('first_us', 9_000) / 1_000:.2f} ms of it in its first call: profile after a warm-up."
    assert sentence.endswith(first) == told and ("or its first call." in sentence) != told


def test_the_first_call_of_compiled_code_is_told_without_sizes_and_needs_an_accelerator(tmp_path):
    """As torch.autograd's older export has it: the launches of Triton's kernels are ranges of the host."""
    trace, at = Made(), 0
    for number in range(20):
        us = 7_500 if number == 0 else 90
        trace.op("Torch-Compiled Region", at, us)
        trace.op("aten::clone", at + 10, us // 4)  # counts with the call, in the share and in its length
        trace.op("triton_poi_fused_flip_0", at + us - 30, 24)
        at += us + 5
    run = run_of(tmp_path, trace, "")
    assert first_sentence(run).startswith("No device activity was recorded")
    assert first_sentence(run).endswith(" 7.50 ms of it in its first call: profile after a warm-up.")


def test_first_calls_of_other_operators_are_told_with_the_longest(tmp_path):
    trace = warming_up()
    for number in range(4):
        trace.op("aten::bmm", 10_000 + 5_000 * number, 4_000 if number == 0 else 8)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.endswith(
        ", 9.00 ms of it in its first call; the first call of aten::bmm takes 4.00 ms: profile after a warm-up."
    )


@pytest.mark.parametrize(
    ("second_us", "told"), [(3_000, "in its first 2 calls"), (300, "of it in its first call: profile")]
)
def test_two_first_calls_may_take_nearly_all_of_the_time(tmp_path, second_us, told):
    trace, at = Made(), 0
    for number in range(12):
        us = (9_000, second_us)[number] if number < 2 else 10 if second_us > 300 else 200
        trace.op("aten::cudnn_convolution", at, us)
        at += us + 5
    assert told in first_sentence(run_of(tmp_path, trace))


def test_a_trace_of_communication_alone_is_told_as_that(tmp_path):
    trace = Made()
    trace.op("gloo:send", 0, 4_280)
    trace.op("gloo:recv", 10, 3_200)
    trace.op("aten::slice", 4_300, 20)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "gloo:recv takes 74.4 % of the operators' time (3.20 ms), and all communication takes 99.5 %." in sentence
    assert sentence.endswith("99.5 %.")  # and no word of the machine's GPU, whose tensors this backend does not take


@pytest.mark.parametrize(("sizes", "told"), [([[8, 8]], True), ([[800, 8], [8, 8]], False), ((), False)])
def test_a_first_call_on_a_cpu_is_told_if_later_ones_have_its_size(tmp_path, sizes, told):
    sentence = first_sentence(run_of(tmp_path, warming_up("aten::gelu", sizes=sizes), ""))
    assert "on the CPU, aten::gelu takes 100 % of the operators' time" in sentence
    assert (FIRST in sentence) == told


@pytest.mark.parametrize("work", ["aten::mm", "aten::cudnn_convolution"])
def test_a_range_that_is_recorded_as_an_operator_is_no_operator(tmp_path, work):
    """As some versions record a `record_function` of the program: 70 % of its time are in none of its operators."""
    trace = Made()
    trace.op("model_inference", 0, 10_000)
    for number in range(20):
        trace.op(work, 100 + 400 * number, 150)
    assert "Python or other code in model_inference, outside of operators, takes 70.0 %" in first_sentence(
        run_of(tmp_path, trace)
    )


@pytest.mark.parametrize(("op", "says"), [("aten::mkldnn_convolution", "is not used"), ("aten::mm", "record its")])
def test_a_gpu_beside_operators_of_the_cpu_is_said_to_be_unused(tmp_path, op, says):
    trace = Made()
    trace.op(op, 0, 1_000)
    assert says in first_sentence(run_of(tmp_path, trace))


@pytest.mark.parametrize(("counts", "told"), [(13, True), (3, False)])
def test_one_call_with_nearly_all_of_the_time_is_told(tmp_path, counts, told):
    trace = Made()
    for number in range(counts):
        trace.op("aten::reshape", 1_000 * number, 600 if number == 2 else 3)
    assert ("nearly all of it in one of its 13 calls" in first_sentence(run_of(tmp_path, trace))) == told


def test_what_a_range_takes_beside_its_operators_is_none_of_theirs(tmp_path):
    trace = Made()
    trace.op("model_inference", 0, 1_000)
    trace.op("aten::mkldnn_convolution", 50, 600)
    trace.op("aten::relu", 700, 200)
    assert "aten::mkldnn_convolution takes 75.0 % of the operators' time" in first_sentence(run_of(tmp_path, trace))


def test_times_of_several_ranks_are_means(tmp_path):
    files = []
    for rank in range(2):
        trace = Made()
        trace.op("aten::mkldnn_convolution", 0, 600 + 200 * rank)
        trace.op("aten::relu", 900, 100)
        head = {"distributedInfo": {"rank": rank, "world_size": 2}}
        files.append(write(tmp_path / f"r{rank}.json", trace.document(**head)))
    sentence = first_sentence(load_run(import_traces(files, tmp_path / "run")))
    assert "aten::mkldnn_convolution takes 87.5 % of the operators' time (0.700 ms)" in sentence


@pytest.mark.parametrize(("ranges", "says"), [(2, "profiler_metrics"), (0, "NVreg_RestrictProfilingToAdminUsers")])
def test_metrics_instead_of_kernels_are_no_missing_permission(tmp_path, ranges, says):
    trace = Made()
    for number in range(2):
        trace.op("aten::mm", 100 * number, 50)
        trace.event("call", "cudaLaunchKernel", 100 * number + 10, 5, 1, correlation=number + 1)
        if number < ranges:
            trace.event("cuda_profiler_range", "volta_sgemm", 100 * number + 20, 30, 1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "device-not-recorded"]
    assert says in finding.advice


@pytest.mark.parametrize(("gaps", "says"), [((9_000,), "one gap"), ((3_000, 3_000, 3_000), "Record Python's stacks")])
def test_time_outside_operators_in_one_gap_is_told_to_be_set_up(tmp_path, gaps, says):
    trace, at = Made(), 0.0
    for gap in (*gaps, 0):
        trace.op("aten::mm", at, 900)
        at += 900 + gap
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "python-outside-operators"]
    assert says in finding.advice and (("of it in one gap" in finding.title) == (len(gaps) == 1))
