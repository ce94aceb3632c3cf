"""Statements and advice that audits of public traces refuted: first uses, late ranks, sizes and memory."""

import pytest

from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.findings import first_sentence
from amp_core.hardware.data_sheets import dense_rates
from tests.traces.made import ADAM, BASE, GEMM, RELU, Made, run_of
from tests.traces.test_collectives import exposed, of_one_rank
from tests.traces.test_collectives import run_of as run_of_ranks
from tests.traces.test_refuted_advice import EXCHANGE, finding_of


@pytest.mark.parametrize(("call", "sets_up"), [("cudaStreamCreateWithFlags", True), ("cudaEventRecord", False)])
def test_an_operator_that_sets_up_its_library_is_told_as_a_first_call(tmp_path, call, sets_up):
    trace = Made()
    trace.kernel(RELU, 3, 5, 1)
    trace.op("aten::conv2d", 20, 9000)
    trace.op("aten::cudnn_convolution", 30, 8980)
    trace.event("call", call, 500, 40, 1, correlation=7)
    trace.kernel("void cudnn::cnn::conv2d_grouped_direct_kernel<float>", 9000, 10, 8990)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert ("in aten::conv2d (nearly all in its first call)" in finding.title) == sets_up
    assert ("move that work out of the loop" in finding.advice) == (not sets_up)
    assert ("sets up its library" in finding.advice) == sets_up


@pytest.mark.parametrize(("step", "many"), [(0, False), (2, True)])
def test_a_host_that_is_slow_in_all_operators_is_told_to_launch_less(tmp_path, step, many):
    """One step of ten operators, each of which launches a kernel after 0.9 ms."""
    trace = Made()
    trace.event("mark", f"ProfilerStep#{step}", 0, 10_000, 1)
    for number, name in enumerate(("linear", "relu", "mse_loss", "add", "mul", "sum", "mean", "div", "sub", "exp")):
        trace.op(f"aten::{name}", 1000 * number + 10, 960)
        trace.kernel(RELU, 1000 * number + 950, 5, 1000 * number + 900)
    advice = finding_of(run_of(tmp_path, trace), "host-bound").advice
    assert ("The host is in many operators meanwhile" in advice) == many
    assert ("does something else" in advice) == (not many)


@pytest.mark.parametrize(("step", "told"), [(0, True), (3, False)])
def test_a_later_step_is_not_told_to_set_up_connections(tmp_path, step, told):
    documents = [of_one_rank((16, 53), (24, 6), ranks=2) for _ in range(2)]
    documents[1]["distributedInfo"]["rank"] = 1
    for document in documents:
        document["traceEvents"][0]["name"] = f"ProfilerStep#{step}"
    advice = exposed(tmp_path, *documents).advice
    assert ("sets up its connections" in advice) == ("after a warm-up" in advice) == told
    assert "a rank whose trace is not here may be late" in advice


@pytest.mark.parametrize(("late_us", "told"), [(30_000, True), (60_000, False)])
def test_a_rank_that_waits_for_others_only_waits_longer_where_its_host_is_faster(tmp_path, late_us, told):
    """47 ms of an all-reduce are waiting; the last product is launched so long after the collectives."""
    document = of_one_rank((16, 53), (24, 6))
    document["traceEvents"][0]["dur"] = 80_000 + late_us
    for event in [event for event in document["traceEvents"] if event["ph"] == "X"][-3:]:
        event["ts"] += late_us + (event["cat"] != "kernel") * 59_000
    title = finding_of(run_of_ranks(tmp_path, document), "host-bound").title
    assert ("once no other rank is waited for" in title) == told


@pytest.mark.parametrize(("in_optimizer", "fused"), [(False, False), (True, True)])
def test_gaps_beside_the_optimizer_are_not_told_to_fuse_it(tmp_path, in_optimizer, fused):
    """Two steps of ten operators that each launch a kernel after 0.9 ms; the optimizer is the last of them."""
    trace = Made()
    for at in (0, 10_000):
        trace.event("mark", f"ProfilerStep#{at // 10_000 + 3}", at, 10_000, 1)
        start = at + (8000 if in_optimizer else 9940)
        trace.op("MmBackward0", start - 60, 50, 2)
        trace.event("mark", "Optimizer.step#SGD.step", start, at + 9990 - start, 1)
        for number in range(9):
            trace.op(f"aten::op{number}", at + 1000 * number + 10, 960)
            trace.kernel(RELU, at + 1000 * number + 950, 5, at + 1000 * number + 900)
        for number in range(5):
            trace.op("aten::_foreach_add_", at + 9950 + 5 * number, 4)
            trace.kernel(ADAM, at + 9960 + 5 * number, 4, at + 9951 + 5 * number, call_us=1)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert "in many operators" in finding.advice
    assert ("fused" in finding.snippet) == ("fused optimizers" in finding.advice) == fused


def with_memory(*, allocated, call=""):
    """A product on a CPU, with so many bytes of tensors, and a call into the runtime of the GPU."""
    trace = Made()
    trace.op("aten::mm", 0, 1000)
    arguments = {"Device Type": 0, "Device Id": -1, "Bytes": 1, "Total Allocated": allocated}
    if allocated:
        trace.events.append({"ph": "i", "name": "[memory]", "pid": 77, "tid": 1, "ts": BASE + 5, "args": arguments})
    if call:
        trace.event("call", call, 2000, 100, 1, correlation=1)
    return trace


@pytest.mark.parametrize(
    ("recorded", "says"),
    [
        ({"allocated": 20 * 2**30}, "is not used, and its 16.0 GiB cannot hold the 20.0 GiB that tensors take at once"),
        ({"allocated": 2**30}, "is not used: move the model to it"),
        ({"allocated": 0, "call": "cudaDeviceSynchronize"}, "is not used: move the model to it"),
        ({"allocated": 0}, "has nothing in the trace: record its activity, or move the model to it"),
    ],
)
def test_a_gpu_too_small_for_all_tensors_is_told_to_compute_in_parts(tmp_path, recorded, says):
    properties = [{"name": "Tesla V100-SXM2-16GB", "totalGlobalMem": 2**34, "computeMajor": 7, "computeMinor": 0}]
    document = with_memory(**recorded).document(deviceProperties=properties)
    finding = finding_of(run_of_ranks(tmp_path, document), "idle-gpu")
    assert says in finding.title
    assert ("split(" in finding.snippet) == ("do not fit into the GPU" in finding.advice) == ("cannot hold" in says)
    assert ("record its activity" in finding.advice) == ("record its activity" in says)


@pytest.mark.parametrize(
    ("name", "memory_bytes", "gb_per_s"),
    [
        ("NVIDIA A100-PG509-200", 42_505_273_344, 1555),
        ("NVIDIA A100-PG509-200", 85_198_045_184, 2039),
        ("NVIDIA A100-SXM4-40GB", 42_505_273_344, 1555),
        ("NVIDIA H100 PCIe", 85_017_493_504, 2039),
    ],
)
def test_parts_that_the_data_sheet_tells_apart_by_memory_have_its_rates(tmp_path, name, memory_bytes, gb_per_s):
    properties = [{"name": name, "totalGlobalMem": memory_bytes, "computeMajor": 8, "computeMinor": 0}]
    trace = Made()
    trace.kernel(RELU, 3, 5, 1)
    run = run_of_ranks(tmp_path, trace.document(deviceProperties=properties))
    assert dense_rates(profiled_gpu(run, "cuda:0").name).gb_per_s == gb_per_s


@pytest.mark.parametrize(
    ("beside_us", "says"), [(600, "Most of this"), (300, "Part of this"), (100, "Shard the model")]
)
def test_an_exchange_that_runs_partly_beside_computing_is_asynchronous_already(tmp_path, beside_us, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("record_param_comms", 1, 8, **{"Collective name": "all_to_all", "dtype": "Float"})
    trace.kernel(EXCHANGE, 10, 900, 3)
    trace.kernel(GEMM, 20, beside_us, 15, stream=8)
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert finding.advice.startswith(says)
    assert "async_op" not in finding.snippet


@pytest.mark.parametrize(("sizes", "calls", "told"), [([[1, 32768, 50304]], 1, True), ([[1, 32768, 50304]], 2, False),
                                                      ([[4096, 768]], 1, False)])  # fmt: skip
def test_fused_kernels_that_pass_over_one_large_tensor_are_told_together(tmp_path, sizes, calls, told):
    """Twelve fused kernels of 30 µs beside a product, two of them on the logits, called so often per step."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 5, **{"Input type": ["c10::BFloat16"] * 2, "Input Dims": [[4096, 4096]] * 2})
    trace.kernel(GEMM.replace("fp16", "bf16"), 10, 640, 2)
    for number in range(12):
        name = f"triton_red_fused_{number // calls}"
        dims = sizes if number < 4 else [[64, 64]]
        trace.op(name, 7 + 2 * number, 2, **{"Input type": ["c10::BFloat16"], "Input Dims": dims})
        trace.kernel(name, 650 + 29 * number, 29, 8 + 2 * number, call_us=1)
    sentence = first_sentence(run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB", (8, 0)))
    assert ("no single change that is looked for would save" in sentence.lower()) == told, sentence
    first = (
        "4 kernels that each pass over one tensor of 32768 × 50304 take 11.6 % of the step: fewer passes may halve "
        "that (up to 0.0580 of 1.00 ms per step). Beside that, in 16 bits, no "
    )
    assert sentence.startswith(first) == told == ("11.6 % in these; the others" in sentence)


@pytest.mark.parametrize(("spread", "told"), [(False, True), (True, False)])
def test_a_device_that_waits_at_the_start_alone_is_not_told_to_be_launch_bound_throughout(tmp_path, spread, told):
    """Ten kernels are launched one by one, and the host is ahead of all others; or the same in the whole window."""
    trace = Made()
    for number in range(10):
        at = (600 if spread else 100) * number
        trace.kernel(RELU, at + 10, 20, at + 2)
        if spread:
            trace.kernel(GEMM, at + 30, 500, at + 5)
    for number in range(0 if spread else 10):
        trace.kernel(GEMM, 1000 + 500 * number, 500, 940 + 3 * number)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert ("nearly all within its first" in finding.title) == ("at the start alone" in finding.advice) == told
    assert ("Faster arithmetic does not help" in finding.advice) == (not told)


def test_a_trace_of_metrics_tells_no_share_of_its_host(tmp_path):
    trace = Made()
    for number in range(10):
        trace.event("call", "cudaLaunchKernel", 1000 * number, 900, 1, correlation=number)
        trace.event("cuda_profiler_range", "kernel", 1000 * number, 900, 1)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "each kernel runs again" in sentence and "On the host" not in sentence
