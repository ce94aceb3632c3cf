"""What is advised where the trace itself shows the cause: hosts within launching operators, replays, whole waves."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_told_products import A100, BF16, H100, TENSILE, products_of

TURNED = "batched_transpose_64x64_pack_8x8_ediv_2x2_half"


@pytest.mark.parametrize(
    ("longer", "says"), [(True, "operators that launch work themselves"), (False, "preprocessing")]
)
def test_a_host_that_is_late_within_launching_operators_is_not_said_to_do_something_else(tmp_path, longer, says):
    trace = Made()
    for n in range(4):
        trace.op("aten::mul_" if longer else "aten::add", 2000 * n, 1900 if longer else 20)
        trace.kernel(made.RELU, 2000 * n + 15, 300, 2000 * n + 10)
    assert says in finding_of(run_of(tmp_path, trace, *H100), "host-bound").advice


@pytest.mark.parametrize(("op", "told"), [("aten::mm", False), ("aten::miopen_convolution", True)])
def test_transposes_of_products_are_no_layout_conversions_for_convolutions(tmp_path, op, told):
    trace = Made()
    for n in range(4):
        trace.op(op, 10 + 10 * n, 8)
        trace.kernel(TURNED, 100 + 100 * n, 100, 12 + 10 * n)
    run = run_of(tmp_path, trace, "AMD Instinct MI300X")
    assert ("layout-transposes" in {finding.code for finding in diagnose(run)}) == told


@pytest.mark.parametrize(("blocks", "says"), [(0.97, "the library's choice of a kernel"), (0.3, "too little work")])
def test_a_product_whose_blocks_fill_a_gpu_has_enough_work(tmp_path, blocks, says):
    """17.2 GFLOP need 29 µs at 60 % of an H100's peak, and take 320."""
    trace = products_of([[1024, 4096], [4096, 2048]], made.GEMM, us=320.0)
    for event in trace.events:
        if event["cat"] == "kernel":
            event["args"]["blocks per SM"] = blocks
    assert says in finding_of(run_of(tmp_path, trace, *H100), "slow-products").advice


def test_products_of_unknown_efficiency_come_before_a_far_smaller_saving(tmp_path):
    """Idle for 900 of 4,100 µs, which is 22 %, and products of a device that is not named for the rest."""
    trace = Made()
    for n in range(4):
        trace.op("aten::mm", 1100 * n, 20, **{"Input Dims": [[4096, 4096]] * 2, "Input type": BF16})
        trace.kernel(made.GEMM, 1100 * n + 10, 800, 1100 * n + 5)
    told = first_sentence(run_of(tmp_path, trace, gpu=""))
    assert told.startswith("GEMM/conv takes 78.0 %")
    assert "Beside it, the largest possible saving: the GPU is idle" in told


def test_products_far_below_the_peak_of_an_unnamed_gpu_could_be_faster_beside_idle_time(tmp_path):
    trace = products_of([[1024, 8192], [8192, 1024]], TENSILE.format(parts=1, stream=0), us=100.0, calls=4)
    trace.op("aten::mm", 700, 20, **{"Input Dims": [[1024, 8192], [8192, 1024]], "Input type": BF16})
    trace.kernel(TENSILE.format(parts=1, stream=0), 560, 100, 555)
    told = first_sentence(run_of(tmp_path, trace, gpu=""))
    assert "So far below the peak, it is what could be faster. Beside it, the largest possible saving" in told


@pytest.mark.parametrize(("kernel", "checks"), [(made.RELU, False), ("void at::native::elementwise_kernel<128>", True)])
def test_vectorized_kernels_show_that_rows_are_contiguous(tmp_path, kernel, checks):
    """Each reads and writes 2.1 GB in 4 ms: 1,074 of the 2,039 GB/s of an A100."""
    trace = Made()
    for n in range(4):
        trace.op("aten::add", 10 + 10 * n, 8, **{"Input Dims": [[2**28], [2**28]], "Input type": ["float"] * 2})
        trace.kernel(kernel, 100 + 4000 * n, 4000, 12 + 10 * n)
    told = first_sentence(run_of(tmp_path, trace, *A100))
    assert ("Check the clocks" in told, "contiguous" in told) == (True, checks)
