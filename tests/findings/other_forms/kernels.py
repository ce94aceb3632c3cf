"""Faults that profiler traces and profiled runs show, with other GPUs, libraries and kernels than in the zoo."""

from __future__ import annotations

from amp_core.store.writer import RunWriter
from tests.findings.other_forms.form import fault
from tests.findings.zoo.hardware import A100, SGEMM, TENSOR, elementwise, gpu_run, kernel
from tests.findings.zoo.traces import import_into, product, step
from tests.traces import made

H100 = {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0"}
NVJET = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT"
FLASH = ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "yes", "bf16")
BF16_GEMM = ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas", "yes", "bf16")


def traced(into, length=2000, gpu="NVIDIA A100-SXM4-80GB"):
    """An empty trace of one step, and how to import it."""
    trace, head = step(length, gpu)
    return trace, lambda: import_into(into, trace, **head)


def elementwise_of(trace, op, name, at, us):
    trace.op(op, at - 200, 10)
    trace.kernel(name, at, us, at - 195)


@fault("device-not-recorded")
def launches_of_a_convolution_without_kernels(into):
    trace, done = traced(into)
    for at in (0, 400, 800):
        trace.op("aten::cudnn_convolution", at, 60)
        trace.kernel(made.GEMM, at + 10, 200, at + 5)
    trace.events = [event for event in trace.events if event["cat"] != "kernel"]
    done()


@fault("invalid-times", "cuda")
def kernels_that_all_start_at_the_epoch(into):
    trace, done = traced(into)
    for number in range(6):
        trace.op("aten::bmm", 300 * number, 60)
        trace.kernel(made.GEMM, -made.BASE, 250, 300 * number + 5)
    done()


@fault("invalid-times", "cuda:0")
def kernels_whose_clock_counts_days_later(into):
    trace, done = traced(into)
    for number in range(6):
        trace.op("aten::mm", 300 * number, 60)
        trace.kernel("my_kernel", 86_400e6 + 5_000 * number, 250, 300 * number + 5)
        trace.kernel(made.COPY, 300 * number + 40, 10, 300 * number + 30, sort="copy")
    done()


@fault("device-not-recorded")
def operators_of_an_accelerator_without_kernels(into):
    trace, done = traced(into)
    trace.op("aten::_scaled_dot_product_flash_attention", 10, 300)
    trace.op("aten::_flash_attention_forward", 20, 250)
    done()


@fault("waiting-for-data", "data loading")
def workers_that_deliver_late(into):
    trace, done = traced(into)
    trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 900, 1)
    product(trace, 920, 500, NVJET)
    product(trace, 1430, 560, NVJET)
    done()


@fault("waiting-for-data", "data loading")
def loader_in_the_middle_of_a_step(into):
    trace, done = traced(into)
    product(trace, 12, 800)
    trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 820, 700, 1)
    product(trace, 1540, 440)
    done()


@fault("host-bound", "host")
def tokenizing_between_backward_and_optimizer(into):
    trace, done = traced(into)
    product(trace, 10, 900)
    trace.event("mark", "Optimizer.step#SGD.step", 1700, 280, 1)
    trace.op("aten::_fused_sgd_", 1702, 10)
    trace.kernel(made.ADAM, 1710, 270, 1705)
    done()


@fault("host-bound", "host")
def two_pauses_of_python(into):
    trace, done = traced(into)
    for at in (10, 700, 1400):
        product(trace, at, 300, NVJET)
    done()


@fault("unexplained-idle", "host")
def device_alone_without_marks(into):
    trace, done = traced(into)
    product(trace, 10, 500)
    product(trace, 1200, 300, NVJET)
    trace.events = [event for event in trace.events if event["cat"] == "kernel"]
    done()


def _without_host(trace):
    """Only the work of the device and the marks of steps are left."""
    trace.events = [event for event in trace.events if event["cat"] in ("kernel", "user_annotation")]


@fault("unexplained-idle", "host")
def marked_steps_of_the_device_alone(into):
    trace, done = traced(into)
    for at in (10, 900, 1500):
        product(trace, at, 300, NVJET)
    _without_host(trace)
    done()


@fault("exposed-communication", made.NCCL)
def collectives_alone(into):
    trace, done = traced(into)
    for at in (10, 900, 1500):
        product(trace, at, 300, made.NCCL)
    _without_host(trace)
    done()


@fault("kernel-wait", "streams")
def kernels_of_a_queue_that_begins_late(into):
    trace, done = traced(into)
    product(trace, 10, 500)
    for number in range(3):
        trace.op("aten::bmm", 20 + 20 * number, 10)
        trace.kernel(NVJET, 1300 + 200 * number, 200, 25 + 20 * number)
    done()


@fault("kernel-wait", "streams")
def optimizer_that_waits_for_another_stream(into):
    trace, done = traced(into)
    product(trace, 10, 900)
    trace.op("aten::_fused_adamw_", 30, 10)
    trace.kernel(made.ADAM, 1500, 480, 35)
    done()


def _collective(into, name, at, us):
    trace, done = traced(into)
    product(trace, 10, at - 10)
    trace.kernel(name, at, us, 20)
    done()


@fault("exposed-communication", "ReduceScatter")
def reduce_scatter_after_backward(into):
    _collective(into, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1200, 780)


@fault("exposed-communication", "AllGather")
def all_gather_before_forward(into):
    _collective(into, "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", 1000, 900)


@fault("copies", "DtoH")
def activations_offloaded_to_the_host(into):
    trace, done = traced(into)
    product(trace, 10, 1000)
    trace.kernel("Memcpy DtoH (Device -> Pinned)", 1010, 900, 20, sort="copy")
    done()


@fault("copies", "DtoD")
def buffers_copied_within_the_device(into):
    trace, done = traced(into)
    product(trace, 10, 1200)
    trace.kernel("Memcpy DtoD (Device -> Device)", 1210, 700, 20, sort="copy")
    done()


@fault("fp32-products")
def products_in_tf32_on_an_a100(into):
    trace, done = traced(into)
    name = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x8_kernel"
    product(trace, 10, 1980, name, "float")
    done()


@fault("fp32-products")
def half_of_the_products_in_fp32(into):
    trace, done = traced(into, gpu="Tesla V100-SXM2-32GB")
    product(trace, 10, 900)
    product(trace, 911, 1070, "volta_sgemm_128x64_nt", "float")
    done()


@fault("slow-products", "aten::mm")
def small_product_in_bf16(into):
    trace, done = traced(into)
    product(trace, 10, 1980, "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "c10::BFloat16", size=2048)
    done()


@fault("slow-products", "aten::mm")
def product_of_half_a_step(into):
    trace, done = traced(into)
    product(trace, 10, 1000, size=8192)
    product(trace, 1010, 980, size=2048)
    done()


@fault("memory-bound-kernels", "aten::native_layer_norm")
def norms_in_kernels_of_their_own(into):
    trace, done = traced(into)
    product(trace, 10, 900)
    name = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>"
    elementwise_of(trace, "aten::native_layer_norm", name, 920, 1060)
    done()


@fault("memory-bound-kernels", "aten::_softmax")
def softmax_in_a_kernel_of_its_own(into):
    trace, done = traced(into)
    product(trace, 10, 900)
    name = "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 10, false, false>"
    elementwise_of(trace, "aten::_softmax", name, 920, 1060)
    done()


def _norm_that_trains(into, op, name):
    trace, done = traced(into)
    product(trace, 10, 1900)
    trace.op("aten::batch_norm", 20, 20)
    trace.op(op, 22, 16)
    trace.kernel(name, 1915, 80, 25)
    done()


@fault("batchnorm-in-training-mode", "aten::batch_norm")
def batch_norm_of_torch_that_trains(into):
    name = "void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, float, float, float, int>"
    _norm_that_trains(into, "aten::native_batch_norm", name)


@fault("batchnorm-in-training-mode", "aten::batch_norm")
def batch_norm_of_channels_last_that_trains(into):
    name = "void cudnn::batchnorm_fwtr_nhwc_semiPersist<__half, __half, float, float, true, 1, 512>"
    _norm_that_trains(into, "aten::cudnn_batch_norm", name)


def _optimizer(into, mark, op):
    trace, done = traced(into)
    product(trace, 10, 1200)
    trace.event("mark", mark, 1210, 700, 1)
    for number in range(4):
        trace.op(op, 1212 + 100 * number, 20)
        trace.kernel(made.ADAM, 1240 + 180 * number, 180, 1215 + 100 * number)
    done()


@fault("unfused-optimizer", "aten::_foreach_mul_")
def sgd_by_foreach(into):
    _optimizer(into, "Optimizer.step#SGD.step", "aten::_foreach_mul_")


@fault("unfused-optimizer", "aten::addcdiv_")
def adam_tensor_by_tensor(into):
    _optimizer(into, "Optimizer.step#Adam.step", "aten::addcdiv_")


def _unknown(into, *names):
    trace, done = traced(into)
    product(trace, 10, 700)
    for number, name in enumerate(names):
        trace.kernel(name, 720 + 400 * number, 390, 20 + 10 * number)
    done()


@fault("unknown-kernels", "wavefront_a")
def kernels_of_a_library_of_its_own(into):
    _unknown(into, "wavefront_a", "wavefront_b")


@fault("unknown-kernels", "kernel_0x3f")
def kernels_without_a_telling_name(into):
    _unknown(into, "kernel_0x3f", "kernel_0x40", "kernel_0x41")


@fault("no-tensor-cores-on-device", "P100")
def pascal(into):
    gpu_run(into, [kernel(SGEMM, 27_000.0)], gpu={"name": "Tesla P100-PCIE-16GB", "capability": "6.0"})


@fault("no-tensor-cores-on-device", "GTX 1660")
def turing_without_tensor_cores(into):
    gpu_run(into, [], "bf16", gpu={"name": "NVIDIA GeForce GTX 1660 Ti", "capability": "7.5"})


@fault("launch-bound", "forward")
def many_small_kernels_of_attention(into):
    rows = [kernel(FLASH, 2_000.0, count=900, op="aten::_flash_attention_forward"), elementwise(4_000.0, count=2400)]
    window = {"step": [10], "steps": [3], "device": ["cuda:0"], "wall_us": [30_000.0], "busy_us": [6_000.0]}
    gpu_run(into, rows, "bf16", H100, windows=window | {"idle_us": [24_000.0], "idle_data_us": [0.0]})


@fault("kernels-off-tensor-cores", "blocks.1.conv")
def depth_of_an_odd_convolution(into):
    off = ("void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, __half>", "no", "fp16")
    conv = kernel(off, 4000.0, op="aten::cudnn_convolution", category="conv", module="blocks.1.conv")
    gpu_run(into, [kernel(TENSOR, 6000.0), conv])


@fault("kernels-off-tensor-cores", "head")
def product_in_bf16_by_cutlass_without_tensor_cores(into):
    off = ("cutlass_80_simt_bgemm_128x128_8x4_nn_align1", "no", "bf16")
    gpu_run(into, [kernel(BF16_GEMM, 5000.0), kernel(off, 5000.0, module="head")], "bf16", H100)


@fault("unaligned-dims", "classifier")
def classes_of_an_odd_number(into):
    shapes = {"classifier.weight": [1001, 2048], "fc.weight": [2048, 512]}
    gpu_run(into, [], "bf16", H100, model={"layers": {"classifier": "Linear", "fc": "Linear"}, "shapes": shapes})


@fault("unaligned-dims", "patches")
def channels_of_an_odd_number(into):
    shapes = {"patches.weight": [510, 250, 7, 7], "fc.weight": [512, 512]}
    gpu_run(into, [], model={"layers": {"patches": "Conv2d", "fc": "Linear"}, "shapes": shapes})


def _layouts(into, name, module):
    turn = elementwise(2000.0, name, category="layout", op="aten::convolution_backward", module=module)
    gpu_run(into, [kernel(TENSOR, 7000.0), turn | {"phase": "backward"}])


@fault("layout-transposes", "stem")
def layouts_turned_in_backward(into):
    _layouts(into, "void cudnn::ops::nhwcToNchwKernel<__half, __half, float, false, true>", "stem")


@fault("layout-transposes", "decoder.up")
def layouts_turned_in_a_decoder(into):
    _layouts(into, "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float>", "decoder.up")


def _memory(into, activations, weights):
    row = {"step": 0, "number": 0, "device": "cuda:0", "allocated_bytes": activations + 4 * weights}
    row |= {"parameters_bytes": weights, "gradients_bytes": weights, "optimizer_bytes": 2 * weights}
    gpu_run(into, [], "bf16", H100, memory={c: [v] for c, v in (row | {"activations_bytes": activations}).items()})


@fault("memory-not-lower", "optimizer")
def weights_above_all(into):
    _memory(into, 500, 5000)


@fault("memory-not-lower", "optimizer")
def small_batches_of_a_large_model(into):
    _memory(into, 1900, 2000)


@fault("host-syncs", "synchronizing calls")
def boolean_indexing(into):
    window = {"step": [10], "steps": [3], "device": ["cuda:0"], "wall_us": [30_000.0], "busy_us": [29_000.0]}
    gpu_run(into, [kernel(BF16_GEMM, 29_000.0)], "bf16", H100, windows=window | {"syncs": [30]})


@fault("tf32-baseline", "blocks.0.mlp.up")
def convolutions_in_tf32(into):
    name = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckcrs_nhwc_tilesize128x128x16_stage4_kernel"
    gpu_run(into, [kernel((name, "yes", "tf32"), 8000.0, op="aten::cudnn_convolution", category="conv")], "fp32", A100)


def _watched_ms(into, step_ms, watch_ms):
    with RunWriter(into) as writer:
        writer.append("steps", {"step": range(60), "step_ms": [step_ms] * 60, "watch_ms": [watch_ms] * 60})


@fault("watch-overhead", "watch")
def slow_statistics_of_a_large_model(into):
    _watched_ms(into, 800.0, 90.0)


@fault("watch-overhead", "watch")
def recording_that_doubles_the_step(into):
    _watched_ms(into, 100.0, 50.0)


def _graphed(into, name):
    text = "make_graphed_callables does not support the autocast caching. Please set `cache_enabled=False`."
    writer = RunWriter(into, config={"autocast_dtype": name, "device": "cuda:0"})
    writer.append("steps", {"step": [0, 1, 2], "loss": [1.0, 0.9, 0.8]})
    writer.close("failed", f"RuntimeError: {text}")


@fault("graphed-callable-cache", "make_graphed_callables")
def graphed_callable_after_some_steps(into):
    _graphed(into, "float16")


@fault("graphed-callable-cache", "make_graphed_callables")
def graphed_callable_in_bf16(into):
    _graphed(into, "bfloat16")


@fault("uneven-device", "cuda:0")
def products_that_another_process_interrupts(into):
    trace, done = traced(into, 4000)
    at = 20.0
    for number in range(12):
        us = 900.0 if number % 4 == 2 else 120.0
        product(trace, at, us, NVJET)
        at += us
    done()


@fault("uneven-device", "cuda:0")
def elementwise_steps_of_a_hot_gpu(into):
    trace, done = traced(into, 0)
    trace.events, at = [], 0.0
    for number, us in enumerate((100, 100, 110, 130, 150, 170, 180)):
        trace.event("mark", f"ProfilerStep#{number}", at, 10 * us + 10, 1)
        for place in range(10):
            trace.op("aten::gelu", at + place, 0.6)
            trace.kernel("void GeluCUDAKernelImpl<float>", at + 12 + us * place, us - 1, at + place + 0.1, call_us=0.2)
        at += 10 * us + 20
    done()


@fault("scattered-writes", "aten::embedding_dense_backward")
def padding_in_the_gradient_of_an_embedding(into):
    trace, done = traced(into)
    product(trace, 10, 900, NVJET)
    trace.op("aten::embedding_dense_backward", 30, 5)
    trace.kernel("void embedding_backward_feature_kernel<float>", 920, 1000, 32)
    done()


@fault("scattered-writes", "aten::scatter_add_")
def messages_of_a_graph(into):
    trace, done = traced(into)
    product(trace, 10, 1500, NVJET)
    trace.op("aten::scatter_add_", 30, 5)
    trace.kernel("void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)", 1520, 450, 32)
    done()
