"""What is told of products that leave most of a GPU idle or use all of it, and of kernels that no compiler fuses."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of, write

A100, H100 = ("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA H100 80GB HBM3", (9, 0))
BF16 = ["c10::BFloat16"] * 2
TENSILE = "Cijk_Ailk_Bljk_BBS_BH_MT256x128x64_MI16x16x16x1_SN_GSU{parts}_GSUAMB_ISA942_IU1_K1_SK{stream}_WG64_4_1"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"


def products_of(factors, kernel, us=1000.0, calls=10):
    """Products of one kernel, one after the other."""
    trace = Made()
    for n in range(calls):
        trace.op("aten::mm", 10 + 10 * n, 8, **{"Input Dims": factors, "Input type": BF16})
        trace.kernel(kernel, 100 + us * n, us, 12 + 10 * n)
    return trace


@pytest.mark.parametrize(
    ("columns", "parts", "stream", "says"),
    [
        (512, 2, 0, "8 blocks for the 38 compute units or more of a gfx942 GPU, of which it uses 21.1 % at most"),
        (512, 16, 0, ""),
        (8192, 2, 0, ""),
        (512, 2, 3, ""),  # which divides the work otherwise
    ],
)
def test_a_product_of_few_tiles_does_not_fill_a_gpu_that_is_not_named(tmp_path, columns, parts, stream, says):
    kernel = TENSILE.format(parts=parts, stream=stream)
    run = run_of(tmp_path, products_of([[256, 131072], [131072, columns]], kernel), gpu="")
    told = first_sentence(run)
    assert says in told and ("Profile it alone" in told) == (not says) and ("at most: splitting" in told) == bool(says)


def test_a_damaged_number_of_multiprocessors_tells_no_blocks(tmp_path):
    trace = products_of([[256, 512]] * 2, made.GEMM)
    for event in trace.events:
        event.get("args", {}).pop("Input Dims", None)
        if event["cat"] == "kernel":
            event["args"]["blocks per SM"] = 0.07
    properties = {"name": A100[0], "computeMajor": 8, "computeMinor": 0}
    for count, told in ((108, True), (167936, False)):
        document = trace.document(deviceProperties=[{**properties, "numSms": count}])
        run = load_run(import_traces([write(tmp_path / f"{count}.json", document)], tmp_path / str(count)))
        assert ("It has 8 blocks for the 108 multiprocessors of the GPU" in first_sentence(run)) == told


@pytest.mark.parametrize(("depth", "splits"), [(131072, True), (512, False)])
def test_long_sums_of_a_small_result_are_told_to_be_split(tmp_path, depth, splits):
    trace = products_of([[256, depth], [depth, 512]], made.GEMM)
    for event in trace.events:
        if event["cat"] == "kernel":
            event["args"]["blocks per SM"] = 0.07
    finding = finding_of(run_of(tmp_path, trace, *A100), "slow-products")
    assert ("Split the sums" in finding.advice) == splits == ("unflatten" in finding.snippet)


@pytest.mark.parametrize(("gpu", "says"), [(A100, "in INT8, which this GPU multiplies 2.0 ×"), (H100, "in FP8"),
                                           (("Tesla V100-SXM2-32GB", (7, 0)), "")])  # fmt: skip
def test_products_of_unknown_sizes_are_told_to_keep_the_gpu_busy(tmp_path, gpu, says):
    trace = Made()
    for n in range(10):
        trace.op("Torch-Compiled Region", 10 + 10 * n, 8)
        trace.kernel(made.GEMM, 100 + 1000 * n, 1000, 12 + 10 * n)
    told = first_sentence(run_of(tmp_path, trace, *gpu))
    assert "efficiency is unknown" in told and "The device is busy for 100 % of the profiled window." in told
    assert says in told and ("half as long" in told) == bool(says)


@pytest.mark.parametrize(("op", "kernel"), [("aten::topk", "void at::native::sbtopk::gatherTopK<c10::BFloat16>"),
                                            ("aten::sort", "void at::native::radixSortKVInPlace<float>"),
                                            ("aten::gelu", GELU)])  # fmt: skip
def test_sorts_are_not_counted_among_what_compilers_fuse(tmp_path, op, kernel):
    trace = Made()
    for n in range(10):
        rows = 65536 + n % 2  # one call again and again has nothing to be fused with
        trace.op(op, 10 + 10 * n, 8, **{"Input Dims": [[rows, 512]], "Input type": BF16[:1]})
        trace.kernel(kernel, 200 + 100 * n, 100, 12 + 10 * n)
    codes = {finding.code for finding in diagnose(run_of(tmp_path, trace, *A100))}
    assert ("memory-bound-kernels" in codes) == (op == "aten::gelu")


@pytest.mark.parametrize(("us", "starts"), [(3.0, True), (9.0, False)])
def test_kernels_as_short_as_any_are_not_called_memory_bound(tmp_path, us, starts):
    """Elementwise kernels of twelve kinds between products, launched far ahead, half of all kernels."""
    trace = Made()
    for n in range(240):
        trace.op("aten::mul", 2 * n, 2)
        trace.kernel(f"{GELU.removesuffix('>')}{n % 12}>", 2000 + 20 * n, us, 2 * n + 0.5, call_us=0.2)
        trace.kernel(made.GEMM, 2000 + us + 20 * n, 20 - us, 2 * n + 1, call_us=0.2)
    finding = finding_of(run_of(tmp_path, trace, *A100), "memory-bound-kernels")
    assert ("memory-bound" not in finding.advice) == starts == ("starting them takes their time" in finding.advice)
    assert ("most are so short that starting them takes" in finding.title) == starts
    assert ("memory traffic" not in finding.title) == starts


EXPERTS = ((32, 1, 512), (32, 512, 1024))


@pytest.mark.parametrize(("values", "is_attention"), [([4, 128], False), ([32, 1, 1025], True), (None, True)])
def test_the_softmax_of_a_router_makes_products_no_attention(tmp_path, values, is_attention):
    trace = Made()
    trace.op("aten::_softmax", 0, 8, **({"Input Dims": [values], "Input type": BF16[:1]} if values else {}))
    trace.kernel("softmax_warp_forward", 100, 20, 2)
    trace.op("aten::bmm", 10, 8, **{"Input Dims": [list(shape) for shape in EXPERTS], "Input type": BF16})
    trace.kernel(made.GEMM, 120, 60, 12)
    trace.op("aten::bmm", 20, 8, **{"Input Dims": [[32, 1, 1024], [32, 1024, 512]], "Input type": BF16})
    trace.kernel(made.GEMM, 180, 60, 22)
    finding = finding_of(run_of(tmp_path, trace, *A100), "slow-products")
    assert ("scaled_dot_product_attention" in finding.snippet) == is_attention


def test_products_by_gathered_weights_are_told_a_grouped_product(tmp_path):
    trace = Made()
    trace.op("aten::index", 0, 8, **{"Input Dims": [[128, 512, 1024], []], "Input type": ["c10::BFloat16", ""]})
    trace.kernel("void at::native::vectorized_gather_kernel<16, long>", 100, 50, 2)
    trace.op("aten::bmm", 10, 8, **{"Input Dims": [list(shape) for shape in EXPERTS], "Input type": BF16})
    trace.kernel(made.GEMM, 150, 90, 12)
    run = run_of(tmp_path, trace, *A100)
    assert "for each of 32 products, from 128" in first_sentence(run)
    assert "grouped_mm" in finding_of(run, "slow-products").snippet


def joins(shapes, *, backward=False):
    """Concatenations of such inputs, 100 µs each, beside other kernels that memory bounds."""
    trace = Made()
    for n, inputs in enumerate(shapes):
        trace.op("aten::cat", 20 * n, 8, **{"Input Dims": [inputs, []], "Input type": ["TensorList", "Scalar"]})
        trace.kernel("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", 500 + 200 * n, 100, 20 * n)
        if backward:
            trace.op("MmBackward0", 20 * n + 9, 9)
        trace.op("aten::gelu", 20 * n + 10, 8)
        trace.kernel(GELU, 600 + 200 * n, 100, 20 * n + 11)
    return trace


@pytest.mark.parametrize(
    ("growing", "backward", "told"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_concatenations_that_grow_are_told_to_be_made_once(tmp_path, growing, backward, told):
    """Each joins rows to the result of the one before; or all join as many."""
    shapes = [[[100000 + 1000 * n * growing, 80], [1000, 80]] for n in range(6)]
    finding = finding_of(run_of(tmp_path, joins(shapes, backward=backward), *A100), "memory-bound-kernels")
    assert ("Another 50 % of the profiled window is in concatenations that each copy" in finding.advice) == told
    assert ("concatenations" in finding.title) != told


@pytest.mark.parametrize(("columns", "us", "pads"), [(1025, 100.0, True), (1024, 100.0, False)])
def test_products_of_a_device_that_is_not_named_are_told_beside_what_their_kernels_are_for(tmp_path, columns, us, pads):
    kernel = TENSILE.format(parts=1, stream=0)
    trace = products_of([[1024, 8192], [8192, columns]], kernel, us=us)
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    share = 2 * 1024 * 8192 * columns / (us * 1e6) / 1307.4
    assert f"{100 * share:.1f} % of the peak of a whole MI300X; the device is not named" in sentence
    assert "the kernels are compiled for gfx942" in sentence and "as with rocprofv3" in sentence
    assert ("pad them (M 1024 · N 1032 · K 8192)" in sentence) == pads


@pytest.mark.parametrize(("us", "told"), [(200, True), (900, False)])
def test_memory_bounds_only_products_that_move_their_matrices_at_much_of_its_rate(tmp_path, us, told):
    """9 rows by weights of 64 MiB, which an A100 with 2,039 GB/s reads in 33 µs; others' reasons are not known."""
    trace = Made()
    for n in range(10):
        trace.op("aten::mm", 10 * n, 8, **{"Input Dims": [[9, 4096], [4096, 32768]], "Input type": ["float"] * 2})
        trace.kernel(made.SIMT, 200 + (us + 200) * n, us + 200, 10 * n + 2)
    sentence = first_sentence(run_of(tmp_path, trace, *A100))
    assert "in FP32; by the data sheet, 16 bits are 2.0 × as fast" in sentence
    assert ("since memory bounds most of these products" in sentence) == told
