"""What is said of the parts of a trace that are in no window."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, products, run_of


@pytest.mark.parametrize(("starts", "says"), [(40_000, True), (1_200, False)])
def test_the_wait_for_work_from_before_the_trace_is_told(tmp_path, starts, says):
    """Copies from pageable memory wait for all of the stream; what it does is not in the trace."""
    trace = Made()
    trace.op("aten::to", 0, starts)
    trace.event("call", "cudaStreamSynchronize", 20, starts - 30, 1, correlation=77)
    trace.kernel(made.RELU, starts, 900, 5)
    trace.op("aten::mm", starts + 10, 8)
    trace.kernel(made.GEMM, starts + 910, 9_000, starts + 12)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith("Nothing that is looked for beside GEMM/conv would save")
    wait = "Left out are the 40.0 ms before (80.1 % of the trace), in which nothing launched in the trace runs"
    assert (wait in text and text.endswith(" The host waits in cudaStreamSynchronize.")) == says
    assert ("Left out" in text) == says


def test_recorded_work_from_before_the_trace_is_told_too(tmp_path):
    trace = Made()
    trace.event("kernel", made.GEMM, 0, 40_000, "stream 7", correlation=5, device=0, stream=7)
    trace.op("aten::mm", 39_900, 8)
    trace.kernel(made.GEMM, 40_000, 9_000, 39_901)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.endswith("Left out are the 40.0 ms before (81.6 % of the trace), in which the device does what was "
                         f"launched before the trace began, most of it {made.GEMM}.")  # fmt: skip


@pytest.mark.parametrize("with_host", [True, False])
def test_the_wait_after_work_from_before_the_trace_is_not_told_as_that_work(tmp_path, with_host):
    trace = Made()
    trace.event("kernel", made.GEMM, 0, 2_000, "stream 7", correlation=5, device=0, stream=7)
    if with_host:
        trace.op("aten::mm", 39_900, 8)
    trace.kernel(made.GEMM, 40_000, 9_000, 39_901)
    text = first_sentence(run_of(tmp_path, trace))
    assert "launched before the trace began" not in text
    if with_host:
        assert "38.0 ms of the trace (77.6 %) come before the first work that is launched in it" in text
    else:
        assert text == (
            "Largest possible saving: the GPU is idle for 38.0 ms before the first kernel of the profiled window "
            "because the host launches too late; what the host does then is unknown, for no operator was recorded (up "
            "to 38.0 ms per profiled window, all before the first kernel)."
        )


def test_a_device_that_starts_late_is_told_with_what_the_host_does(tmp_path):
    """The first call of a program sets the device up: most of the file, and so it comes first."""
    trace = Made()
    trace.op("aten::to", 0, 40_000)
    trace.op("aten::empty_strided", 10, 39_900)
    trace.op("aten::mm", 40_000, 8)
    trace.kernel(made.GEMM, 40_010, 9_000, 40_002)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith(
        "40.0 ms of the trace (81.6 %) come before the first device activity and are left out, 39.9 ms of them in "
        "aten::empty_strided. Nothing beside GEMM/conv"
    )


def test_a_trace_without_products_of_which_most_is_left_out_may_lack_the_model(tmp_path):
    trace = Made()
    for number in range(10):
        trace.op("aten::cumsum", 100 * number, 20)
        trace.kernel(f"{made.RELU}, {number}>", 100 * number + 10, 5, 100 * number + 2)  # none is launched again
    trace.op("aten::expand", 1_000, 9_000)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith("9.09 ms of the trace (90.8 %) come after the last kernel")
    assert "prof.step() and profile after a warm-up. No product of matrices runs: the model may not be in" in text


def test_what_the_host_does_after_the_last_kernel_is_told(tmp_path):
    trace = Made()
    trace.op("aten::mm", 0, 8)
    trace.kernel(made.GEMM, 10, 9_000, 2)
    trace.op("aten::expand", 9_020, 4_000)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.endswith(
        "4.01 ms of the trace (30.8 %) come after the last kernel and are left out, 4.00 ms of them in aten::expand."
    )


def test_the_first_iteration_of_a_trace_without_marked_steps_is_told(tmp_path):
    """Steps are those between the ends of the optimizer's; the first calls are in the iteration before them."""
    trace = Made()
    trace.event("call", "cudaStreamCreateWithPriority", 10, 90_000, 1, correlation=3)
    for number in range(4):
        at = 100_000 + 1000 * number
        trace.op("aten::mm", at, 8)
        trace.kernel(made.GEMM, at + 10, 900, at + 2)
        trace.event("mark", "Optimizer.step#SGD.step", at + 900, 50, 1)
    text = first_sentence(run_of(tmp_path, trace))
    assert "come before the first whole step, with the first iteration, and are left out" in text
    assert "90.0 ms of them in cudaStreamCreateWithPriority. " in text


def test_what_lies_around_marked_steps_is_the_users_choice(tmp_path):
    trace = products()
    trace.op("aten::randn", 1_000, 90_000)
    assert "left out" not in first_sentence(run_of(tmp_path, trace))


def test_loading_data_before_the_first_kernel_is_not_left_out(tmp_path):
    """It is a wait of the device, which data that is loaded ahead saves; the rest of the start is left out."""
    trace = Made()
    for start, us in ((0, 30_000), (50_009, 5_000)):
        trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, us, 1)
    trace.op("aten::empty_strided", 30_000, 20_000)
    trace.op("aten::mm", 50_000, 8)
    trace.kernel(made.GEMM, 50_010, 9_990, 50_002)
    text = first_sentence(run_of(tmp_path, trace))
    assert "20.0 ms of the trace (33.3 %) come before the first device activity" in text
    assert "waits for data 30.0 ms before the first kernel" in text


def test_time_before_the_first_device_activity_is_told_where_no_operator_was_recorded(tmp_path):
    """As in a trace of the device alone: a short call that is dropped shows when it began."""
    trace = Made()
    trace.event("call", "cudaStreamIsCapturing", 0, 5, 1, correlation=3)
    trace.kernel(made.GEMM, 60_010, 9_990, 60_000)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith(
        "60.0 ms of the trace (85.7 %) come before the first device activity and are left out; what the host does then "
        "is unknown, for no operator was recorded."
    )


def test_calls_of_one_name_before_the_window_count_together(tmp_path):
    trace = Made()
    for at, us in ((0, 15_000), (16_000, 24_000)):
        trace.event("call", "cudaFree", at, us, 1, correlation=3 + at)
    trace.op("aten::mm", 40_000, 8)
    trace.kernel(made.GEMM, 40_010, 9_990, 40_002)
    assert "are left out, 39.0 ms of them in cudaFree." in first_sentence(run_of(tmp_path, trace))


def test_modules_that_are_loaded_before_the_window_are_told_across_operators(tmp_path):
    """The profiler records them as its overhead; each lies in the call of an operator."""
    trace = Made()
    trace.op("aten::addmm", 0, 21_000)
    for at, us in ((1_000, 9_000), (30_000, 9_000)):
        trace.op("aten::relu", at, us)
        trace.event("call", "cudaLaunchKernel", at, us, 1, correlation=3 + at)
        trace.event("overhead", "Runtime Triggered Module Loading", at + 10, us - 20, 0)
    trace.op("aten::mm", 40_000, 8)
    trace.kernel(made.GEMM, 40_010, 9_990, 40_002)
    text = first_sentence(run_of(tmp_path, trace))
    assert "18.0 ms of them in Runtime Triggered Module Loading." in text


def test_the_only_batch_before_the_window_is_the_start_of_its_loader(tmp_path):
    """What follows it until the first operator is in none, and is told too."""
    trace = Made()
    trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 60_000, 1)
    trace.op("aten::mm", 99_990, 15)
    trace.kernel(made.GEMM, 100_010, 9_990, 100_000)
    run = run_of(tmp_path, trace)
    text = first_sentence(run)
    assert text.startswith(
        "The first batch of the loader's workers took 60.0 ms (54.5 % of the trace) and is left out: "
        "profile further ones."
    )
    assert "40.0 ms of the trace (36.4 %) come before the first device activity" in text
    assert text.endswith("40.0 ms of them in no operator.")
    assert [f for f in diagnose(run) if f.code == "waiting-for-data"] == []


@pytest.mark.parametrize(("later_us", "told"), [(500, True), (20_000, False)])
def test_a_first_batch_far_longer_than_later_ones_is_the_start_of_its_loader(tmp_path, later_us, told):
    trace = Made()
    trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 60_000, 1)
    for at in (60_100, 90_000):
        trace.op("aten::mm", at, 15)
        trace.kernel(made.GEMM, at + 20, 9_000, at + 5)
        if at < 90_000:
            trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 100, later_us, 1)
    # The last load finds that no batch is left.
    trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 90_100, 5_000, 1)
    run = run_of(tmp_path, trace)
    said = "took 60.0 ms (60.6 % of the trace) and is left out: later ones take 0.500 ms at most."
    assert (said in first_sentence(run)) == told
    assert ("waiting-for-data" in {f.code for f in diagnose(run)}) != told


@pytest.mark.parametrize(
    ("missing", "at", "says"),
    [
        (12, 2_000, "The last 12 of 32 launches have no kernel in the trace: the recording ended before"),
        (12, 1_000, "12 of 32 launches have no kernel in the trace, which the profiler dropped"),
        (1, 1_000, ""),
    ],
)
def test_launches_whose_kernels_are_not_recorded_are_counted(tmp_path, missing, at, says):
    trace = Made()
    for number in range(20):
        trace.kernel(made.GEMM, 100 * number + 10, 90, 100 * number)
    for number in range(missing):
        trace.event("call", "cudaLaunchKernel", at + 10 * number, 4, 1, correlation=7 + number)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith(says) and ("have no kernel" in text) == bool(says)


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        ("Activity Buffer Request", "39.0 ms of them in the profiler's own work"),
        ("Buffer Flush", "39.0 ms of them in the profiler's own work"),
        ("Lazy Function Loading", "39.0 ms of them in Lazy Function Loading"),
        ("Unrecognized", "40.0 ms of them in aten::mul_"),
    ],
)
def test_the_profilers_own_work_is_not_the_operators(tmp_path, name, blamed):
    """CUPTI gets its buffers in the first call of an operator."""
    trace = Made()
    trace.op("aten::mul_", 0, 40_010)
    trace.event("overhead", name, 500, 39_000, 0)
    trace.kernel(made.GEMM, 40_010, 9_000, 40_002)
    text = first_sentence(run_of(tmp_path, trace))
    assert f"40.0 ms of the trace (81.6 %) come before the first device activity and are left out, {blamed}." in text


@pytest.mark.parametrize(
    ("kernel_us", "operators", "nothing"), [(2, False, True), (2_000, False, False), (2, True, False)]
)
def test_a_trace_with_practically_no_work_and_no_operators_is_not_judged(tmp_path, kernel_us, operators, nothing):
    trace = Made()
    trace.event("call", "cudaStreamIsCapturing", 0, 5, 1, correlation=3)
    for at in (60_000, 80_000):
        if operators:
            trace.op("aten::mm", at - 5, 10)
        trace.kernel(made.GEMM, at + 10, kernel_us, at)
    text = first_sentence(run_of(tmp_path, trace))
    said = (
        "The trace holds practically no device activity, 0.00400 ms of 20.0 ms, and no operators, so there is nothing "
        "to judge: profile what the device works on, after a warm-up, and record ProfilerActivity.CPU too. 60.0 ms of "
        "the trace (75.0 %) come before the first device activity and are left out; what the host does then is unknown"
    )
    assert text.startswith(said) == nothing and ("Largest possible saving" in text) != nothing


def test_a_device_that_is_busy_in_its_window_is_not_said_to_do_little(tmp_path):
    trace = Made()
    for number in range(20):
        trace.op("aten::cumsum", 100 * number, 20)
        trace.kernel(made.RELU, 100 * number + 10, 85, 100 * number + 2)
    trace.op("aten::expand", 2_000, 3_000)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith("3.00 ms of the trace") and "little device activity" not in text


def test_work_of_before_marked_steps_is_told_if_it_is_much_of_the_trace(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 5_000, 1)
    trace.event("kernel", made.RELU, 10, 9_000, "stream 7", correlation=5, device=0, stream=7)
    trace.events[-1]["pid"] = 0
    for at in (100, 200, 300):
        trace.op("aten::mm", at, 8)
        trace.kernel(made.GEMM, 9_010 + 30 * at, 2_990, at + 2)
    assert "Left out are the" in (text := first_sentence(run_of(tmp_path, trace)))
    assert "what was launched before the trace began, most of it vectorized_elementwise_kernel" in text
