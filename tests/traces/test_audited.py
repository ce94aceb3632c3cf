"""What audits of real traces found wrong: advice that a trace refutes, and causes that it shows."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of

GRAPHS = 'mode="reduce-overhead"'


def short_kernels(*, waits=0, pause_us=0, benchmark=None, optimizers=()):
    """A step of 40 short kernels 100 µs apart, with so many waits between them, and a pause of the host before the
    last one."""
    trace, at = Made(), 0
    for number in range(40):
        at += 100 + pause_us * (number == 39)
        trace.op("aten::mul", at, 6)
        trace.kernel(made.RELU, at + 8, 4, at + 2)
        if number < waits:
            trace.op("aten::item", at + 10, 8)
            trace.event("call", "cudaStreamSynchronize", at + 12, 5, 1, correlation=77 + number)
    if benchmark is not None:
        inputs = ["", "", "", "[1]", "[0]", "[1]", "False", "[]", "1", str(benchmark), "False", "True", "True"]
        trace.op("aten::_convolution", at + 20, 5, **{"Concrete Inputs": inputs})
    for name in optimizers:
        trace.event("mark", f"Optimizer.step#{name}.step", at + 30, 5, 1)
    trace.event("mark", "ProfilerStep#3", 0, at + 50, 1)
    return trace


@pytest.mark.parametrize(("waits", "told"), [(0, False), (1, False), (3, True)])
def test_waits_that_no_graph_crosses_are_told_with_graphs(tmp_path, waits, told):
    finding = finding_of(run_of(tmp_path, short_kernels(waits=waits)), "launch-bound")
    assert GRAPHS in finding.snippet
    assert (
        f"The host waits for the GPU {waits} times per step, the longest in aten::item: no graph goes across"
        in finding.advice
    ) == told


@pytest.mark.parametrize(("pause_us", "told"), [(0, False), (3000, True)])
def test_longer_gaps_are_told_beside_short_ones(tmp_path, pause_us, told):
    finding = finding_of(run_of(tmp_path, short_kernels(pause_us=pause_us)), "launch-bound")
    assert ("3.10 ms of it in gaps of 0.3 ms and more" in finding.title) == told
    assert ("In the longer gaps the host may do something else" in finding.advice) == told


@pytest.mark.parametrize(
    ("optimizers", "code"),
    [
        (("CombinedOptimizer", "Adam"), "torch.optim.Adam(model.parameters(), lr=lr, fused=True)"),
        (("Adam", "SGD"), "type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam"),
        ((), "type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam"),
    ],
)
def test_the_class_of_the_one_optimizer_stands_in_the_code(tmp_path, optimizers, code):
    trace = short_kernels(optimizers=optimizers)
    for number in range(10):
        at = 4200 + 20 * number
        trace.op("aten::addcdiv_", at, 6)
        trace.event("mark", "Optimizer.step#Own.step", at, 18, 1) if not optimizers else None
        trace.kernel(made.ADAM, at + 8, 4, at + 2)
    trace.event("mark", "Optimizer.step#Adam.step", 4200, 200, 1) if optimizers else None
    trace.event("mark", "ProfilerStep#4", 4100, 400, 1)
    run = run_of(tmp_path, trace)
    run.head.config.pop("optimizers", None) if not optimizers else None
    findings = [f for f in diagnose(run) if f.code == "launch-bound"]
    assert any(code in f.snippet for f in findings)


@pytest.mark.parametrize(("benchmark", "told"), [(True, False), (False, True), (None, True)])
def test_a_benchmark_that_is_on_is_not_advised(tmp_path, benchmark, told):
    trace = short_kernels(benchmark=benchmark)
    shapes = {"Input Dims": [[64, 64, 56, 56], [64, 64, 3, 3]], "Input type": ["c10::Half"] * 2}
    trace.op("aten::cudnn_convolution", 4200, 8, **shapes)
    trace.kernel("implicit_convolve_sgemm<__half, 1024, 5, 5, 3, 3, 3, 1>", 4210, 4000, 4202)
    trace.event("mark", "ProfilerStep#4", 4190, 4100, 1)
    finding = finding_of(run_of(tmp_path, trace), "kernels-off-tensor-cores")
    assert ("cudnn.benchmark = True" in finding.snippet) == told
    assert ("benchmark its algorithms" in finding.advice) == told


@pytest.mark.parametrize(("computes_us", "told"), [(90, True), (600, False)])
def test_overlap_is_said_to_hide_no_more_than_is_computed(tmp_path, computes_us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1600, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, computes_us, 2)
    trace.kernel(made.NCCL, 10 + computes_us, 800, 20)
    advice = finding_of(run_of(tmp_path, trace), "exposed-communication").advice
    assert ("computes for 0.0900 ms per step, so overlap hides at most that of 0.800 ms" in advice) == told


@pytest.mark.parametrize(("records", "says"), [(2, "torch measured operators with them"), (0, "kept the kernels back")])
def test_events_around_each_operator_are_no_missing_permission(tmp_path, records, says):
    trace = Made()
    for number in range(10):
        at = 20 * number
        trace.op("aten::mm", at, 10)
        trace.event("call", "cudaLaunchKernel", at + 2, 3, 1, correlation=number)
        for record in range(records):
            trace.event("call", "cudaEventRecord", at + 11 + record, 1, 1)
    assert says in finding_of(run_of(tmp_path, trace), "device-not-recorded").advice


@pytest.mark.parametrize(
    ("us", "told"),
    [
        ([2500, 2500, 150, 140, 2600, 2400, 150, 160], True),  # most of them are slow
        ([150, 160, 150, 140, 170, 160, 150, 160], False),
        ([2500, 150, 2600, 140], False),  # too few to know what is usual
    ],
)
def test_equal_products_that_take_unequally_long_are_told(tmp_path, us, told):
    trace, at = Made(), 0
    for one in us:
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2, "Input Dims": [[64, 64], [64, 64]]})
        trace.kernel(made.GEMM, at + 10, one, at + 2)
        at += one + 12
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("Equal products take unequally long: 9.4" in sentence) == told
    assert ("the device is shared or throttled." in sentence) == told


@pytest.mark.parametrize(("number", "kind"), [(1, "setup"), (12, "allocation")])
def test_an_allocator_that_runs_short_in_the_loop_sets_nothing_up(tmp_path, number, kind):
    trace = Made()
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    at = 310
    for place in range(number):
        trace.event("call", "cudaFree", at, 60_000 if place == 0 else 500, 1, correlation=100 + place)
        at += 60_000 if place == 0 else 500
    trace.op("aten::mm", at + 10, 8)
    trace.kernel(made.GEMM, at + 30, 300, at + 12)
    assert run_of(tmp_path, trace).windows["host_call_kind"].tolist() == [kind]


def test_a_process_that_another_starts_is_named_by_the_programs_function(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.event("python_function", "utils/cpp_extension.py(2068): _run_ninja_build", 400, 9000, 1)
    trace.event("python_function", "subprocess.py(1126): communicate", 410, 8900, 1)
    trace.event("python_function", "<built-in method read of _io.BufferedReader object>", 420, 8800, 1)
    trace.op("aten::mm", 9_490, 8)
    trace.kernel(made.GEMM, 9_500, 400, 9_492)
    assert finding_of(run_of(tmp_path, trace), "host-bound").where == "utils/cpp_extension.py(2068): _run_ninja_build"


@pytest.mark.parametrize(("kernels", "broken"), [(400, False), (20, True)])
def test_a_graph_of_a_whole_pass_has_no_break_to_find(tmp_path, kernels, broken):
    trace = Made()
    for replay in range(3):
        at = 20_000 * replay
        trace.event("call", "cudaGraphLaunch", at, 20, 1, correlation=replay + 1)
        for number in range(kernels):
            start = at + 100 + 40 * number
            trace.event("kernel", made.RELU, start, 4, "stream 7", correlation=replay + 1, device=0, stream=7)
    findings = [f for f in diagnose(run_of(tmp_path, trace)) if f.code in ("launch-bound", "host-bound", "kernel-wait")]
    assert findings and all(("what breaks" in f.advice) <= broken for f in findings)


@pytest.mark.parametrize(("beside", "told"), [(made.GEMM, True), (made.RELU, False)])
def test_casts_between_products_are_told_not_to_be_fused(tmp_path, beside, told):
    trace = Made()
    for number in range(10):
        at, host = 600 * number, 12 * number - 110
        trace.op("aten::copy_", host, 5, **{"Input type": ["c10::Half", "float"]})
        trace.kernel(made.CAST, at + 10, 300, host + 2)
        trace.op("aten::mm" if beside == made.GEMM else "aten::relu", host + 6, 5)
        trace.kernel(beside, at + 310, 295, host + 8)
    finding = finding_of(run_of(tmp_path, trace), "memory-bound-kernels")
    assert ("casts between products, 50 % of the profiled window, vanish" in finding.title) == told
    assert finding.win_ms == pytest.approx(3.0 if told else 2.975, rel=0.01)
    assert ("Nothing is fused with casts between products" in finding.advice) == told


def test_a_trace_of_copies_alone_has_no_first_kernel(tmp_path):
    trace = Made()
    trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 8000, 1)
    trace.op("aten::copy_", 8000, 50)
    trace.kernel(made.COPY, 8020, 400, 8010, sort="copy")
    trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 8500, 6000, 1)
    trace.op("aten::copy_", 14_500, 50)
    trace.kernel(made.COPY, 14_520, 400, 14_510, sort="copy")
    run = run_of(tmp_path, trace)
    texts = [first_sentence(run), *(f.title for f in diagnose(run))]
    assert not any("first kernel" in text for text in texts) and any("first copy" in text for text in texts)


@pytest.mark.parametrize(("category", "told"), [("aten::_index_put_impl_", True), ("aten::index", False)])
def test_scattered_writes_are_told_and_are_no_passes_over_memory(tmp_path, category, told):
    trace = Made()
    for number in range(10):
        at = 600 * number
        trace.op(category, at, 5)
        trace.kernel("void at::native::index_elementwise_kernel<128, 4, index_kernel>", at + 10, 200, at + 2)
        trace.op("aten::mul", at + 6, 5)
        trace.kernel(made.RELU, at + 210, 390, at + 8)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert (
        "aten::_index_put_impl_ takes 33 % of the profiled window, as it writes to scattered places" in sentence
    ) == told


def test_collectives_of_graphs_are_not_told_to_be_asynchronous(tmp_path):
    trace = Made()
    for replay in range(3):
        at = 20_000 * replay
        trace.op("aten::copy_", at + 30, 5)  # operators are recorded; those of captured kernels are none
        trace.event("call", "cudaGraphLaunch", at, 20, 1, correlation=replay + 1)
        for number in range(8):
            start = at + 100 + 2000 * number
            for name, begins in ((made.GEMM, start), (made.NCCL, start + 1000)):
                trace.event("kernel", name, begins, 990, "stream 7", correlation=replay + 1, device=0, stream=7)
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert "launched by captured graphs" in finding.advice and "async_op" not in finding.snippet


@pytest.mark.parametrize(
    ("name", "advice"), [("DtoH (Device -> Pageable)", "pinned memory"), ("HtoD (Pageable -> Device)", "Pin")]
)
def test_copies_that_block_are_told_by_their_direction(tmp_path, name, advice):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    for number in range(10):
        at = 1000 * number
        trace.op("aten::copy_", at, 500)
        trace.kernel(f"Memcpy {name}", at + 20, 200, at + 10, sort="copy", call_us=20)
        trace.event("call", "cudaStreamSynchronize", at + 40, 440, 1, correlation=900 + number)
        trace.op("aten::mm", at + 700, 5)
        trace.kernel(made.GEMM, at + 710, 280, at + 702)
    finding = finding_of(run_of(tmp_path, trace), "host-syncs")
    assert advice in finding.advice and ("out.copy_(y" in finding.snippet) == name.startswith("DtoH")
    assert "DataLoader" not in finding.snippet  # there is none


@pytest.mark.parametrize(("count", "told"), [(60, True), (20, False)])
def test_the_time_between_many_collectives_is_told_with_them(tmp_path, count, told):
    """Gradients that a loop reduces one by one: each is divided after it, and the host launches the next too late."""
    trace = Made()
    for number in range(count):
        at = 200 * number
        trace.op("nccl:all_reduce", at, 5)
        trace.kernel(made.NCCL, at + 10, 60, at + 2)
        trace.op("aten::div_", at + 72, 5)
        trace.kernel(made.RELU, at + 80, 10, at + 74)
    trace.op("aten::mm", 200 * count, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 200 * count + 10, 2000, 200 * count + 2)
    trace.event("mark", "ProfilerStep#3", 0, 200 * count + 2010, 1)
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert (f"between its {count} collectives" in finding.title) == told
    assert finding.win_ms == pytest.approx((60 * count + told * 130 * (count - 1)) / 1e3, rel=0.01)


def test_a_collective_that_scatters_writes_to_no_scattered_places(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("c10d::reduce_scatter_", 1, 8)
    trace.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 500, 2)
    trace.op("aten::mm", 11, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 510, 490, 12)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "only communicates" in sentence and "scattered" not in sentence


def test_without_operators_no_kernel_is_taken_for_a_graphs(tmp_path):
    trace = Made()
    for number in range(200):
        trace.kernel(made.NCCL if number % 2 else made.RELU, 100 * number + 20, 40, 100 * number + 2)
    trace.event("call", "cudaGraphLaunch", 1, 1, 1, correlation=5)
    findings = diagnose(run_of(tmp_path, trace))
    assert any(f.code == "exposed-communication" for f in findings)
    assert not any("captured graphs" in f.advice or "replays one graph already" in f.advice for f in findings)
