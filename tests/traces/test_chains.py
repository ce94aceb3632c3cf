"""What fusing saves of kernels that memory bounds, and how much of it the host lets through."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.saving import MemorySaving, ProductSaving
from amp_core.analysis.performance.savings import possible_savings
from tests.traces import made
from tests.traces.made import Made, run_of

CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>"
BATCH_NORM = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>"


def chain(tmp_path, kernels, *, shapes=None, step_us=1000):
    """Two steps of these kernels, each launched by an operator: (operator, kernel, µs). The host is far ahead."""
    trace = Made()
    for step in range(2):
        at = step_us * step
        trace.event("mark", f"ProfilerStep#{step}", at, step_us, 1)
        starts = at + 50 + 8 * len(kernels)
        for n, (op, kernel, us) in enumerate(kernels):
            given = {"Input Dims": [shapes[n]], "Input type": ["float"]} if shapes else {}
            trace.op(op, at + 8 * n, 6, **given)
            trace.kernel(kernel, starts, us, at + 8 * n + 2)
            starts += us
    return run_of(tmp_path, trace)


def away(run):
    return {op: us / 2 for op, us in kernel_rows(run).groupby("op")["fused_away_us"].sum().items()}


def test_a_chain_becomes_as_long_as_its_longest_kernel(tmp_path):
    kernels = [("aten::mul", made.RELU, 100), ("aten::add", made.RELU, 200), ("aten::cat", CAT, 100)]
    run = chain(tmp_path, [*kernels, ("aten::exp", made.RELU, 100)])
    assert away(run) == pytest.approx({"aten::mul": 60.0, "aten::add": 120.0, "aten::cat": 60.0, "aten::exp": 60.0})
    saving = possible_savings(run).of("memory-bound-kernels", MemorySaving)
    assert saving.saved_us == pytest.approx(300.0) and "concatenations" in saving.what
    assert "each chain of them takes as long as its longest kernel" in saving.what


@pytest.mark.parametrize(
    ("kernels", "shapes"),
    [
        ([("aten::mul", made.RELU, 100), ("aten::mm", made.GEMM, 300), ("aten::add", made.RELU, 100)], None),
        ([("aten::mul", made.RELU, 100), ("aten::add", made.RELU, 9)], None),  # memory takes as long as bytes are many
        ([("aten::mul", made.RELU, 100), ("aten::add", made.RELU, 90)], [[4096, 64], [64, 64]]),
        ([("aten::add_", made.RELU, 50)] * 8, None),  # equal calls
        ([("aten::batch_norm", BATCH_NORM, 100), ("aten::batch_norm", BATCH_NORM, 90)], None),
    ],
)
def test_kernels_apart_are_no_chain(tmp_path, kernels, shapes):
    assert set(away(chain(tmp_path, kernels, shapes=shapes)).values()) == {0.0}


SUM = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>"
WHERE = [("aten::gt", made.RELU, 3), ("aten::where", made.RELU, 5)]
BEFORE = [("aten::div", made.RELU, 990), ("aten::exp", made.RELU, 1000)]
AFTER = [("aten::mul", made.RELU, 980), ("aten::sum", SUM, 450)]


def test_far_shorter_kernels_of_a_mask_stay_beside_their_chain(tmp_path):
    """The reduction at its end is fused with what makes its values; the mask is a chain of its own."""
    run = chain(tmp_path, [*BEFORE, *WHERE, *AFTER], step_us=6000)
    assert sum(away(run).values()) == pytest.approx(990 + 980 + 450 + 3)
    assert away(run)["aten::sum"] > 300


@pytest.mark.parametrize(
    ("kernels", "saved_us"),
    [
        ([*BEFORE, *WHERE, ("aten::copy_", made.COPY, 3), *AFTER], 990 + 450 + 3),
        ([*BEFORE, ("aten::mm", made.GEMM, 5), *AFTER], 990 + 450),
        ([*BEFORE, ("aten::gt", made.RELU, 30), *AFTER], 990 + 450),  # of the shortest of the chains that is too long
        ([*BEFORE, *[("aten::gt", made.RELU, 1)] * 5, *AFTER], 990 + 450),  # as many may be more than a mask
        ([*BEFORE, *WHERE, *BEFORE], 2 * 990 + 3),  # another pass
        ([*BEFORE, *WHERE, *AFTER[:1], *WHERE, *BEFORE], 2 * 990 + 980 + 2 * 3),
        ([*AFTER, *WHERE, *BEFORE], 450 + 990 + 3),  # the mask may be made of the sum
        ([*BEFORE, *WHERE, ("aten::add", made.RELU, 200)], 990 + 3),  # another tensor
    ],
)
def test_chains_apart_are_not_joined(tmp_path, kernels, saved_us):
    assert sum(away(chain(tmp_path, kernels, step_us=9000)).values()) == pytest.approx(saved_us)


@pytest.mark.parametrize("recorded", [True, False])
def test_launches_whose_kernels_are_not_recorded_hold_up_no_chain(tmp_path, recorded):
    """The host launches a chain of 4 ms at once, then other work for as long, the kernels of which the trace lacks."""
    trace = Made()
    for n in range(12):  # not of the chain
        trace.kernel(made.GEMM, 80 + n, 1, n - 30)
    for n, op in enumerate(("aten::div", "aten::mul", "aten::exp", "aten::sub")):
        trace.op(op, 20 * n, 15)
        trace.kernel(made.RELU, 100 + 1000 * n, 1000, 20 * n + 2)
    for n in range(40):
        trace.op("aten::relu", 100 + 100 * n, 95)
        if recorded:
            trace.kernel(made.RELU, 4100 + n, 1, 102 + 100 * n)
        else:
            trace.event("call", "cudaLaunchKernel", 102 + 100 * n, 2, 1, correlation=5 + n)
    saving = possible_savings(run_of(tmp_path, trace)).of("memory-bound-kernels", MemorySaving)
    assert saving.saved_us == pytest.approx(240 if recorded else 3000, rel=0.01)


@pytest.mark.parametrize(("top", "fuses"), [("aten::conv2d", False), ("MulBackward0", True)])
def test_kernels_within_a_library_are_no_chain(tmp_path, top, fuses):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op(top, 0, 40)
    for n, op in enumerate(("aten::div", "aten::mul", "aten::exp", "aten::sub")):
        trace.op(op, 5 + 8 * n, 6)
        trace.kernel(made.RELU, 100 + 200 * n, 200, 7 + 8 * n)
    run = run_of(tmp_path, trace)
    assert kernel_rows(run)["fused_away_us"].sum() == pytest.approx(600.0 if fuses else 0.0)
    assert ("memory-bound-kernels" in [f.code for f in diagnose(run)]) == fuses


@pytest.mark.parametrize(("gap_us", "saved_us"), [(0, 700.0), (70, 125.0)])
def test_products_save_no_more_than_a_replay_of_the_launches(tmp_path, gap_us, saved_us):
    # Ten products of 80 µs each; the host launches one in `gap_us`, and takes that long even if they take no time.
    trace = Made()
    for n in range(10):
        at = 5 * n + gap_us * n
        trace.op("aten::mm", at, 4, **{"Input Dims": [[512, 512]] * 2, "Input type": ["float"] * 2})
        trace.kernel(made.SIMT, 100 + 80 * n, 80, at)
    saving = possible_savings(run_of(tmp_path, trace)).of("fp32-products", ProductSaving)
    assert saving.saved_us == pytest.approx(saved_us, rel=0.15)
    assert ("until the device waits for the host" in saving.what) == (gap_us > 0)
