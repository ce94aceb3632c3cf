"""Causes, counts and rates that traces of other people's programs refuted: of idle time, of views, of kernels."""

import pandas as pd
import pytest

from amp_core import diagnose
from amp_core.analysis.performance.memory_rate import far_below_memory
from amp_core.findings import first_sentence
from amp_core.schema import RunError
from tests.traces import made
from tests.traces.made import Made, run_of

A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))


def finding_of(run, code):
    (finding,) = [f for f in diagnose(run) if f.code == code]
    return finding


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
        trace.op("aten::relu", 20 * n, 18, **{"Input Dims": [[size, size]], "Input type": ["float"]})
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
