"""What is said of the time in which the host launches too late: each millisecond once, and what no event shows."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, run_of


def late_launch(*, inside=True, outside_us=0):
    """Two kernels; between them a launch of 9 ms, within `aten::conv1d` or mostly not, and time in no operator."""
    trace = Made()
    trace.op("aten::mm", 0, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    at = 320 + outside_us
    if inside:
        trace.op("aten::conv1d", at, 9_010)
    trace.event("call", "cudaLaunchKernel", at + 2, 9_000, 1, correlation=5)
    trace.op("aten::conv1d", at + 9_020, 20)
    trace.kernel(made.GEMM, at + 9_040, 300, at + 9_030)
    return trace


def test_a_long_launch_and_its_operator_are_one_time(tmp_path):
    text = first_sentence(run_of(tmp_path, late_launch()))
    assert "9.00 ms of it launching or loading kernels (cudaLaunchKernel) in aten::conv1d (up to" in text


def test_time_in_no_operator_is_told_beside_it(tmp_path):
    text = first_sentence(run_of(tmp_path, late_launch(outside_us=4_000)))
    assert "in aten::conv1d, 4.02 ms of it in no operator, between aten::mm and aten::conv1d (up to" in text


def test_what_an_operator_does_beside_the_calls_is_another_time(tmp_path):
    trace = late_launch()
    trace.op("aten::sort", 325 + 9_040 + 320, 3_000)
    trace.op("aten::mm", 325 + 9_040 + 3_330, 8)
    trace.kernel(made.GEMM, 325 + 9_040 + 3_340, 300, 325 + 9_040 + 3_332)
    text = first_sentence(run_of(tmp_path, trace))
    assert "in aten::conv1d, 3.00 ms beside these calls in aten::sort (up to" in text


def test_an_operator_within_and_beside_the_calls_is_told_with_its_time_beside_them(tmp_path):
    trace = late_launch()
    trace.op("aten::conv1d", 9_900, 7_000)
    trace.op("aten::relu", 17_000, 2_010)
    trace.event("call", "cudaLaunchKernel", 17_005, 2_000, 1, correlation=6)
    trace.op("aten::mm", 19_090, 8)
    trace.kernel(made.GEMM, 19_100, 300, 19_092)
    text = first_sentence(run_of(tmp_path, trace))
    assert (
        "11.0 ms of it launching or loading kernels (cudaLaunchKernel), most in aten::conv1d, "
        "7.03 ms beside these calls in aten::conv1d (up to" in text
    )


def test_all_calls_of_a_start_count_where_several_kinds_matter(tmp_path):
    trace = Made()
    trace.op("aten::mm", 0, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    for name, at, us in (
        ("cudaLaunchKernel", 400, 50_000),
        ("cudaFree", 51_000, 30_000),
        ("cudaStreamCreateWithFlags", 82_000, 5_000),
    ):
        trace.event("call", name, at, us, 1, correlation=at)
    trace.op("aten::mm", 88_000, 8)
    trace.kernel(made.GEMM, 88_010, 300, 88_002)
    text = first_sentence(run_of(tmp_path, trace))
    assert "85.0 ms of it setting up the device (cudaLaunchKernel, cudaFree, cudaStreamCreateWithFlags)" in text


def without_operators():
    trace = Made()
    for at in (0, 5_000, 10_000):
        trace.kernel(made.GEMM, at + 10, 300, at)
    return trace


def test_a_trace_without_operators_is_told_to_record_them(tmp_path):
    (finding,) = [f for f in diagnose(run_of(tmp_path, without_operators())) if f.code == "host-bound"]
    assert "no operator was recorded" in finding.advice and "ProfilerActivity.CPU" in finding.snippet
    assert "preprocessing" not in finding.advice


@pytest.mark.parametrize("trains", [False, True])
def test_code_for_a_trace_without_training_calls_the_model_alone(tmp_path, trains):
    trace = late_launch()
    if trains:
        trace.op("MmBackward0", 9_360, 4, 2)
        trace.kernel(made.GEMM, 9_700, 300, 9_361, 2)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-bound"]
    assert ("train_step(batch)" in finding.snippet, "model(batch)" in finding.snippet) == (trains, not trains)


@pytest.mark.parametrize("trains", [False, True])
def test_a_trace_without_kernels_is_recorded_again_as_it_was(tmp_path, trains):
    trace = Made()
    trace.op("aten::cudnn_convolution", 0, 100)
    if trains:
        trace.op("autograd::engine::evaluate_function: ReluBackward0", 200, 20, 2)
        trace.op("aten::threshold_backward", 202, 10, 2)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "device-not-recorded"]
    assert ("train_step(batch)" in finding.snippet) == trains
    assert finding.evidence() == ["cuda", "1 operator of a GPU without kernels"]


@pytest.mark.parametrize(("gap_us", "severity"), [(0, "warning"), (60_000, "info")])
def test_little_time_off_tensor_cores_is_no_warning(tmp_path, gap_us, severity):
    trace = Made()
    for at, kernel in ((0, made.GEMM), (500, "void gemmSN_NN_kernel<float, 128, 2, 4, 8, __half>"), (900 + gap_us, "")):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(kernel or made.GEMM, at + 10, 390, at + 2)
    run = run_of(tmp_path, trace)
    (finding,) = [f for f in diagnose(run) if f.code == "kernels-off-tensor-cores"]
    assert finding.severity == severity


def test_a_gap_ends_with_work_whose_length_is_rounded_to_zero(tmp_path):
    """The host stays 4 ms in the launch of a graph that begins as it returns, after work of less than a microsecond."""
    trace = Made()
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.kernel(made.RELU, 330, 0, 322)
    trace.event("call", "cudaGraphLaunch", 340, 4_000, 1, correlation=5)
    trace.event("kernel", made.GEMM, 4_341, 900, "stream 7", correlation=5, device=0, stream=7)
    trace.event("call", "cudaDeviceSynchronize", 4_350, 900, 1, correlation=6)
    text = first_sentence(run_of(tmp_path, trace))
    assert "because the host launches too late, 4.00 ms of it building or launching graphs (cudaGraphLaunch)" in text
    assert "nothing in the trace shows" not in text


@pytest.mark.parametrize(("last_us", "told"), [(9_000, True), (1_200, False)])
def test_one_step_that_takes_most_of_the_time_is_told_first(tmp_path, last_us, told):
    trace = Made()
    for number, at in enumerate((0, 1_000, 2_000, 3_000)):
        us = last_us if number == 3 else 1_000
        trace.event("mark", f"ProfilerStep#{number}", at, us - 5, 1)
        trace.kernel(made.GEMM, at + 10, us - 10, at + 2)
    text = first_sentence(run_of(tmp_path, trace))
    alone = (
        "Step 3 takes 9.00 ms, the median step 1.00 ms: 66.7 % of the time is what it takes beyond that. Figures per"
    )
    assert text.startswith(alone) == told
    assert ("Figures per step are means" in text) == told


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (0, "the first step often sets things up, so profile after a warm-up"),
        (6, "it is the first one recorded, and a profiler may slow that"),
    ],
)
def test_a_first_step_that_takes_most_of_the_time_sets_things_up_unless_others_came_before(tmp_path, first, why):
    trace, at = Made(), 0
    for number, us in enumerate((9_000, 1_000, 1_000, 1_000), first):
        trace.event("mark", f"ProfilerStep#{number}", at, us - 5, 1)
        trace.kernel(made.GEMM, at + 10, us - 20, at + 2)
        at += us
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith(f"Step {first} takes 8.99 ms, the median step 0.995 ms: ")
    assert f"beyond that; {why}. Figures" in text


@pytest.mark.parametrize(
    ("long", "told"),
    [
        (
            (2, 5, 8),
            "Steps 2, 5 and 8, every 3 steps, take 5.00 ms, the median step 0.995 ms: 54.7 % of the time is what they",
        ),
        (
            (1, 5, 6),
            "Steps 1, 5 and 6 take 5.00 ms, the median step 0.995 ms: 54.7 % of the time is what they take beyond",
        ),
        (
            (4, 7),
            "Steps 4 and 7 take 5.00 ms, the median step 0.995 ms: 44.6 % of the time is what they take beyond that.",
        ),
    ],
)
def test_a_few_long_steps_are_told_first_with_how_regular_they_are(tmp_path, long, told):
    trace, at = Made(), 0
    for number in range(10):
        us = 5_000 if number in long else 1_000
        trace.event("mark", f"ProfilerStep#{number}", at, us - 5, 1)
        trace.kernel(made.GEMM, at + 10, us - 20, at + 2)
        at += us
    assert first_sentence(run_of(tmp_path, trace)).startswith(told)


def test_steps_of_which_many_differ_are_told_by_the_farthest(tmp_path):
    trace, at = Made(), 0
    for number, us in enumerate((1_000, 1_000, 1_000, 2_500, 1_000, 400)):
        trace.event("mark", f"ProfilerStep#{number}", at, us - 5, 1)
        trace.kernel(made.GEMM, at + 10, us - 20, at + 2)  # no step waits for its host
        at += us
    text = first_sentence(run_of(tmp_path, trace))
    assert (
        "The steps differ: step 5 takes 0.395 ms, the median 0.995 ms, and 1 more step is far from it; figures per"
        in text
    )


@pytest.mark.parametrize(("captures", "told"), [(3, True), (1, False)])
def test_graphs_that_are_captured_anew_are_told(tmp_path, captures, told):
    trace = Made()
    at = 0
    for number in range(5):
        captured = number < captures
        us = 20_000 if captured else 1_000
        trace.op("Torch-Compiled Region: 0/0", at, us)
        if captured:
            trace.event("call", "cudaStreamBeginCapture", at + 100, 5, 1, correlation=1)
            trace.event("call", "cudaStreamEndCapture", at + 200, 5, 1, correlation=2)
        trace.kernel(made.GEMM, at + us - 500, 400, at + us - 510)
        at += us + 10
    run = run_of(tmp_path, trace)
    text = first_sentence(run)
    assert (
        "captured anew in 3 of 5 calls of compiled code, which take 60.0 ms, and the others 1.00 ms" in text
    ) == told
    (finding,) = [f for f in diagnose(run) if f.code == "host-bound"]
    assert ("mark the begin of each step" in finding.advice) == told


@pytest.mark.parametrize(("backward_us", "place"), [(4_000, "compiled code"), (300, "Torch-Compiled Region: 0/1")])
def test_compiled_code_of_forward_and_backward_is_one_place_with_the_kernel_it_launches_late(
    tmp_path, backward_us, place
):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    trace.op("Torch-Compiled Region: 0/1", 0, 10_000)
    for at, late in ((0, made.GEMM), (4_000, made.SIMT), (8_000, made.GEMM)):
        trace.kernel(made.RELU, at + 5, 100, at + 1)
        trace.kernel(late, at + 3_500, 300, at + 3_400)
    trace.op("CompiledFunctionBackward", 12_000, backward_us)
    trace.kernel(made.RELU, 12_100, 100, 12_010)
    trace.kernel(made.GEMM, 12_000 + backward_us + 100, 300, 12_000 + backward_us - 10)
    run = run_of(tmp_path, trace)
    (finding,) = [f for f in diagnose(run) if f.code == "host-bound"]
    assert finding.where == place and 'mode="reduce-overhead"' in finding.snippet
    assert f"of it in {place}, " in finding.title and f" ms of it before {made.GEMM}" in finding.title


@pytest.mark.parametrize("last_us", [8, 3_000])
def test_idle_time_in_the_first_call_of_an_operator_is_told_as_that(tmp_path, last_us):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    for number, us in enumerate((8_000, 8, 8, last_us)):
        trace.op("aten::linalg_qr", 400 + 3_000 * number + (6_000 if number else 0), us)
    trace.op("aten::mm", 19_490, 8)
    trace.kernel(made.GEMM, 19_500, 400, 19_492)
    text = first_sentence(run_of(tmp_path, trace))
    first = "8.02 ms of it in aten::linalg_qr (nearly all in its first call)"
    assert (first in text) == (last_us == 8) and "in aten::linalg_qr" in text


@pytest.mark.parametrize(("longer_us", "told"), [(0, False), (5000, True)])
def test_a_first_step_that_begins_on_the_host_ahead_of_the_device_is_no_longer_one(tmp_path, longer_us, told):
    """Its work ends during the next step of the host, as that of all steps does."""
    trace = Made()
    for n in range(4):
        trace.event("mark", f"ProfilerStep#{3 + n}", 1000 * n, 990, 1)
        trace.op("aten::normal_", 1000 * n, 880)
        trace.op("aten::mm", 1000 * n + 885, 8)
        begins = 1000 * n + 900 + (longer_us if n else 0)
        trace.kernel(made.GEMM, begins, 990 + (0 if n else longer_us), 1000 * n + 890)
    assert ("Step 3 takes 6.89 ms" in first_sentence(run_of(tmp_path, trace))) == told


@pytest.mark.parametrize("us", [600, 100])
def test_a_device_that_waits_while_torch_compile_compiles_is_told_so(tmp_path, us):
    """The ranges of a compilation are nested, and it calls operators and the runtime itself."""
    trace = Made()
    trace.kernel(made.GEMM, 10, 5, 2)
    trace.event("mark", "_compile.compile_inner (dynamo_timed)", 20, us, 1)
    trace.event("mark", "pad_mm_benchmark (dynamo_timed)", 40, us - 30, 1)
    trace.op("aten::mm", 50, us - 50)
    trace.event("call", "cudaFuncGetAttributes", 52, us - 60, 1)
    trace.op("aten::addmm", 720, 250)
    trace.kernel(made.GEMM, 980, 5, 960)
    run = run_of(tmp_path, trace)
    told = "ms of it compiling code (torch.compile)" in first_sentence(run)
    (finding,) = [f for f in diagnose(run) if f.code in ("host-bound", "launch-bound")]
    assert told == ("torch.compile compiles" in finding.advice) == (us == 600)


@pytest.mark.parametrize(("queued_us", "told"), [(200, True), (20, False)])
def test_idle_time_of_several_causes_is_told_in_all(tmp_path, queued_us, told):
    """The second kernel is launched late, the third with it, and starts late."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 0, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 190, 2)
    trace.op("aten::mm", 490, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 500, 100, 492)
    trace.kernel(made.GEMM, 600 + queued_us, 400 - queued_us, 494)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "the GPU is idle for 31 % of the step because the host launches too late" in sentence
    assert ("In all, the GPU is idle for 51 % of the step." in sentence) == told


def of_a_late_start():
    """The second kernel is launched with the first and starts late, the third is launched late in any case."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 0, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 190, 2)
    trace.kernel(made.GEMM, 400, 200, 4)
    trace.op("aten::mm", 890, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 900, 100, 892)
    return trace


def test_a_kernel_that_starts_late_before_a_late_launch_delays_nothing(tmp_path):
    run = run_of(tmp_path, of_a_late_start())
    sentence = first_sentence(run)
    assert "the GPU is idle for 31 % of the step because the host launches too late" in sentence
    assert "In all, the GPU is idle for 51 % of the step." in sentence
    assert not [f for f in diagnose(run) if f.code == "kernel-wait"]


def test_a_kernel_that_starts_late_before_the_host_waits_for_it_delays_what_is_launched_then(tmp_path):
    trace = of_a_late_start()
    trace.event("call", "cudaDeviceSynchronize", 10, 595, 1, correlation=99)
    assert [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "kernel-wait"]


@pytest.mark.parametrize(("ahead", "told"), [(False, True), (True, False)])
def test_shorter_kernels_of_a_host_that_launches_just_in_time_come_once_it_no_longer_does(tmp_path, ahead, told):
    """Products of 75 us, each launched 10 us before it starts, or all of them before the first."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for number in range(10):
        launched = 2 * number if ahead else 100 * number
        trace.op("aten::mm", launched, 2, **{"Input type": ["float"] * 2})
        trace.kernel(made.SIMT, 100 * number + 22, 75, launched + 1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "fp32-products"]
    assert ("once the device no longer waits" in finding.title) == told


@pytest.mark.parametrize(
    ("calls", "longest_us", "communicates", "says", "refuted"),
    [
        (12, 3_000, True, "broadcast_buffers=False", "setting up a library"),
        (12, 3_000, False, "in many operators meanwhile", "broadcast_buffers"),
        (2, 8_000, True, "setting up a library", "in many operators meanwhile"),
    ],
)
def test_a_host_that_is_slow_in_every_operator_is_told_apart_from_one_that_does_something_else(
    tmp_path, calls, longest_us, communicates, says, refuted
):
    trace = Made()
    for step in range(3):
        begins = 20_000 * step
        trace.event("mark", f"ProfilerStep#{step}", begins, 20_000, 1)
        trace.op("aten::unflatten_dense_tensors", begins, longest_us)
        at = begins + longest_us
        for call in range(calls):
            us = (20_000 - longest_us) // calls
            trace.op(f"aten::op{call}", at, us - 5)
            trace.kernel(made.RELU, at + us - 4, 3, at + us - 8)
            at += us
        if communicates:
            trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", at - 1, 1, at - 9)
    (finding,) = (f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-bound")
    assert says in finding.advice and refuted not in finding.advice


@pytest.mark.parametrize(("longest_us", "told"), [(4_000, True), (1_000, False)])
def test_one_gap_that_holds_most_of_the_idle_time_is_told_where_nothing_else_is(tmp_path, longest_us, told):
    trace = Made()
    at = 0
    for number in range(6):
        at += longest_us if number == 3 else 1_000
        trace.kernel(made.GEMM, at, 200, at - 10)
        at += 200
    assert ("4.00 ms of it in one gap; what the host does" in first_sentence(run_of(tmp_path, trace))) == told
