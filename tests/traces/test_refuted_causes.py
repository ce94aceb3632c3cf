"""Causes, counts and rates that traces of other people's programs refuted: of idle time, of views, of kernels."""

import pandas as pd
import pytest

from amp_core import diagnose
from amp_core.analysis.performance.kernels import traced_step_us
from amp_core.analysis.performance.memory_rate import far_below_memory
from amp_core.findings import first_sentence
from amp_core.schema import RunError
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of

A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))


@pytest.mark.parametrize(
    ("us", "count", "shapes", "gb_per_s", "far"),
    [
        (27, 1, "[[1024, 1024], []]", 8000.0, True),
        (27, 1, "[[1024, 1024], []]", None, False),
        (27, 1, "", 8000.0, False),
        (27, 9, "[[1024, 1024], []]", 8000.0, False),  # 3 µs each are little more than a launch
        (2, 1, "[[1024, 1024], []]", 8000.0, False),
        (270, 1, "[[8192, 1], [1, 8192]]", 2000.0, False),  # 256 MiB are written
    ],
)
def test_a_long_kernel_that_moves_little_is_not_bound_by_memory(us, count, shapes, gb_per_s, far):
    row = {"in_shapes": shapes, "in_dtypes": '["float", "float"]', "total_us": float(us), "count": float(count)}
    assert far_below_memory(pd.DataFrame([row]), gb_per_s).tolist() == [far]


@pytest.mark.parametrize(("size", "told"), [(8192, True), (64, False)])
def test_kernels_far_below_the_rate_of_memory_are_not_told_to_be_fused(tmp_path, size, told):
    trace = Made()
    for n in range(6):
        rows = size + n % 2  # one call again and again has nothing to be fused with
        trace.op("aten::relu", 20 * n, 18, **{"Input Dims": [[rows, size]], "Input type": ["float"]})
        trace.kernel(made.RELU, 100 + 400 * n, 400, 20 * n + 5)
    codes = [f.code for f in diagnose(run_of(tmp_path, trace, *A100))]
    assert ("memory-bound-kernels" in codes) == told


def test_kernels_that_fill_at_random_are_not_bound_by_memory(tmp_path):
    trace = Made()
    for n in range(6):
        name = "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<unsigned int, 4>"
        trace.kernel(name, 100 + 400 * n, 400, 20 * n)
    assert "memory-bound-kernels" not in [f.code for f in diagnose(run_of(tmp_path, trace, *A100))]


@pytest.mark.parametrize(
    ("before", "says"),
    [(0, "these are first calls"), (2, "these are first calls"), (177, "177 calls after its first one: its thread")],
)
def test_a_view_that_takes_long_later_on_was_interrupted(tmp_path, before, says):
    trace, at = Made(), 0.0
    for _ in range(before):
        trace.op("aten::as_strided", at, 1)
        at += 2
    trace.op("aten::as_strided", at, 900)
    trace.op("aten::addmm", at + 900, 5_000)
    assert says in first_sentence(run_of(tmp_path, trace))


def steps_of_short_kernels(long_gaps):
    """Six steps of seven short kernels; in the steps `long_gaps` the host pauses for 0.8 ms before the last one."""
    trace, at = Made(), 0.0
    for step in range(6):
        began = at
        for kernel in range(7):
            at += 800 if kernel == 6 and step in long_gaps else 150
            trace.op("aten::relu", at - 120, 124)
            trace.kernel(made.RELU, at + 5, 3, at)
        trace.event("mark", f"ProfilerStep#{step}", began, at + 20 - began, 1)
        at += 45
    return trace


@pytest.mark.parametrize(("long_gaps", "told"), [(range(6), True), ((0,), False), ((), False)])
def test_longer_gaps_are_told_where_most_steps_have_them(tmp_path, long_gaps, told):
    finding = finding_of(run_of(tmp_path, steps_of_short_kernels(long_gaps)), "launch-bound")
    assert ("in gaps of 0.3 ms and more" in finding.title) == told


@pytest.mark.parametrize(("first_us", "steps"), [(1_000, 5), (5_000, 4)])
def test_a_step_by_the_optimizer_that_begins_cold_is_left_out(tmp_path, first_us, steps):
    trace, at = Made(), 0.0
    for number in range(6):
        trace.op("aten::item", at, 20)
        at += first_us if number == 1 else 1_000
        trace.kernel(made.RELU, at - 600, 200, at - 700)
        trace.event("mark", "Optimizer.step#SGD.step", at - 60, 50, 1)
        trace.kernel(made.ADAM, at - 20, 15, at - 50)
    windows = run_of(tmp_path, trace).windows
    assert windows["steps"].tolist() == [steps]


def values(count=200):
    """Values that are copied to the host one by one, without a kernel."""
    trace = Made()
    for number in range(count):
        at = 50 * number
        trace.op("aten::copy_", at, 40)
        trace.kernel("Memcpy DtoH (Device -> Pageable)", at + 20, 6, at + 10, sort="copy", call_us=5)
        trace.events[-1]["args"]["bytes"] = 4
        trace.event("call", "cudaStreamSynchronize", at + 16, 24, 1, correlation=7)
    return trace


def test_values_that_are_copied_one_by_one_are_one_cause(tmp_path):
    run = run_of(tmp_path, values())
    assert "copies of 4 bytes on average to the host" in first_sentence(run)
    assert "The next" not in first_sentence(run) and "kernels of 0" not in first_sentence(run)
    assert {f.snippet.partition("   #")[0] for f in diagnose(run)} == {"values = x.tolist()"}


def test_synchronizations_are_counted_that_idle_time_follows(tmp_path):
    trace = Made()
    for n in range(4):
        at = 1_000 * n
        trace.op("aten::item", at + 60, 140)
        trace.kernel(made.GEMM, at + 20, 150, at + 5)
        trace.event("call", "cudaStreamSynchronize", at + 70, 110, 1, correlation=7)
    trace.kernel(made.GEMM, 3_220, 150, 3_210)
    trace.event("call", "cudaStreamSynchronize", 3_230, 145, 1, correlation=7)  # nothing is launched after it
    trace.event("mark", "ProfilerStep#3", 0, 3_370, 1)
    assert "after 4 synchronizations" in " ".join(f.title for f in diagnose(run_of(tmp_path, trace)))


@pytest.mark.parametrize(("us", "told"), [(300, True), (3_000, False)])
def test_small_batches_are_not_loaded_ahead_by_more_workers(tmp_path, us, told):
    trace, at = Made(), 0.0
    for step in range(4):
        trace.event("mark", f"ProfilerStep#{step}", at, us + 900, 1)
        trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, us, 1)
        trace.kernel(made.GEMM, at + us + 20, 400, at + us + 5)
        at += us + 900
    finding = finding_of(run_of(tmp_path, trace), "waiting-for-data")
    assert ("passing it from a worker process" in finding.advice) == told
    assert ("do not keep up" in finding.advice) != told


@pytest.mark.parametrize(("step_us", "told"), [(100, False), (20_000, True)])
def test_short_steps_without_work_are_not_told_to_be_exported_later(tmp_path, step_us, told):
    trace = Made()
    for step in range(2):
        trace.event("mark", f"ProfilerStep#{step}", step_us * step, step_us, 1)
    with pytest.raises(RunError, match=r"call prof\.step\(\) after the work of each step") as refused:
        run_of(tmp_path, trace)
    assert ("on_trace_ready" in str(refused.value)) == told


def test_the_rate_of_products_is_told_of_those_that_are_counted(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    sizes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
    trace.op("aten::mm", 10, 8, **sizes)
    trace.kernel(made.GEMM, 30, 600, 12)
    trace.op("flash_attn_3::fwd", 20, 8)
    trace.kernel(
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>", 630, 340, 22
    )
    assert "on tensor cores, GEMM/conv at 73.4 % of the peak rate" in first_sentence(run_of(tmp_path, trace, *A100))


def test_a_saving_of_unknown_cause_that_is_larger_is_told_with_the_first(tmp_path):
    trace = Made()
    trace.kernel(made.GEMM, 20, 100, 5)
    trace.op("aten::ones_like", 125, 1_200)
    trace.kernel(made.GEMM, 1_340, 100, 1_330)
    trace.kernel(made.GEMM, 3_400, 100, 1_350)  # launched long before
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.startswith("Largest possible saving of known cause:")
    assert "although work is queued, and nothing in the trace shows what it waits for" in sentence


def test_a_sparse_matrix_that_is_sorted_anew_is_told(tmp_path):
    trace = Made()
    for n in range(4):
        at = 1_000 * n
        trace.op("aten::_coalesce", at, 900)
        trace.kernel(made.RELU, at + 800, 20, at + 5)
        trace.event("call", "cudaStreamSynchronize", at + 20, 802, 1, correlation=7)
    found = [f for f in diagnose(run_of(tmp_path, trace)) if f.code in ("kernel-wait", "host-syncs")]
    assert "aten::_coalesce" in found[0].title
    assert all("sorts its entries anew" in f.advice for f in found)


@pytest.mark.parametrize("with_stack", [0, 1])
def test_stacks_that_slow_the_launches_are_told(tmp_path, with_stack):
    run = run_of(tmp_path, steps_of_short_kernels(()), with_stack=with_stack)
    assert ("Stacks were recorded, which slows Python" in finding_of(run, "launch-bound").advice) == bool(with_stack)


def steps_on_a_cpu(profiler_us=0.0, halted_us=0.0):
    """Five equal steps of ten operators; in the first one the profiler starts, in the third one all stands still."""
    trace, at = Made(), 0.0
    for step in range(5):
        began = at
        if step == 0 and profiler_us:
            trace.event("python_function", "torch/autograd/profiler.py(375): __exit__", at, profiler_us, 1)
            trace.event("python_function", "<built-in method  of function_record object>", at, profiler_us - 1, 1)
            at += profiler_us
        for number in range(10):
            name, us = ("aten::empty", 4) if number % 2 else ("aten::mm", 900)
            us += halted_us if step == 2 and number in (4, 5, 6) else 0
            trace.op(name, at, us, **{"Input Dims": [[64, 64]]})
            at += us + 5
        trace.event("mark", f"ProfilerStep#{step}", began, at - began, 1)
    return trace


def test_a_step_in_which_the_profiler_ends_is_no_long_one(tmp_path):
    run = run_of(tmp_path, steps_on_a_cpu(profiler_us=60_000))
    sentence = first_sentence(run)
    assert "the median" not in sentence and "Python or other code" not in sentence
    assert "The profiler's own work takes 72.4 % of the profiled time" in sentence
    assert max(run.steps["step_ms"]) < 5 and traced_step_us(run) == pytest.approx(4_570)


@pytest.mark.parametrize(("halted_us", "told"), [(400_000, True), (9_000, False)])
def test_a_process_that_stood_still_is_told_from_a_shared_processor(tmp_path, halted_us, told):
    run = run_of(tmp_path, steps_on_a_cpu(halted_us=halted_us))
    finding = finding_of(run, "shared-processor")
    assert ("nearly all of it in 1,202 ms in which the process stood still" in finding.title) == told
    assert ("the processor is shared" in finding.title) != told
    assert ("suspended" in finding.advice) == told


def exchanging(beside_us, forward_us=400):
    """A step of forward, and of backward beside the first part of an all-reduce of a rank whose others are not here."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 9_000, 1)
    trace.op("aten::mm", 5, 20, **{"Input Dims": [[4096, 4096]] * 2, "Input type": ["float"] * 2})
    trace.kernel(made.SIMT, 30, forward_us, 8)
    trace.op("MmBackward0", 30, 20, 2)
    trace.op("aten::mm", 31, 18, 2, **{"Input Dims": [[4096, 4096]] * 2, "Input type": ["float"] * 2})
    trace.kernel(made.SIMT, 30 + forward_us, 2_000, 35, 2)
    trace.op("c10d::allreduce_", 50, 10, 2)
    trace.kernel(made.NCCL, 2_030 + forward_us - beside_us, 6_500, 52, 2, stream=20)
    return trace


@pytest.mark.parametrize(("beside_us", "forward_us", "outlasts"), [(1_900, 400, True), (100, 3_000, False)])
def test_collectives_that_outlast_what_is_computed_are_not_told_to_begin_earlier(
    tmp_path, beside_us, forward_us, outlasts
):
    run = run_of(tmp_path, exchanging(beside_us, forward_us), *A100)
    finding = finding_of(run, "exposed-communication")
    assert ("smaller ones that begin earlier change little" in finding.advice) == outlasts
    assert ("no_sync" in finding.snippet) == outlasts and ("bucket_cap_mb" in finding.snippet) != outlasts


@pytest.mark.parametrize(("beside_us", "told"), [(1_900, True), (100, False)])
def test_what_lies_beside_collectives_is_no_saving(tmp_path, beside_us, told):
    finding = finding_of(run_of(tmp_path, exchanging(beside_us), *A100), "fp32-products")
    assert ("79.2 % of that time lies beside collectives, and is not counted" in finding.title) == told


@pytest.mark.parametrize(("capability", "compiles"), [((6, 0), False), ((8, 0), True)])
def test_gpus_that_are_too_old_for_the_compiler_are_told_to_capture_graphs(tmp_path, capability, compiles):
    run = run_of(tmp_path, steps_of_short_kernels(()), "Quadro GP100" if not compiles else A100[0], capability)
    assert ("torch.compile(" in finding_of(run, "launch-bound").snippet) == compiles


def test_a_step_of_the_optimizer_that_is_cut_off_ends_no_step(tmp_path):
    trace = Made()
    for number in range(5):
        trace.kernel(made.RELU, 1_000 * number + 400, 200, 1_000 * number + 300)
        trace.event("mark", "Optimizer.step#SGD.step", 1_000 * number + 940, 50 if number < 4 else 0, 1)
        trace.kernel(made.ADAM, 1_000 * number + 980, 15, 1_000 * number + 950)
    assert run_of(tmp_path, trace).windows["steps"].tolist() == [3]


@pytest.mark.parametrize(
    ("twin", "told"), [("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1", True), ("other_gemm", False)]
)
def test_kernels_that_differ_in_their_epilogue_are_told_together(tmp_path, twin, told):
    trace = Made()
    for n in range(4):
        trace.op("vllm::moe_forward", 30 * n, 20)
        trace.kernel("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", 100 + 300 * n, 200, 30 * n + 2)
        trace.kernel(twin, 300 + 300 * n, 100, 30 * n + 6)
    sentence = first_sentence(run_of(tmp_path, trace, "AMD Instinct MI300X", (9, 4)))
    assert ("One kernel takes 66.7 % (100 % with those of its kind)" in sentence) == told
