"""What diagnose says of the kernels and operators of a trace."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, finding_of, products, run_of, write


@pytest.mark.parametrize(("us", "named"), [(700, True), (300, False)])
def test_a_kernel_of_ones_own_with_most_of_the_step_is_named_before_a_smaller_saving(tmp_path, us, named):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel("matmul_k", 10, us, 2)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("on matrix cores is unknown: matmul_k. Profile it alone" in sentence) == named
    assert "argest possible saving: the GPU is idle for" in sentence


@pytest.mark.parametrize(("softmax_us", "says"), [(300, "in one kernel"), (20, "Pad them")])
def test_attention_in_steps_is_told_to_take_one_kernel(tmp_path, softmax_us, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    shapes = [[16, 5185, 64], [16, 64, 5185]]
    trace.op("aten::bmm", 1, 8, **{"Input type": ["c10::Half"] * 2, "Input Dims": shapes})
    trace.kernel(made.GEMM, 10, 600, 2)
    trace.op("aten::_softmax", 11, 8, **{"Input type": ["c10::Half"]})
    softmax = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::Half, float, c10::Half>"
    trace.kernel(softmax, 610, softmax_us, 12)
    findings = diagnose(run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB"))
    (finding,) = [f for f in findings if f.code in ("memory-bound-kernels", "slow-products")]
    assert says in finding.advice
    assert finding.code == ("memory-bound-kernels" if softmax_us > 100 else "slow-products")
    # One fused kernel needs no softmax at all, and is taken to multiply at half of the peak rate.
    fused_us = 2 * 16 * 5185**2 * 64 / (0.5 * 312e6)
    assert softmax_us < 100 or finding.win_ms == pytest.approx((softmax_us + 600 - fused_us) / 1e3)


def test_an_operator_that_takes_most_of_a_step_with_nothing_to_save_is_named(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::index", 1, 5)
    trace.kernel("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)", 3, 650, 2)
    trace.op("aten::bmm", 7, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 653, 347, 8)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert (
        "of the step: aten::index takes 65.2 % of the kernel time, and GEMM/conv takes 34.7 % of the step" in sentence
    )


def test_concatenations_are_no_layout_changes_of_convolutions(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::cat", 1, 8)
    trace.kernel("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>", 10, 990, 2)
    assert not [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "layout-transposes"]


@pytest.mark.parametrize(("kernel_us", "waits"), [(100, True), (450, False)])
def test_layout_changes_of_convolutions_tell_their_time_of_the_step(tmp_path, kernel_us, waits):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for at in (10, 510):
        trace.op("aten::cudnn_convolution", at - 5, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>", at, kernel_us, at - 3)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "layout-transposes"]
    saved = f"could save up to {2 * kernel_us / 1e3:.3f} of 1.00 ms"
    assert finding.title.endswith(saved + (", once the device no longer waits" if waits else ""))


def test_layout_changes_that_are_nothing_of_the_step_are_not_told(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100_000, 1)
    for at in (10, 90_000):
        trace.op("aten::cudnn_convolution", at - 5, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>", at, 100, at - 3)
    assert not [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "layout-transposes"]


def test_operators_that_compiled_code_does_not_fuse_need_another_backend(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("CompiledFunctionBackward", 1, 8)
    trace.kernel(made.RELU, 10, 480, 2)
    trace.kernel(made.RELU, 490, 500, 4)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "memory-bound-kernels"]
    assert finding.where == "CompiledFunctionBackward" and "inductor" in finding.snippet


@pytest.mark.parametrize(
    ("gpu", "capability", "compiles"),
    [("Tesla P100-PCIE-16GB", (6, 0), False), ("Tesla V100-SXM2-32GB", (7, 0), True)],
)
def test_a_gpu_that_is_too_old_for_triton_is_not_told_to_compile(tmp_path, gpu, capability, compiles):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for at in (10, 500):
        trace.op("aten::relu", at - 8, 4)
        trace.kernel(made.RELU, at, 480, at - 6)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace, gpu, capability)) if f.code == "memory-bound-kernels"]
    assert ("torch.compile" in finding.snippet) == compiles


def test_a_kernel_alone_has_nothing_to_fuse_with(tmp_path):
    trace = Made()
    trace.event("kernel", made.GEMM, 0, 4_000, "stream 7", correlation=5, device=0, stream=7)
    trace.kernel(made.RELU, 4_000, 1_000, 10)
    run = run_of(tmp_path, trace)
    sentence = first_sentence(run)
    assert "No single change would save 5.00 % or more of the profiled window: vectorized_elementwise_k" in sentence
    assert "takes 100 % of the kernel time. Left out are the 4.00 ms before" in sentence and "GEMM" not in sentence
    assert "memory-bound-kernels" not in {f.code for f in diagnose(run)}


@pytest.mark.parametrize(
    ("op", "shapes", "says"),
    [
        ("aten::mm", [[64, 64], [64, 60]], "multiple of 8"),
        ("aten::mm", [[64, 64], [64, 64]], "one product instead of three"),
        ("aten::bmm", [[8, 8, 64], [8, 64, 8]], "flatten(0, 1)"),
    ],
)
def test_slow_products_are_told_to_pad_only_what_is_unaligned(tmp_path, op, shapes, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op(op, 1, 8, **{"Input type": ["c10::Half"] * 2, "Input Dims": shapes})
    trace.kernel(made.GEMM, 10, 990, 2)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "slow-products"]
    assert says in finding.snippet and ("pad" in finding.snippet) == (shapes[1][-1] % 8 != 0)


def test_kernels_of_other_libraries_are_not_called_unfused(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("vllm::rms_norm", 1, 8)
    trace.kernel("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", 10, 990, 2)
    assert "memory-bound-kernels" not in [f.code for f in diagnose(run_of(tmp_path, trace))]


def test_a_little_tf32_is_no_finding(tmp_path):
    trace = products()
    trace.kernel("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_32x6_tn_align4>", 820, 2, 430)
    assert "tf32-baseline" not in [f.code for f in diagnose(run_of(tmp_path, trace))]


@pytest.mark.parametrize(
    ("op", "shapes", "type_", "us", "says", "refuted"),
    [
        ("aten::mm", [[4096, 4096], [4096, 4096]], "c10::Half", 9_000, "max-autotune", "larger batches, or merge"),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[1, 32, 4096, 256]] * 3,
            "c10::Half",
            90_000,
            "sdpa_kernel",
            "Few heads",
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[1, 1, 1, 64], [1, 1, 128, 64], [1, 1, 128, 64]],
            "c10::Half",
            900,
            "one call for several batches",
            "enough work",
        ),
    ],
)
def test_a_slow_call_with_much_work_is_not_told_to_have_little(tmp_path, op, shapes, type_, us, says, refuted):
    trace = Made()
    trace.op(op, 1, 8, **{"Input type": [type_] * len(shapes), "Input Dims": shapes})
    name = made.GEMM if op == "aten::mm" else "void pytorch_flash::flash_fwd_kernel<cutlass::half_t>(Flash_fwd_params)"
    trace.kernel(name, 10, us, 2)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "slow-products"]
    assert says in finding.snippet and refuted not in finding.advice


def test_only_a_gpu_of_amds_is_told_to_tune_its_library(tmp_path):
    trace = Made()
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2, "Input Dims": [[8192, 8192]] * 2})
    trace.kernel("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1", 10, 40_000, 2)
    (finding,) = [
        f for f in diagnose(run_of(tmp_path, trace, "AMD Instinct MI250X", (9, 0))) if f.code == "slow-products"
    ]
    assert "tunable" in finding.snippet


@pytest.mark.parametrize(("narrow_us", "told"), [(300, True), (50, False)])
def test_products_beside_others_in_16_bits_are_told_to_be_left_over(tmp_path, narrow_us, told):
    trace = products(backward=True)
    trace.op("aten::bmm", 425, 5, **{"Input type": ["c10::Half"] * 2})
    trace.kernel("volta_h884gemm_128x64_ldg8_nn", 810, narrow_us, 427)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "fp32-products"]
    assert ("in 16 bits already" in finding.advice and "aten::mm" in finding.advice) == told
    assert ("dtype=torch.float16" in finding.snippet) or not told


SGD = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<float, 2, 2, 0>>"


@pytest.mark.parametrize(("second", "told"), [(SGD, False), (made.RELU, True)])
def test_plain_sgd_in_one_kernel_is_no_unfused_optimizer(tmp_path, second, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(made.GEMM, 10, 600, 2)
    for at, name in ((610, SGD), (800, second)):
        trace.kernel(name, at, 190, 3)
    trace.event("mark", "Optimizer.step#SGD.step", 2.5, 3, 1)
    codes = {f.code for f in diagnose(run_of(tmp_path, trace))}
    assert ("unfused-optimizer" in codes) == told


@pytest.mark.parametrize(
    ("query", "blocks", "is_full"),
    [
        ([1024, 8, 7, 16], None, True),  # short sequences, and a block for each of 8,192 heads
        ([1, 8, 7, 16], 75.9, True),
        ([1, 8, 7, 16], None, False),
        ([1024, 8, 7, 16], 0.2, False),
    ],
)
def test_attention_whose_blocks_fill_the_gpu_is_not_told_to_have_few(tmp_path, query, blocks, is_full):
    trace = Made()
    op = "aten::_scaled_dot_product_flash_attention"
    trace.op(op, 1, 8, **{"Input type": ["c10::Half"] * 3, "Input Dims": [query, [1, 8, 512, 16], [1, 8, 512, 16]]})
    trace.kernel("void pytorch_flash::flash_fwd_kernel<cutlass::half_t>(Flash_fwd_params)", 10, 9_000, 2)
    if blocks is not None:
        trace.events[-1]["args"]["blocks per SM"] = blocks
    run = load_run(import_traces([write(tmp_path / "t.json", trace.document())], tmp_path / "run"))
    (finding,) = [f for f in diagnose(run) if f.code == "slow-products"]
    assert ("have enough work" in finding.advice) == is_full and ("Few heads" in finding.advice) != is_full


@pytest.mark.parametrize(
    ("gpu", "shapes", "says"),
    [
        ("", [[64, 131072], [131072, 64]], "at 1.08 TFLOP/s; the device is not named in the trace"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", [[64, 131072], [131072, 64]], "the device has no data sheet here"),
        ("Tesla V100-SXM2-32GB", None, "its operations cannot be counted from the trace"),
    ],
)
def test_an_efficiency_that_is_not_known_is_said_to_be(tmp_path, gpu, shapes, says):
    trace = Made()
    dims = {"Input Dims": shapes} if shapes else {}
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2}, **dims)
    trace.kernel(made.GEMM, 10, 990, 2)
    sentence = first_sentence(run_of(tmp_path, trace, gpu))
    assert sentence.startswith("Nothing beside GEMM/conv would save 5.00 % or more of the profiled window: it takes")
    assert says in sentence and f"One kernel takes 100 %: {made.GEMM}. Profile it alone" in sentence


def test_kernels_in_fp64_are_told_with_what_moves_their_bytes(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::upsample_bilinear2d", 1, 8)
    trace.kernel("void at::native::elementwise_upsample_bilinear2d<double, double>(int)", 10, 80, 2)
    trace.kernel(made.RELU, 90, 900, 3)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "memory-bound-kernels"]
    assert "Here: FP64 takes 8 % of the step, most in aten::upsample_bilinear2d" in finding.advice


@pytest.mark.parametrize(("kernel", "capability", "says", "saved"), [
    ("void at::native::elementwise_upsample_bilinear2d<double, double>(int)", (8, 6), "FP32 has half the bytes", 240),
    ("ampere_dgemm_64x64_tn", (8, 0), "FP32 is 2 × as fast or more", 240),
    ("ampere_dgemm_64x64_tn", (8, 6), "FP32 is 32 × as fast or more", 465),
])  # fmt: skip
def test_kernels_in_fp64_are_a_finding_of_their_own(tmp_path, kernel, capability, says, saved):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::upsample_bilinear2d" if "bilinear" in kernel else "aten::mm", 1, 8)
    trace.kernel(kernel, 10, 480, 2)
    trace.kernel(made.GEMM, 490, 500, 10)
    found = {f.code: f for f in diagnose(run_of(tmp_path, trace, "NVIDIA GPU", capability))}
    finding = found["fp64-operators"]
    assert finding.title.startswith("Kernels in FP64 take 48 % of the step, in aten::") and says in finding.title
    assert finding.win_ms == pytest.approx(saved / 1e3, abs=1e-3) and "NumPy" in finding.advice
    assert all("Here: FP64" not in one.advice for one in found.values())


def test_an_mtias_products_in_fp32_are_named_as_such(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    for at, us, name in ((0, 6000, "fc-dtype_Float"), (6000, 500, "dma_request"), (6500, 500, "add-dtype_Float")):
        trace.event("mtia_ccp_events", name, at, us, 9)
    run = run_of(tmp_path, trace, gpu="")
    sentence = first_sentence(run)
    assert "multiplies matrices in FP32, whether on matrix cores is unknown: fc-dtype_Float" in sentence
    kernels = run.kernels.set_index("name")
    assert kernels["tensor_core"].to_dict() == {
        "fc-dtype_Float": "unknown",
        "dma_request": "no",
        "add-dtype_Float": "no",
    }


@pytest.mark.parametrize(("recorded", "says"), [(1, "ncu"), (0, "record_shapes=True")])
def test_shapes_that_were_recorded_are_not_asked_for(tmp_path, recorded, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel("matmul_k", 10, 900, 2)
    run = load_run(
        import_traces([write(tmp_path / "t.json", trace.document(record_shapes=recorded))], tmp_path / "run")
    )
    (finding,) = [f for f in diagnose(run) if f.code == "unknown-kernels"]
    assert says in finding.snippet


def test_products_of_an_unknown_type_are_told_as_products(tmp_path):
    """Kernels that Inductor generates: their names tell the operators, but no types."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for number in range(8):
        trace.kernel("triton_tem_fused_convolution_view_3", 40 + 120 * number, 90, 2 + 4 * number)
        trace.kernel("mystery", 130 + 120 * number, 30, 4 + 4 * number)
    run = run_of(tmp_path, trace)
    told = first_sentence(run)
    assert "GEMM/conv takes 72.0 % of it in kernels whose names tell neither their precision nor whether they" in told
    assert "If their inputs are FP32, 16 bits may save much of this" in told and "mystery takes 24.0 %." in told
    (finding,) = [f for f in diagnose(run) if f.code == "unknown-kernels"]
    assert "whose names do not tell whether they use matrix cores" in finding.title
    assert finding.where == "triton_tem_fused_convolution_view_3"


def test_kernels_of_a_registered_operator_are_not_to_be_compiled_around(tmp_path):
    """torch.compile does not look into the operator that launches them."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for number in range(6):
        at = 150 * number
        trace.op("splat::rasterize", at, 20)
        for kernel in range(3):
            trace.op("aten::mul", at + 1 + 6 * kernel, 5)
            trace.kernel(made.RELU, at + 10 + 30 * kernel, 30, at + 2 + 6 * kernel)
        trace.kernel("void splat::rasterize_kernel<5u>(float*)", at + 100, 40, at + 19, call_us=1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "memory-bound-kernels"]
    assert "splat::rasterize launches them, an operator of its own" in finding.advice
    assert "torch.compile(" not in finding.snippet


def test_a_long_kernel_of_the_programs_own_is_told_before_small_savings(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("splat::rasterize", 0, 8)
    trace.kernel("void gsplat::rasterize_to_pixels_3dgs_fwd_kernel<5u>(float*)", 10, 700, 2)
    for number in range(4):
        trace.op("aten::mul", 10 + 10 * number, 8)
        trace.kernel(made.RELU, 710 + 60 * number, 60, 12 + 10 * number)
    told = first_sentence(run_of(tmp_path, trace))
    assert told.startswith(
        "One kernel takes 70.0 % of the step: gsplat::rasterize_to_pixels_3dgs_fwd_kernel<5u>. It is the program's own"
    )
    assert "Beside it, the largest possible saving: unfused norms" in told


def test_short_kernels_that_move_little_are_started_and_not_bound_by_memory(tmp_path):
    def advice(name, size):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        shapes = {"Input Dims": [[size], [size]], "Input type": ["float", "float"]}
        for number in range(100):
            trace.op(("aten::mul", "aten::add")[number % 2], 9 * number, 2, **shapes)
            trace.kernel(made.RELU, 9 * number + 5, 6, 9 * number + 0.5, call_us=1)
        found = [f for f in diagnose(run_of(tmp_path / name, trace)) if f.code == "memory-bound-kernels"]
        return found[0].advice

    assert "mostly so short that starting them takes their time" in advice("small", 1024)
    assert "memory-bound, so fewer passes over memory help, as do smaller dtypes" in advice("large", 500_000)


def test_layouts_of_images_are_not_advised_on_for_products(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::baddbmm", 1, 8, **{"Input type": ["c10::Half"] * 3})
    trace.kernel("ampere_fp16_sgemm_fp16_128x64_nn", 10, 900, 2)
    findings = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "kernels-off-tensor-cores"]
    assert findings and "channels_last" not in findings[0].snippet and "cuDNN" not in findings[0].advice


@pytest.mark.parametrize(
    ("op", "beside", "recorded", "says"),
    [
        ("mylib::matmul", False, 1, "ncu"),  # its shapes are there
        ("mylib::matmul", False, 0, "record_shapes=True"),
        ("", True, 0, "ncu"),  # operators were recorded, and none of them launched it
        ("", False, 0, "record_shapes=True"),
    ],
)
def test_shapes_are_asked_for_only_where_an_operator_may_have_them(tmp_path, op, beside, recorded, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    if op:
        trace.op(op, 1, 8)
    trace.kernel("matmul_k", 10, 800, 2)
    if beside:
        trace.op("aten::relu", 20, 8)
        trace.kernel(made.RELU, 810, 100, 21)
    file = write(tmp_path / "t.json", trace.document(**({"record_shapes": 1} if recorded else {})))
    (finding,) = [f for f in diagnose(load_run(import_traces([file], tmp_path / "run"))) if f.code == "unknown-kernels"]
    assert says in finding.snippet and ("Nsight Compute" in finding.advice) == (says == "ncu")


TF32 = "sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"


def in_tf32(tmp_path, name, beside=None):
    """A trace of products in TF32 with, after them, one by the kernel `beside`."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["float"] * 2})
    trace.kernel(TF32, 10, 600, 2)
    if beside:
        trace.op("aten::mm", 20, 8, **{"Input type": ["float" if beside == made.SIMT else "c10::Half"] * 2})
        trace.kernel(beside, 610, 300, 22)
    return load_run(import_traces([write(tmp_path / f"{name}.json", trace.document())], tmp_path / name))


@pytest.mark.parametrize(("beside", "told"), [(None, False), (made.SIMT, True), (made.GEMM, True)])
def test_tf32_of_a_trace_is_told_beside_another_precision_alone(tmp_path, beside, told):
    findings = diagnose(in_tf32(tmp_path, "tf32", beside))
    found = [f for f in findings if f.code == "tf32-baseline"]
    assert [f.severity for f in found] == ["info"] * told
    assert all(f.unit == "share of kernel time" for f in found)


def test_tf32_in_several_kernels_is_the_share_of_all_of_them(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for n, name in enumerate((TF32, TF32.replace("128x128x16", "64x64x16"), made.SIMT)):
        trace.op("aten::mm", 1 + 10 * n, 8, **{"Input type": ["float"] * 2})
        trace.kernel(name, 40 + 300 * n, 300, 2 + 10 * n)
    assert finding_of(run_of(tmp_path, trace), "tf32-baseline").unit == "share of kernel time, with 1 other"


def test_a_comparison_with_a_trace_in_tf32_says_so(tmp_path):
    fp16, tf32 = run_of(tmp_path, products(name=made.GEMM, dtype="c10::Half")), in_tf32(tmp_path, "baseline")
    (finding,) = [f for f in diagnose(fp16, tf32) if f.code == "tf32-baseline"]
    assert finding.severity == "info" and "of the baseline, baseline," in finding.title
    for run, baseline in ((tf32, fp16), (tf32, tf32)):
        assert not [f for f in diagnose(run, baseline) if f.code == "tf32-baseline"]


STATISTICS = "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(cudnn::bn_fw_tr_1C11_args<float>)"


@pytest.mark.parametrize(
    ("op", "kernel", "more", "told"),
    [
        ("aten::batch_norm", STATISTICS, "", True),
        (
            "aten::batch_norm",
            "_ZN5cudnn25bn_fw_tr_1C11_kernel_NCHWIffiLi32ELb1ELi1ELb1EEEv17cudnnTensorStruct",
            "",
            True,
        ),
        ("aten::batch_norm", "MIOpenBatchNormFwdTrainSpatial", "", True),
        ("aten::batch_norm", "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float)", "", False),
        ("aten::instance_norm", STATISTICS, "", False),
        ("aten::batch_norm", STATISTICS, "MmBackward0", False),
        ("aten::batch_norm", STATISTICS, "Optimizer.step#SGD.step", False),
    ],
)
def test_batch_norm_that_trains_is_told_of_inference_alone(tmp_path, op, kernel, more, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op(op, 1, 20)
    if op != "aten::batch_norm":
        trace.op("aten::batch_norm", 2, 18)
    trace.op("aten::cudnn_batch_norm", 3, 16)
    trace.kernel(kernel, 30, 400, 5)
    if more:
        trace.event("mark" if "#" in more else "op", more, 40, 40, 1)
        trace.op("aten::mul", 42, 20)
        trace.kernel(made.RELU, 440, 400, 45)
    findings = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "batchnorm-in-training-mode"]
    assert len(findings) == told
    assert all("model.eval()" in f.snippet for f in findings)


@pytest.mark.parametrize(("category", "names_tools"), [("cuda_runtime", True), ("mtia_runtime", False)])
def test_tools_for_a_gpu_are_named_for_gpus_alone(tmp_path, category, names_tools):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel("matmul_k", 10, 700, 2)
    for event in trace.events:
        event["cat"] = category if event["cat"] == "cuda_runtime" else event["cat"]
    assert ("Nsight" in first_sentence(run_of(tmp_path, trace))) == names_tools


TENSOR_OP = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(Params)"


@pytest.mark.parametrize(
    ("gpu", "capability", "name", "says"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), made.SIMT, "in 16 bits, or allow TF32."),
        ("NVIDIA GeForce RTX 4090", (8, 9), made.SIMT, "in 16 bits."),  # its data sheet gives both the same rate
        ("NVIDIA A100-SXM4-80GB", (8, 0), TENSOR_OP, "in 16 bits."),
        ("AMD Instinct MI300X", (9, 4), made.SIMT, "in 16 bits."),
        ("Tesla T4", (7, 5), "volta_sgemm_128x64_nn", "in FP16."),
        ("", (0, 0), made.SIMT, "in 16 bits, or allow TF32."),  # the kernel is Ampere's
        ("", (0, 0), "volta_sgemm_128x64_nn", "in FP16."),  # Volta's or Turing's
        ("", (0, 0), "void gemmSN_TN_kernel<float, 128>(float)", "allow TF32 on GPUs that support it"),
    ],
)
def test_tf32_is_advised_where_the_gpu_has_it_and_it_is_faster(tmp_path, gpu, capability, name, says):
    run = run_of(tmp_path, products(name=name), gpu, capability)
    (finding,) = [f for f in diagnose(run) if f.code == "fp32-products"]
    assert says in finding.advice
    trained = run_of(tmp_path / "trained", products(name=name, backward=True), gpu, capability)
    (finding,) = [f for f in diagnose(trained) if f.code == "fp32-products"]
    assert ("allow_tf32" in finding.snippet) == ("TF32" in says) and "autocast" in finding.snippet


def test_products_in_16_bits_off_matrix_cores_come_first_where_nothing_else_is_to_save(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::convolution_backward", 1, 8, **{"Input type": ["c10::Half"] * 3})
    trace.kernel("miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_f3x2_stride1", 5, 990, 2)
    run = run_of(tmp_path, trace, "AMD Instinct MI300X", (9, 4))
    assert first_sentence(run).startswith(
        "GEMM/conv in 16 bits takes 100 % of the kernel time without using matrix cores."
    )
    (finding,) = [f for f in diagnose(run) if f.code == "kernels-off-tensor-cores"]
    assert "MIOpen chose" in finding.advice


@pytest.mark.parametrize(("compiled", "says"), [(2, "compile the rest"), (1, "launched beside it"), (0, "Compile")])
def test_a_model_that_is_compiled_in_part_is_told_to_compile_the_rest(tmp_path, compiled, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for number in range(compiled):
        trace.op(f"Torch-Compiled Region: {number}/0", 40 + 3 * number, 2)
        trace.kernel("triton_poi_fused_add_0", 995 + 2 * number, 2, 41 + 3 * number, call_us=1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 490, 2)
    trace.op("aten::relu", 20, 8)
    trace.kernel(made.RELU, 500, 490, 22)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "memory-bound-kernels"]
    assert says in finding.advice


def test_an_operator_counts_with_its_twin_in_place(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for number, op in enumerate(("aten::add", "aten::add_", "aten::mul", "aten::copy_")):
        trace.op(op, 10 * number, 8)
        trace.kernel(made.RELU, 100 + 200 * number, 200 - 50 * (number == 2), 10 * number + 2)
    assert "aten::add with aten::add_ alone 40 %; fused" in first_sentence(run_of(tmp_path, trace))


def test_attention_in_tf32_is_no_product_in_tf32(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 0, 8, **{"Input type": ["float"] * 2})
    trace.kernel(made.SIMT, 50, 800, 2)
    trace.op("aten::_efficient_attention_forward", 10, 8, **{"Input type": ["float"] * 3})
    trace.kernel("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", 850, 100, 12)
    sentence = first_sentence(run_of(tmp_path, trace))
    in_three = "attention 10 % of the step in FP32 made of three products in TF32 each"
    assert f"GEMM/conv takes 80 % of the step in FP32, and {in_three}" in sentence


def test_attention_with_few_keys_is_held_against_what_memory_allows(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    sizes = {"Input Dims": [[1024, 4096, 8, 16], [1024, 7, 8, 16], [1024, 7, 8, 16]], "Input type": ["c10::Half"] * 3}
    trace.op("aten::_flash_attention_forward", 1, 8, **sizes)
    trace.kernel("void flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128, 128>>(P)", 100, 9_800, 2)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace, "NVIDIA A100-SXM4-40GB")) if f.code == "slow-products"]
    assert "runs at 0.49" in finding.title and "%, where memory allows 3.4" in finding.title


@pytest.mark.parametrize(("length", "told"), [(255, True), (256, False), (None, True)])
def test_layer_norms_whose_rows_bar_the_vectorized_kernel_are_told(tmp_path, length, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for n in range(3):
        dims = {"Input Dims": [[65_536, length], [length]]} if length else {}
        trace.op("aten::native_layer_norm", 1 + 20 * n, 18, **dims)
        for at, name, us in (
            (10, "RowwiseMomentsCUDAKernel<float, float>", 200),
            (210, "LayerNormForwardCUDAKernel", 90),
        ):
            trace.kernel(f"void at::native::(anonymous namespace)::{name}(long)", at + 300 * n, us, 2 + 20 * n)
    trace.op("aten::relu", 70, 8)
    trace.kernel(made.RELU, 910, 60, 72)
    advice = finding_of(run_of(tmp_path, trace), "memory-bound-kernels").advice
    assert ("60 % of the step is in the first of two kernels of each layer norm" in advice) == told
