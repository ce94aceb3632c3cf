"""Advice that a trace refutes is not given: what the program does already, or what its events exclude."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, finding_of, products, run_of, write
from tests.traces.test_collectives import ddp
from tests.traces.test_collectives import run_of as run_of_ranks
from tests.traces.test_exchanges import inference_with

EXCHANGE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
DISPATCH = "void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*, int*)"
COMBINE = "void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*, void*, int*)"


@pytest.mark.parametrize(("dtype", "told"), [("unsigned char", False), ("c10::Half", False), ("float", True)])
def test_an_exchange_of_few_bits_is_not_told_to_take_16(tmp_path, dtype, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("MmBackward0", 1, 10, 2)
    trace.op("aten::mm", 1, 8, 2, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 90, 2, 2)
    trace.op("record_param_comms", 30, 20, 2)
    trace.event("mark", "nccl:all_to_all", 31, 15, 2, **{"Input Dims": [[1000]], "Input type": [dtype]})
    trace.kernel(EXCHANGE, 100, 800, 33, 2)
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert "Ranks exchange" in finding.advice and ("16 bits or fewer" in finding.advice) == told


def test_tokens_that_ranks_send_to_experts_are_an_exchange_of_narrow_values(tmp_path):
    run = run_of(tmp_path, inference_with([(DISPATCH, 200), (COMBINE, 300)]))
    assert run.collectives["name"].tolist() == ["all_to_all"] * 2
    assert run.collectives["dtype"].tolist() == ["float8_e4m3fn", "bfloat16"]
    finding = finding_of(run, "exposed-communication")
    assert finding.advice.startswith("Ranks exchange tokens here.") and "16" not in finding.advice
    assert "low_latency_dispatch" in finding.snippet


def test_ranks_that_all_enter_last_now_and_then_are_not_told_apart(tmp_path):
    """Each of four ranks enters one of four collectives 150 µs after the others, and each rank leaves with the last."""
    leaves = (460, 620, 780, 940)
    enters = [[at - (20 if rank == late else 150) for late, at in enumerate(leaves)] for rank in range(4)]
    run = run_of_ranks(tmp_path, *(ddp(each, leaves=leaves, rank=rank) for rank, each in enumerate(enters)))
    advice = finding_of(run, "exposed-communication").advice
    assert "no rank is late alone: 4 of 4 ranks each enter up to 1 of 4 collectives last, though" in advice


@pytest.mark.parametrize(("built", "says"), [(False, "No graph is captured or built here"), (True, "Capture each")])
def test_a_late_launch_of_a_graph_is_not_called_a_capture(tmp_path, built, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    trace.kernel(made.GEMM, 10, 400, 2)
    trace.event("call", "cudaGraphLaunch", 500, 9_200, 1, correlation=99)
    if built:
        trace.event("call", "cudaGraphInstantiate", 420, 60, 1, correlation=98)
    trace.event("kernel", made.GEMM, 9_690, 10_000, "stream 7", correlation=99, device=0, stream=7)
    assert says in finding_of(run_of(tmp_path, trace), "host-bound").advice


@pytest.mark.parametrize(("regions", "kernel", "breaks"), [(1, made.RELU, False), (10, made.RELU, True),
                                                           (1, "triton_poi_fused_relu_0", None)])  # fmt: skip
def test_one_compiled_graph_without_fused_kernels_is_not_told_to_have_breaks(tmp_path, regions, kernel, breaks):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    for n in range(regions):
        trace.op("CompiledFunction", 2000 / regions * n, 1990 / regions)
    for n in range(20):
        trace.op("aten::relu", 100 * n + 2, 20)
        trace.kernel(kernel, 100 * n + 20, 5, 100 * n + 10)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert ("breaks its graph" in finding.advice) == bool(breaks)
    assert ("inductor" in finding.snippet) == (breaks is False)


def test_a_server_that_copies_lists_of_tensors_does_not_train(tmp_path):
    trace = Made()
    trace.event("call", "cudaGraphLaunch", 1, 5, 1, correlation=99)
    trace.event("kernel", made.GEMM, 20, 5, "stream 7", correlation=99, device=0, stream=7)
    for at in range(100, 900, 100):
        trace.op("aten::_foreach_copy_", at, 20)
        trace.kernel(made.ADAM.replace("FusedAdamMathFunctor", "CopyFunctor"), at + 50, 5, at + 10)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert "Graphs are replayed already" in finding.advice and "optimizer" not in finding.advice + finding.snippet


@pytest.mark.parametrize("is_sdpa", [True, False])
def test_attention_in_steps_by_torch_itself_is_not_told_to_call_it(tmp_path, is_sdpa):
    trace = Made()
    trace.op("aten::scaled_dot_product_attention" if is_sdpa else "Attention", 0, 90)
    factors, scores = [[8, 8192, 64], [8, 64, 8192]], [[8, 8192, 8192]]
    steps = (("aten::bmm", made.GEMM, factors), ("aten::_softmax", "softmax_warp_forward", scores))
    for n, (op, kernel, dims) in enumerate(steps):
        trace.op(op, 10 + 20 * n, 8, **{"Input type": ["c10::Half"] * 2, "Input Dims": dims})
        trace.kernel(kernel, 100 + 1000 * n, 1000, 12 + 20 * n)
    run = run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB", (8, 0))
    finding = finding_of(run, "memory-bound-kernels")
    assert ("scaled_dot_product_attention(q" in finding.snippet) == (not is_sdpa)
    assert ("math backend" in finding.advice) == is_sdpa and "is_causal" not in finding.snippet


@pytest.mark.parametrize(
    ("attention_us", "says"),
    [
        (0, "Nothing beside GEMM/conv would save 5.00 % or more of the step: it takes 99.0 % of it"),
        (990, "Nothing beside attention would save 5.00 % or more of the step: it takes 99.0 % of it"),
        (198, "GEMM/conv and attention would save 5.00 % or more of the step: they take 79.2 % and 19.8 % of it"),
    ],
)
def test_attention_is_told_apart_from_products(tmp_path, attention_us, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    if attention_us < 990:
        trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 10, 990 - attention_us, 2)
    if attention_us:
        name = "void pytorch_flash::flash_fwd_kernel<cutlass::half_t>(Flash_fwd_params)"
        trace.kernel(name, 1000 - attention_us, attention_us, 3)
    assert says in first_sentence(run_of(tmp_path, trace))


def test_a_copy_and_the_wait_behind_it_are_one_synchronization(tmp_path):
    """The profiler's own waits, before the first launch and after the last work, are none."""
    trace = Made()
    trace.event("call", "cudaDeviceSynchronize", 0, 10, 1, correlation=1)
    for at in (100, 1100, 2100):
        trace.op("aten::_local_scalar_dense", at, 650)
        trace.kernel(made.GEMM, at + 20, 500, at + 2)
        trace.kernel("Memcpy DtoH (Device -> Pageable)", at + 520, 5, at + 10, sort="copy", call_us=530)
        trace.event("call", "cudaStreamSynchronize", at + 541, 4, 1, correlation=2)
    trace.event("call", "cudaDeviceSynchronize", 3000, 10, 1, correlation=3)
    assert run_of(tmp_path, trace).windows["syncs"].tolist() == [3]


@pytest.mark.parametrize(("kernel", "fp16_alone"), [("volta_sgemm_128x64_nn", True), (made.SIMT, False)])
def test_the_generation_of_an_unnamed_gpu_follows_from_its_kernels(tmp_path, kernel, fp16_alone):
    finding = finding_of(run_of(tmp_path, products(backward=True, name=kernel), gpu=""), "fp32-products")
    assert ("only support FP16" in finding.advice) == fp16_alone == ("allow_tf32" not in finding.snippet)


def test_a_range_that_takes_longest_on_a_cpu_is_no_operator(tmp_path):
    trace = Made()
    trace.op("predict", 0, 900)
    trace.op("aten::addmm", 100, 300)
    run = load_run(import_traces([write(tmp_path / "t.json", trace.document())], tmp_path / "run"))
    assert "Python or other code in predict, outside of operators, takes 66.7 %" in first_sentence(run)


def exchanges(leaves_us):
    """Documents of two ranks that each wait for the other once, and transfer for so long after that."""
    documents = []
    for rank in range(2):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        for number, at in enumerate((250, 750)):
            enter = at if number == rank else at - 200
            trace.op("record_param_comms", enter - 40, 20, 1, **{"Collective name": "all_to_all", "dtype": "Float"})
            trace.kernel(EXCHANGE, enter, at + leaves_us - enter, enter - 35)
        documents.append(trace.document(distributedInfo={"rank": rank, "world_size": 2}))
    return documents


@pytest.mark.parametrize(("leaves_us", "told"), [(10, False), (190, True)])
def test_an_exchange_that_hardly_transfers_is_not_told_to_take_fewer_bits(tmp_path, leaves_us, told):
    advice = finding_of(run_of_ranks(tmp_path, *exchanges(leaves_us)), "exposed-communication").advice
    assert ("no overlap hides them" in advice) == told
    assert ("16" in advice) == told


@pytest.mark.parametrize(
    ("call", "says"), [("cudaDeviceSynchronize", "Event("), ("cudaStreamSynchronize", "sync_debug")]
)
def test_waits_for_the_whole_device_are_not_looked_for_by_a_mode_that_skips_them(tmp_path, call, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 3000, 1)
    for at in (0, 1000, 2000):
        trace.kernel(made.GEMM, at + 10, 300, at + 2)
        trace.event("call", call, at + 20, 550, 1, correlation=77)
    assert says in finding_of(run_of(tmp_path, trace), "host-syncs").snippet


@pytest.mark.parametrize(("all_of_it", "says"), [(True, "All of it is launched from compiled"), (False, "what breaks")])
def test_a_model_that_is_compiled_throughout_has_no_break_to_find(tmp_path, all_of_it, says):
    trace = Made()
    for number in range(10):
        at = 200 * number
        if all_of_it or number % 2:
            trace.op(f"Torch-Compiled Region: {number // 2}/0", at, 20)
        trace.kernel("triton_poi_fused_add_0", at + 10, 5, at + 2)
    advice = finding_of(run_of(tmp_path, trace), "launch-bound").advice
    assert says in advice and ("what breaks" in advice) != all_of_it


@pytest.mark.parametrize("streams", [(7, 7), (20, 22)])
def test_copies_that_are_on_two_streams_are_not_told_to_be(tmp_path, streams):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for name, at, stream in (("HtoD (Pageable -> Device)", 10, 0), ("DtoH (Device -> Pageable)", 500, 1)):
        trace.kernel(f"Memcpy {name}", at, 480, at - 5, sort="copy", stream=streams[stream])
    advice = finding_of(run_of(tmp_path, trace), "copies").advice
    assert ("copy each direction on a stream of its own" in advice) == (streams[0] == streams[1])


@pytest.mark.parametrize(("dtype", "of_kernel", "told"), [("float", "f32", False), ("c10::Half", "f16", True)])
def test_implementations_of_attention_that_take_no_fp32_are_not_advised_for_it(tmp_path, dtype, of_kernel, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100_000, 1)
    shapes = [[64, 2048, 16, 32]] * 3
    trace.op("aten::_efficient_attention_forward", 1, 8, **{"Input Dims": shapes, "Input type": [dtype] * 3})
    trace.kernel(f"fmha_cutlassF_{of_kernel}_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", 10, 99_000, 2)
    finding = finding_of(run_of(tmp_path, trace, "NVIDIA A100-SXM4-40GB", (8, 0)), "slow-products")
    assert ("FLASH_ATTENTION" in finding.snippet, "in 16 bits" in finding.advice.replace("\n", " ")) == (told, not told)


@pytest.mark.parametrize(("op", "cast"), [("aten::embedding", False), ("aten::relu", True)])
def test_numbers_of_rows_are_not_told_to_become_16_bits(tmp_path, op, cast):
    trace = products()
    trace.op(op, 850, 8)
    trace.kernel(made.RELU, 860, 20, 852)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "fp32-products"]
    assert ("x.to(torch.float16)" in finding.snippet) == cast and "model(x" in finding.snippet
    assert "tokens" not in finding.snippet


def test_images_beside_tokens_are_told_to_become_16_bits(tmp_path):
    trace = products()
    trace.op("aten::embedding", 850, 8)
    trace.kernel(made.RELU, 860, 20, 852)
    trace.op("aten::cudnn_convolution", 12, 8, **{"Input type": ["float"] * 2})
    trace.kernel("void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1>", 882, 40, 14)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "fp32-products"]
    assert "model(tokens, x.to(torch.float16))" in finding.snippet


@pytest.mark.parametrize(("op", "format_"), [("aten::conv1d", False), ("aten::conv2d", True)])
def test_a_convolution_of_signals_is_not_told_to_take_channels_last(tmp_path, op, format_):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op(op, 10, 50, **{"Input type": ["c10::Half"] * 2})
    trace.op("aten::cudnn_convolution", 12, 40, **{"Input type": ["c10::Half"] * 2})
    trace.kernel("void cudnn::cnn::im2col4d_kernel<__half, int>", 20, 10, 15)
    trace.kernel("void implicit_convolve_sgemm<__half, __half, 128, 5, 5, 3, 3, 3, 1>", 40, 900, 20)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "kernels-off-tensor-cores"]
    assert ("channels_last" in finding.snippet) == format_


@pytest.mark.parametrize(
    ("op", "function", "created"),
    [
        ("aten::randn", "", True),
        ("aten::sort", "", False),
        ("", "<built-in method randn of type object at 0x7f00>", True),
        ("", "<built-in method randn of numpy.random.mtrand.RandomState object at 0x7f00>", False),
    ],
)
def test_a_tensor_that_the_host_creates_is_advised_to_be_created_on_the_device(tmp_path, op, function, created):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    if op:
        trace.op(op, 10, 9080)
    else:
        trace.event("python_function", function, 10, 9080, 1)
    trace.op("aten::mm", 9100, 20)
    trace.kernel(made.GEMM, 9200, 500, 9110)
    trace.kernel(made.GEMM, 5, 3, 2)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-bound"]
    assert ("device=device" in finding.snippet) == created and "beside it" not in finding.unit


@pytest.mark.parametrize(("kernel_us", "waits"), [(100, True), (450, False)])
def test_faster_kernels_of_a_device_that_waits_save_little_before_it_no_longer_does(tmp_path, kernel_us, waits):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for at in (10, 510):
        trace.op("aten::mm", at - 5, 8, **{"Input type": ["float"] * 2})
        trace.kernel(made.SIMT, at, kernel_us, at - 3)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "fp32-products"]
    assert finding.title.endswith("once the device no longer waits") == waits


@pytest.mark.parametrize(("memory", "pins"), [("Pinned", False), ("Pageable", True)])
def test_pinned_copies_are_not_told_to_be_pinned(tmp_path, memory, pins):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 9000, 1)
    trace.kernel(f"Memcpy HtoD ({memory} -> Device)", 9010, 100, 9001, sort="copy")
    trace.kernel(made.GEMM, 9200, 500, 9110)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "waiting-for-data"]
    assert ("pin_memory=True" in finding.snippet) == pins


def convolutions(*, tf32_us, gemm_us):
    """Convolutions in FP32, some in TF32 beside them, and a product in FP32."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    trace.op("aten::cudnn_convolution", 1, 8, **{"Input type": ["float"] * 2})
    trace.kernel("ampere_scudnn_128x64_relu_medium_nn_v1", 10, 600, 2)
    trace.kernel("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x16", 700, tf32_us, 4)
    trace.op("aten::mm", 20, 8, **{"Input type": ["float"] * 2})
    trace.kernel("ampere_sgemm_128x64_nn", 1000, gemm_us, 22)
    return trace


@pytest.mark.parametrize(("tf32_us", "gemm_us", "allows"), [(100, 10, False), (100, 900, True), (0.001, 900, True)])
def test_tf32_is_not_advised_where_it_is_allowed_already(tmp_path, tf32_us, gemm_us, allows):
    """Convolutions and other products have a setting each; the library may choose FP32 nevertheless."""
    run = run_of(tmp_path, convolutions(tf32_us=tf32_us, gemm_us=gemm_us), "NVIDIA A100-SXM4-80GB", (8, 0))
    (finding,) = [f for f in diagnose(run) if f.code == "fp32-products"]
    assert ("TF32" in finding.advice) == allows


@pytest.mark.parametrize(("op", "signal"), [("aten::conv1d", True), ("aten::conv2d", False)])
def test_signals_are_not_told_to_be_channels_last(tmp_path, op, signal):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op(op, 0, 50, **{"Input type": ["float"] * 2})
    trace.op("aten::cudnn_convolution", 1, 40, **{"Input type": ["float"] * 2})
    trace.kernel("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(float)", 10, 400, 2)
    trace.kernel(made.GEMM, 410, 500, 4)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "layout-transposes"]
    assert ("Conv1d" in finding.snippet) == signal
    assert ("model = model.to(memory_format" in finding.snippet) != signal


@pytest.mark.parametrize(("shapes", "told"), [([[8, 64], [64, 8]], False), ([], True)])
def test_a_launch_that_stalls_is_no_product_that_16_bits_would_shorten(tmp_path, shapes, told):
    """Where sizes are not recorded, the long one may be a large product."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for at, us in ((10, 10), (30, 10), (50, 900)):
        trace.op("aten::mm", at - 9, 4, **{"Input type": ["float"] * 2, "Input Dims": shapes})
        trace.kernel(made.SIMT, at, us, at - 8)
    codes = {f.code for f in diagnose(run_of(tmp_path, trace))}
    assert ("fp32-products" in codes) == told


@pytest.mark.parametrize(("stepping", "told"), [(1, False), (20, True)])
def test_an_optimizer_of_few_launches_is_not_told_to_be_fused(tmp_path, stepping, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 9_000, 1)
    trace.event("mark", "Optimizer.step#SGD.step", 8_000, 900, 1)
    for number in range(40 + stepping):
        at = 200 * number if number < 40 else 8_000 + 40 * (number - 40)
        trace.op("aten::mul_", at, 20)
        trace.kernel(made.RELU, at + 10, 2, at + 5)
    assert ("fused=True" in finding_of(run_of(tmp_path, trace), "launch-bound").snippet) == told


@pytest.mark.parametrize(
    ("sizes", "says"), [([[64, 64, 32], [64, 32, 512]], "scaled_dot_product"), ([[64, 4, 30], [64, 30, 512]], "pad")]
)
def test_products_of_two_tensors_are_padded_where_what_they_sum_over_is_unaligned(tmp_path, sizes, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::bmm", 1, 8, **{"Input Dims": sizes, "Input type": ["c10::Half"] * 2})
    trace.kernel("void gemmSN_TN_kernel<__half, 128, 16, 2, 4, 4, 4, false>", 10, 900, 2)
    snippet = finding_of(run_of(tmp_path, trace), "kernels-off-tensor-cores").snippet
    assert says in snippet and "Linear" not in snippet


@pytest.mark.parametrize(("computes_us", "told"), [(10, False), (5_000, True)])
def test_communication_with_nothing_beside_it_is_not_told_to_overlap(tmp_path, computes_us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    trace.op("MmBackward0", 1, 40)
    trace.op("aten::mm", 2, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 20, computes_us, 4)
    trace.op("record_param_comms", 20, 10, **{"Collective name": "allreduce", "dtype": "Half", "In msg nelems": 1000})
    trace.kernel(made.NCCL, 40 + computes_us, 14_000, 22)
    assert ("smaller buckets" in finding_of(run_of(tmp_path, trace), "exposed-communication").advice) == told


@pytest.mark.parametrize(("reduces_us", "told"), [(100, False), (9_000, True)])
def test_bytes_of_gradients_are_told_only_where_their_reduction_takes_long(tmp_path, reduces_us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    trace.op("MmBackward0", 1, 80)
    trace.op("aten::mm", 2, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 20, 3_000, 4)
    for at, name, us in ((30, "alltoall", 6_000), (60, "allreduce", reduces_us)):
        message = {"Collective name": name, "dtype": "Float", "In msg nelems": 1000}
        trace.op("record_param_comms", at, 10, **message)
        kernel = (
            "ncclDevKernel_SendRecv(args)" if name == "alltoall" else "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
        )
        trace.kernel(kernel, 3_100 + 200 * at, us, at + 2)
    advice = finding_of(run_of(tmp_path, trace), "exposed-communication").advice
    assert ("16 bits halve the bytes" in advice) == told


ONE_SHOT = "void all_reduce_one_shot_kernel<__nv_bfloat16, 4u>(Params)"
GENERIC = "ncclDevKernel_Generic_2(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("kernel", "gemm", "told"),
    [(ONE_SHOT, made.SIMT, False), (GENERIC, made.GEMM, False), (GENERIC, made.SIMT, True)],
)
def test_activations_in_16_bits_are_not_told_to_be(tmp_path, kernel, gemm, told):
    trace = inference_with([(kernel, 800)])
    for event in trace.events:
        event["name"] = gemm if event["name"] == made.GEMM else event["name"]
        if gemm == made.SIMT and "Input type" in event.get("args", {}):
            event["args"]["Input type"] = ["float"] * 2
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert ("16-bit activations" in finding.advice) == told


@pytest.mark.parametrize(
    ("function", "says"),
    [("models/llama.py(374): forward", "with_stack=False"), ("train.py(9): tokenize", "prepared = prepare(inputs)")],
)
def test_a_models_forward_is_not_told_to_run_before_the_loop(tmp_path, function, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 30_000, 1)
    trace.event("python_function", function, 0, 26_000, 1)
    trace.kernel(made.RELU, 20, 100, 5)
    trace.kernel(made.GEMM, 25_500, 4_000, 25_400)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert finding.where == function and says in finding.snippet


def test_a_copy_that_is_no_transfer_is_told_to_happen_once(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 30_000, 1)
    trace.kernel(made.RELU, 20, 100, 5)
    trace.op("aten::to", 200, 25_000)
    trace.kernel(made.GEMM, 25_500, 4_000, 25_400)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert finding.where == "aten::to" and "before the loop" in finding.advice


@pytest.mark.parametrize(("bytes_of_each", "told"), [(4, True), (4_000_000, False)])
def test_values_that_are_copied_one_by_one_are_told_to_be_copied_at_once(tmp_path, bytes_of_each, told):
    trace = Made()
    for number in range(200):
        at = 50 * number
        trace.op("aten::copy_", at, 40)
        trace.kernel("Memcpy DtoH (Device -> Pageable)", at + 20, 2, at + 10, sort="copy", call_us=15)
        trace.events[-1]["args"]["bytes"] = bytes_of_each
        trace.kernel(made.RELU, at + 45, 2, at + 42)
    run = run_of(tmp_path, trace)
    assert ("with 200 copies of 4 bytes on average to the host" in first_sentence(run)) == told
    assert ("x.tolist()" in finding_of(run, "launch-bound").snippet) == told


@pytest.mark.parametrize(("fills", "told"), [(8, True), (0, False)])
def test_fills_of_gradients_are_told_where_launches_are_slow(tmp_path, fills, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2_000, 1)
    for number in range(20):
        at = 100 * number
        trace.op("aten::zero_" if number < fills else "aten::add", at, 20)
        if number > 15:
            trace.op("AddmmBackward0", at, 25, 2)
        trace.kernel(made.RELU, at + 10, 3, at + 5, 2 if number > 15 else 1)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert ("set_to_none=True" in finding.advice and "40.0 % of the launches" in finding.advice) == told
    assert "optimizer" not in finding.title


@pytest.mark.parametrize(("graph_us", "breaks"), [(900, False), (20, True)])
def test_one_graph_per_call_of_compiled_code_has_no_break_to_find(tmp_path, graph_us, breaks):
    trace = Made()
    for number in range(4):
        at = 10_000 * number
        trace.op("Torch-Compiled Region: 0/0", at, 9_000)
        for launch in range(1 if not breaks else 3):
            trace.event("call", "cudaGraphLaunch", at + 8_000 + launch, 1, 1, correlation=100 * number + launch + 1)
            trace.kernel(made.GEMM, at + 8_100 + 40 * launch, graph_us / (1 + 2 * breaks), at + 8_000)
            trace.events[-1]["args"]["correlation"] = 100 * number + launch + 1
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert ("nothing breaks it" in finding.advice, "what breaks the graph" in finding.advice) == (not breaks, breaks)


@pytest.mark.parametrize(("keys", "told"), [(7, True), (4096, False)])
def test_attention_of_few_keys_is_told_to_fill_parts_of_tiles(tmp_path, keys, told):
    trace = Made()
    shapes = [[1024, 8, 4096, 16], [1024, 8, keys, 16], [1024, 8, keys, 16]]
    trace.op(
        "aten::_scaled_dot_product_flash_attention", 1, 8, **{"Input Dims": shapes, "Input type": ["c10::Half"] * 3}
    )
    trace.kernel("void pytorch_flash::flash_fwd_kernel<cutlass::half_t>(Flash_fwd_params)", 10, 900_000, 2)
    finding = finding_of(run_of(tmp_path, trace, "NVIDIA A100-SXM4-40GB", (8, 0)), "slow-products")
    assert ("of which few are used" in finding.advice) == told


@pytest.mark.parametrize(("count", "us", "told"), [(2, 5_000, False), (50, 200, True)])
def test_large_collectives_are_not_told_to_become_larger(tmp_path, count, us, told):
    finding = finding_of(run_of(tmp_path, inference_with([(made.NCCL, us)] * count)), "exposed-communication")
    assert ("fewer, larger" in finding.advice) == told


@pytest.mark.parametrize(("largest", "bucket"), [(91_000_000, True), (450_000_000, False)])
def test_a_bucket_of_many_parameters_is_told_to_be_split(tmp_path, largest, bucket):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100_000, 1)
    trace.op("aten::mm", 5, 8, **{"Input type": ["float"] * 2, "Input Dims": [[1000, 1000]] * 2})
    trace.kernel(made.SIMT, 20, 40_000, 6)
    trace.op("MmBackward0", 30, 30, 2)
    trace.op("aten::add_", 31, 20, 2, **{"Input type": ["float"] * 2, "Input Dims": [[largest], [largest]]})
    trace.kernel(made.RELU, 40_100, 5_000, 40, 2)
    message = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 448_000_000, "Group size": 2}
    trace.op("record_param_comms", 50, 20, 2, **message)
    trace.kernel(made.NCCL, 45_200, 50_000, 60, 2)
    advice = finding_of(run_of(tmp_path, trace), "exposed-communication").advice
    assert ("which smaller buckets do not split" in advice) == (not bucket)
