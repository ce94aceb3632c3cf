"""What an audit of public traces refuted about the host: its waits, idle time at the start of steps, what holds the
device's gaps, and what lies outside of the window."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, run_of

H100 = ("NVIDIA H100 80GB HBM3", (9, 0))


def finding_of(run, code):
    return next((f for f in diagnose(run) if f.code == code), None)


def products(trace, at, count, launched, every, each_us, on_device):
    """So many products, launched one by one from `launched` on; they take `each_us` from `on_device` on, or when they
    are launched. The end of the last."""
    for number in range(count):
        called = launched + number * every
        begins = max(on_device, called + 4)
        trace.op("aten::mm", at + called - 2, min(every, 8))
        trace.kernel(made.GEMM, at + begins, each_us, at + called)
        on_device = begins + each_us
    return on_device


def step(trace, at, number, *, early_us=5, waits=()):
    """A step of 7.33 ms: 20 products of `early_us` for which the device waits, and 20 of 300 us, launched ahead."""
    trace.event("mark", f"ProfilerStep#{number}", at, 7330, 1)
    trace.event("call", "cudaDeviceSynchronize", at + 5, 40, 1, correlation=3)  # of a timer
    ends = products(trace, at, 20, 100, 60, early_us, 0)
    ends = products(trace, at, 20, 1310, 20, 300, ends)
    trace.op("aten::sum", at + 1720, 5)
    trace.kernel(made.NORM, at + ends, 10, at + 1722)
    for wait in waits:
        trace.op("aten::_local_scalar_dense", at + wait, 20)
        trace.event("call", "cudaStreamSynchronize", at + wait + 2, 15, 1, correlation=4)


@pytest.mark.parametrize("steps", [1, 3])
def test_idle_time_at_the_start_of_steps_is_told_as_such(tmp_path, steps):
    trace = Made()
    for number in range(steps):
        step(trace, 7330 * number, number + 3)
    finding = finding_of(run_of(tmp_path, trace, *H100), "launch-bound")
    assert "of the step because the host launches too late, nearly all within its first 1.31 ms" in finding.title
    assert finding.advice.startswith("The device waits for launches at the start of the step alone")
    assert "graph" not in finding.advice


def test_idle_time_all_along_steps_is_none_of_their_start(tmp_path):
    trace = Made()
    for number in range(3):
        trace.event("mark", f"ProfilerStep#{number + 3}", 8000 * number, 8000, 1)
        products(trace, 8000 * number, 100, 100, 75, 30 + number, 0)
    finding = finding_of(run_of(tmp_path, trace, *H100), "launch-bound")
    assert "nearly all within" not in finding.title and "CUDA graphs" in finding.advice


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ((), ""),
        ((7700,), ""),  # after the last launch
        ((500,), "The host waits for the GPU once per step, in aten::_local_scalar_dense: no graph goes across"),
        ((500, 900, 7700), "The host waits for the GPU 2 times per step, the longest in aten::_local_scalar_dense"),
    ],
)
def test_waits_between_the_launches_of_a_step_are_counted(tmp_path, waits, told):
    trace = Made()
    for number in range(3):
        at = 8000 * number
        trace.event("mark", f"ProfilerStep#{number + 3}", at, 8000, 1)
        trace.event("call", "cudaDeviceSynchronize", at + 5, 40, 1, correlation=3)  # of a timer
        products(trace, at, 100, 100, 75, 20 + number, 0)
        for wait in waits:
            trace.op("aten::_local_scalar_dense", at + wait, 20)
            trace.event("call", "cudaStreamSynchronize", at + wait + 2, 15, 1, correlation=4)
    run = run_of(tmp_path, trace, *H100)
    assert run.windows["inner_syncs"].sum() == 3 * sum(wait < 7600 for wait in waits)
    advice = finding_of(run, "launch-bound").advice
    assert told in advice if told else "The host waits" not in advice


def test_a_pass_that_is_marked_twice_is_one(tmp_path):
    trace = Made()
    for number in range(3):
        at = 2000 * number
        mark = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk4096sqsq32sqsk4096)"
        trace.event("mark", mark, at, 400, 1)
        trace.event("mark", "step[DECODE bs=32]", at + 5, 380, 1)
        products(trace, at, 20, 10, 15, 90 + number, 0)
    run = run_of(tmp_path, trace, *H100)
    assert run.head.config["decoding"]["passes"] == 3
    assert "3 passes decode 32 tokens each" in first_sentence(run)


@pytest.mark.parametrize(("runs", "told"), [(False, "in which nothing"), (True, "in which almost nothing")])
def test_a_first_short_kernel_in_what_is_left_out_is_told(tmp_path, runs, told):
    trace = Made()
    if runs:
        trace.op("aten::arange", 1, 8)
        trace.kernel(made.NORM, 8, 4, 3, stream=20)
    else:
        trace.op("aten::empty", 1, 8)
    for number in range(20):
        trace.op("aten::mm", 20 + 10 * number, 9)
        trace.kernel(made.GEMM, 9000 + 100 * number, 100 if number % 2 else 80, 22 + 10 * number)
    trace.event("call", "cudaStreamSynchronize", 230, 10800, 1, correlation=4)
    assert told in first_sentence(run_of(tmp_path, trace, *H100))


def with_longer_gaps(trace=None, *, parts=(), gap_us=1000, gaps=3, kernels=42):
    """Short kernels every 100 us, each launched before it begins, with longer gaps; `parts` are events in each gap as
    sort, name, begin within it and duration."""
    trace, at = trace or Made(), 0
    every = kernels // gaps
    for number in range(kernels):
        if number % every == every // 2:
            for sort, name, begin, us in parts:
                trace.event(sort, name, at + begin, us, 1, correlation=9)
            at += gap_us
        trace.op("aten::mul", at, 6)
        trace.kernel(made.RELU, at + 8, 4 + number % 3, at + 2)
        at += 100
    return trace


FUNCTION = ("python_function", "experts.py(9): run", 100, 850)


@pytest.mark.parametrize(
    ("parts", "told", "missing"),
    [
        ((FUNCTION,), "is longest in experts.py(9): run", "cudaMalloc"),
        (
            (FUNCTION, ("call", "cudaMalloc", 200, 700)),
            "ms in longer gaps, 2.10 ms are in cudaMalloc: memory that the allocator lacks",
            "experts.py",
        ),
        (
            (FUNCTION, ("python_function", "compiler/compiler.py(226): compile", 200, 700)),
            "2.10 ms are in Triton, which compiles and loads kernels",
            "cudaMalloc",
        ),
    ],
)
def test_allocations_and_first_calls_are_taken_off_the_function_around_them(tmp_path, parts, told, missing):
    advice = finding_of(run_of(tmp_path, with_longer_gaps(parts=parts)), "launch-bound").advice
    assert told in advice and missing not in advice


@pytest.mark.parametrize("code", ["launch-bound", "host-bound"])
def test_two_places_in_longer_gaps_are_named(tmp_path, code):
    """Functions that hold less of the gaps, and a loop's function that is around everything, are no such places."""
    gap_us, gaps, trace = (3000, 1, Made()) if code == "launch-bound" else (30000, 3, Made())
    if code == "launch-bound":
        trace.event("python_function", "torch/scheduler.py(5): loop", -10, 20 * gap_us, 1)
    parts = (
        ("python_function", "serving/requests.py(7): receive", 50, 0.25 * gap_us),
        ("mark", "gloo:broadcast", 60, 0.2 * gap_us),
        ("mark", "TorchDynamo Cache Lookup", 0.5 * gap_us, 0.24 * gap_us),
    )
    run = run_of(tmp_path, with_longer_gaps(trace, parts=parts, gap_us=gap_us, gaps=gaps), with_stack=1)
    (window,) = run.windows.to_dict("records")
    for column, frac in (("longer_place", 0.25), ("longer_second", 0.24), ("longer_host_wait", 0.2)):
        assert window[f"{column}_us"] == pytest.approx(gaps * frac * gap_us)
    advice = finding_of(run, code).advice
    assert "ms in serving/requests.py(7): receive and" in advice and "ms in TorchDynamo Cache Lookup." in advice
    assert "of that are collectives on the CPU, which wait for other ranks' hosts" in advice
    assert "scheduler.py" not in advice and "many short functions" not in advice


@pytest.mark.parametrize(("around", "named"), [(True, False), (False, True)])
def test_a_call_around_a_request_is_no_cause_of_idle_time(tmp_path, around, named):
    trace = with_longer_gaps(parts=() if around else (("call", "requestHandle", 10, 2900),), gap_us=3000)
    if around:
        for at in (0, 5000, 10000):
            trace.event("call", "requestHandle", at, 4900, 2, correlation=9)
    told = [finding.title for finding in diagnose(run_of(tmp_path, trace)) if "because the host" in finding.title]
    assert told and all(("in calls (requestHandle)" in title) == named for title in told)


def test_one_length_is_told_of_what_is_left_out_before_the_window(tmp_path):
    """Work from before the trace ends 20 us before the first launched work begins, and begins after the trace."""
    trace = Made()
    trace.op("aten::empty", 0, 3)
    for number in range(10):
        trace.event("kernel", made.GEMM, 30 + 100 * number, 100, "stream 7", correlation=5 + number, device=0, stream=7)
        trace.events[-1]["pid"] = 0
    for number in range(20):
        trace.op("aten::mm", 20 + 10 * number, 9)
        trace.kernel(made.GEMM, 1050 + 100 * number, 90 + number % 5, 22 + 10 * number)
    run = run_of(tmp_path, trace, *H100)
    (part,) = run.head.config["left_out"]
    assert (part["kind"], part["us"]) == ("queued", 1050)
    assert "Left out are the 1.05 ms before" in first_sentence(run)


@pytest.mark.parametrize("captures", [1, 3])
def test_a_capture_of_graphs_is_told_as_a_cost_that_occurs_once(tmp_path, captures):
    parts = [
        (("mark", "CUDAGraphNode.record (dynamo_timed)", 30, 2500), ("call", "cudaStreamBeginCapture", 40, 5))
        if 0 < number <= captures
        else ()
        for number in range(5)
    ]
    trace, at = Made(), 0
    for each in parts:
        for sort, name, begin, us in each:
            trace.event(sort, name, at + begin, us, 1, correlation=9)
        at += 3000 if each else 150
        trace.op("aten::mul", at, 6)
        trace.kernel(made.RELU, at + 8, 100 + at / 1000, at + 2)
    title = finding_of(run_of(tmp_path, trace), "host-bound").title
    count = "1 graph is" if captures == 1 else "3 graphs are"
    assert f"a one-time cost of the first call, in which {count} captured" in title


@pytest.mark.parametrize("marks", [("pass",), (), ("first", "second")])
def test_the_ends_of_a_marked_pass_are_told_where_the_host_alone_works(tmp_path, marks):
    """The host works for 1 ms before the first launch and after the last kernel, which is a tenth of the pass each."""
    trace = Made()
    for number, mark in enumerate(marks):
        length = 10_000 / len(marks)
        trace.event("mark", mark, number * length, length - 1, 1)
    trace.event("python_function", "pipeline.py(3): prepare", 5, 950, 1)
    trace.event("python_function", "pipeline.py(9): to_image", 9_020, 900, 1)
    for number in range(40):
        trace.op("aten::mm", 1000 + 10 * number, 9)
        trace.kernel(made.GEMM, 1010 + 200 * number, 200 - number % 3, 1002 + 10 * number)
    trace.op("aten::to", 9_990, 9)
    run = run_of(tmp_path, trace, *H100)
    kinds = [part["kind"] for part in run.head.config.get("left_out") or []]
    assert kinds == (["start", "end"] if marks == ("pass",) else [])
    if kinds:
        sentence = first_sentence(run)
        assert "come before the first device activity and are left out, 0.950 ms of them in pipeline.py(3)" in sentence
        assert "come after the last kernel and are left out, 0.900 ms of them in pipeline.py(9): to_image" in sentence


@pytest.mark.parametrize(("pause_us", "told"), [(300, True), (100, False)])
def test_idle_time_of_several_causes_is_told_where_nothing_is_to_be_saved(tmp_path, pause_us, told):
    """The device waits for its first launch, and once more after the host waited for it."""
    trace, at = Made(), pause_us
    trace.event("mark", "ProfilerStep#3", 0, 9400 + 2 * pause_us, 1)
    for half in range(2):
        for number in range(20):
            trace.op("aten::mm", at - 10 + 4 * number, 3)
            trace.kernel(made.GEMM, at + 235 * number, 235 - number % 2 / 10, at - 9 + 4 * number, call_us=1)
        at += 20 * 235
        if not half:
            trace.event("call", "cudaStreamSynchronize", at - 4600, 4600, 1, correlation=4)
            at += pause_us
    sentence = first_sentence(run_of(tmp_path, trace, *H100))
    assert "argest possible saving" not in sentence
    assert ("In all, the GPU is idle for 6 % of the step." in sentence) == told == ("In all" in sentence)
