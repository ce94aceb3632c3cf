"""What judges of unseen traces refuted, or missed: decoding, replays, split products, and hosts that were ahead."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.rank_waiting import rank_waiting
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of, runs_of
from tests.traces.test_collectives import ddp
from tests.traces.test_collectives import run_of as ranks_of

H100 = ("NVIDIA H100 80GB HBM3", (9, 0))
HALF = ["c10::BFloat16"] * 2


def decoding(mark, kernel=made.GEMM, product_us=80, busy_us=90):
    """Ten passes in 100 µs each, each one launch of a graph that holds a product and a small kernel."""
    trace = Made()
    for number in range(10):
        at = 100 * number
        trace.event("mark", mark, at, 90, 1)
        trace.event("call", "cudaGraphLaunch", at + 1, 4, 1, correlation=number + 1)
        for name, start, us in ((kernel, at + 10, product_us), (made.RELU, at + 10 + product_us, busy_us - product_us)):
            trace.event("kernel", name, start, us, "stream 7", correlation=number + 1, device=0, stream=7)
    return trace


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("execute_context_0(0)_generation_4(4)", "10 passes decode 4 tokens each: products in 16 bits take 8"),
        ("step[DECODE bs=1]", "10 passes decode 1 token each: products in 16 bits take 8"),
        ("execute_new_0_cached_4", "10 passes decode 4 tokens each: products in 16 bits take 8"),
        ("execute_new_1_cached_4", ""),
        (
            "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
            "10 passes decode 32 tokens each: products in 16 bits take 8",
        ),
        ("step[DECODE bs=128]", ""),
        ("execute_context_1(512)_generation_0(0)", ""),
    ],
)
def test_passes_that_decode_few_tokens_read_every_weight_for_them(tmp_path, mark, says):
    sentence = first_sentence(run_of(tmp_path, decoding(mark), *H100))
    assert sentence.startswith(says or "GEMM/conv takes 80.8 %") and ("speculative decoding" in sentence) == bool(says)


def test_products_with_weights_of_fewer_bits_are_told_to_take_neither_fewer_nor_fp8(tmp_path):
    kernel = "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1"
    sentence = first_sentence(run_of(tmp_path / "pass", decoding("step[DECODE bs=1]", kernel), *H100))
    assert "weights of fewer bits" not in sentence and f"The longest, {kernel}, takes 80.8 %" in sentence
    assert "FP8" not in first_sentence(run_of(tmp_path / "other", decoding("pass", kernel), *H100))


def test_short_products_are_not_told_to_bound_what_decodes(tmp_path):
    run = run_of(tmp_path, decoding("step[DECODE bs=1]", product_us=20), *H100)
    assert "speculative decoding" not in first_sentence(run)


@pytest.mark.parametrize(("gpu", "told"), [(H100, True), (("NVIDIA A100-SXM4-80GB", (8, 0)), False)])
def test_fp8_is_told_where_products_of_16_bits_are_all_that_is_left(tmp_path, gpu, told):
    sentence = first_sentence(run_of(tmp_path, decoding("pass"), *gpu))
    assert ("in FP8, which this GPU multiplies 2.0 × as fast by the data sheet" in sentence) == told


@pytest.mark.parametrize(("graphs", "busy_us", "told"), [(0, 900, True), (1, 900, False), (0, 2900, False)])
def test_replays_of_graphs_are_no_loop_over_small_operators(tmp_path, graphs, busy_us, told):
    """Before each replay torch fills the state of random numbers. Nor is a loop told for which no device waits."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 3000, 1)
    trace.op("aten::relu", 0, 5)
    for number in range(40):
        at = 10 + 50 * number
        trace.op("aten::fill_", at, 20)
        for _ in range(graphs):
            trace.event("call", "cudaGraphLaunch", at + 22, 5, 1, correlation=1000 + number)
    trace.kernel(made.GEMM, 10, busy_us, 2)
    trace.op("aten::relu", 2950, 5)
    trace.kernel(made.RELU, 2960, 2, 2952)
    assert ("A loop of Python runs aten::fill_" in first_sentence(run_of(tmp_path, trace))) == told


def test_a_product_that_its_operator_splits_counts_once(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 0, 40, **{"Input Dims": [[4096, 4096]] * 2, "Input type": HALF})
    for part in range(4):
        trace.kernel(made.GEMM, 100 + 200 * part, 200, 2 + 5 * part)
    (row,) = matrix_ops(run_of(tmp_path, trace, *H100)).to_dict("records")
    assert row["count"] == 1 and row["flops"] == 2 * 4096**3


@pytest.mark.parametrize(("regions", "breaks"), [((0, 0), False), ((0, 1), True)])
def test_calls_of_one_compiled_graph_show_no_break(tmp_path, regions, breaks):
    trace = Made()
    for number in range(10):
        at = 200 * number
        if number % 2:
            trace.op(f"Torch-Compiled Region: {regions[number // 2 % 2]}/0", at, 20)
        trace.kernel("triton_poi_fused_add_0", at + 10, 5, at + 2)
    advice = finding_of(run_of(tmp_path, trace), "launch-bound").advice
    assert ("what breaks its graph" in advice) == breaks and ("no break of a graph shows" in advice) != breaks


@pytest.mark.parametrize(("copies", "one_by_one"), [(60, True), (20, False)])
def test_values_that_most_waits_read_are_copied_one_by_one(tmp_path, copies, one_by_one):
    """Many more kernels run, which the host launches before it reads the values."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 12_000, 1)
    for number in range(800):
        trace.kernel(made.RELU, 900 + 4 * number, 4, number, call_us=0.5)
    at = 4_200
    for number in range(60):
        if number < copies:
            trace.op("aten::is_nonzero", at, 40)
            trace.kernel("Memcpy DtoH (Device -> Pageable)", at + 30, 2, at + 2, sort="copy", call_us=35)
            trace.events[-1]["args"]["bytes"] = 1
        else:
            trace.event("call", "cudaStreamSynchronize", at, 40, 1, correlation=9_000 + number)
        trace.kernel(made.RELU, at + 60, 3, at + 50)
        at += 100
    titles = " ".join(finding.title for finding in diagnose(run_of(tmp_path, trace)))
    assert ("60 copies of 1 byte on average to the host" in titles) == one_by_one


@pytest.mark.parametrize(
    ("gpu", "says"), [("AMD Instinct MI300X", "preferred_rocm_fa_library"), (H100[0], "SDPBackend")]
)
def test_attention_on_amd_has_other_implementations(tmp_path, gpu, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100_000, 1)
    shapes = [[8, 4096, 16, 64]] * 3
    trace.op("aten::_flash_attention_forward", 1, 8, **{"Input Dims": shapes, "Input type": HALF * 2})
    flash = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >"
    trace.kernel("attn_fwd" if "AMD" in gpu else flash, 10, 99_000, 2)
    finding = finding_of(run_of(tmp_path, trace, gpu, (9, 4) if "AMD" in gpu else (9, 0)), "slow-products")
    assert says in finding.snippet


@pytest.mark.parametrize(("queued_us", "told"), [(600, True), (100, False)])
def test_a_host_that_was_ahead_before_the_recording_is_told(tmp_path, queued_us, told):
    trace = Made()
    trace.event("kernel", made.GEMM, 0, queued_us, "stream 7", correlation=1, device=0, stream=7)
    for step in range(3):
        at = 1000 * step
        trace.event("mark", f"ProfilerStep#{step}", at, 1000, 1)
        for number in range(4):
            trace.kernel(made.GEMM, at + 650 + 90 * number, 20, at + 640 + 90 * number)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("were still queued: the host was ahead then" in sentence) == told


@pytest.mark.parametrize(("later_us", "last"), [(40, 1.0), (2, 0.0)])
def test_ranks_that_enter_nearly_together_are_not_last(tmp_path, later_us, last):
    run = ranks_of(tmp_path, ddp((300, 750)), ddp((300 + later_us, 750 + later_us), rank=1))
    assert rank_waiting(run).set_index("rank").loc[1, "last_frac"] == last


def test_a_host_that_is_long_before_each_launch_of_one_kernel_is_not_told_to_capture_graphs(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    trace.op("Torch-Compiled Region: 0/1", 0, 19_000)
    for at in (0, 4_000, 8_000, 12_000):
        trace.kernel(made.RELU, at + 5, 100, at + 1)
        trace.kernel(made.GEMM, at + 3_500, 300, at + 3_400)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert "before one kernel" in finding.advice and "reduce-overhead" not in finding.snippet


@pytest.mark.parametrize(("product_us", "share"), [(300, "90 %"), (375, "98 %")])  # the device is idle for 8 %, or not
@pytest.mark.parametrize(("tokens", "remedy"), [(256, "Sort the rows by matrix"), (16, "Use a grouped product")])
def test_matrices_that_are_copied_for_each_row_are_told(tmp_path, tokens, remedy, product_us, share):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::index", 0, 8, **{"Input Dims": [[16, 512, 1024], []], "Input type": ["c10::BFloat16", ""]})
    trace.kernel("void at::native::vectorized_gather_kernel<16, long>", 20, 600, 2)
    dims = [[tokens, 1, 512], [tokens, 512, 1024]]
    trace.op("aten::bmm", 10, 8, **{"Input Dims": dims, "Input type": HALF})
    trace.kernel(made.GEMM, 620, product_us, 12)
    run = run_of(tmp_path, trace, *H100)
    says = (
        f"Largest possible saving: aten::index and the products of batches that read its copies take {share} of the "
        f"step: it copies a matrix of 512 × 1024 for each of {tokens} products"
    )
    assert first_sentence(run).startswith(says) and remedy in finding_of(run, "slow-products").advice


@pytest.mark.parametrize(("softmax_us", "says"), [(60, "scaled_dot_product_attention"), (3, "flatten(0, 1)")])
def test_products_of_batches_without_a_softmax_are_none_of_attention(tmp_path, softmax_us, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::bmm", 1, 8, **{"Input type": HALF, "Input Dims": [[8, 8, 64], [8, 64, 8]]})
    trace.kernel(made.GEMM, 20, 400, 2)
    trace.op("aten::_softmax", 10, 8)
    trace.kernel("void softmax_warp_forward<float>", 420, softmax_us, 12)
    assert says in finding_of(run_of(tmp_path, trace, *H100), "slow-products").snippet


def test_copies_at_the_rate_of_the_link_come_before_what_little_the_host_is_late(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 110, 870, 100, sort="copy")
    trace.events[-1]["args"]["bytes"] = 52_000_000
    trace.kernel(made.RELU, 981, 18, 104)
    sentence = first_sentence(run_of(tmp_path, trace, *H100))
    assert sentence.startswith("The GPU only copies and fills for") and "Beside that, the largest" in sentence


@pytest.mark.parametrize(("launches_too", "waits"), [(True, True), (False, False)])
def test_waits_of_a_thread_that_launches_nothing_are_none_of_the_loop(tmp_path, launches_too, waits):
    """A thread of its own waits for results, while the loop launches, now and then too late."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    for number in range(10):
        at = 400 * number
        trace.kernel(made.RELU, at + 100, 150, at + 90)
        trace.event("call", "cudaEventSynchronize", at - 100 if number else 0, 180, 5, correlation=900 + number)
        if launches_too:
            trace.kernel(made.RELU, at + 250, 5, at + 85, thread=5)
    titles = " ".join(finding.title for finding in diagnose(run_of(tmp_path, trace)))
    assert ("synchronizations with the host" in titles) == waits


def test_a_loop_that_is_captured_runs_once(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 3000, 1)
    trace.event("call", "cudaStreamBeginCapture", 0, 2, 1, correlation=5)
    for number in range(40):
        trace.op("aten::fill_", 10 + 50 * number, 20)
    trace.kernel(made.GEMM, 10, 2900, 2)
    assert "A loop of Python" not in first_sentence(run_of(tmp_path, trace))


@pytest.mark.parametrize(("shape", "says"), [([8, 128, 12, 64], "without contiguous()"), ([512, 512], "transpose(-2")])
def test_activations_are_not_told_to_be_laid_out_once(tmp_path, shape, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::contiguous", 0, 9)
    trace.op("aten::copy_", 1, 7, **{"Input Dims": [shape, shape], "Input type": HALF})
    trace.kernel("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", 20, 400, 3)
    trace.op("aten::mm", 10, 8, **{"Input type": HALF})
    trace.kernel(made.GEMM, 420, 500, 12)
    assert says in finding_of(run_of(tmp_path, trace, *H100), "layout-copies").snippet


@pytest.mark.parametrize(("longer_us", "told"), [(9_000, True), (4_000, False)])
def test_one_of_two_steps_that_takes_far_longer_comes_first(tmp_path, longer_us, told):
    trace = Made()
    for step, start, us in ((3, 0, longer_us), (4, longer_us, 3_000)):
        trace.event("mark", f"ProfilerStep#{step}", start, us, 1)
        trace.op("aten::convolution", start + 10, us - 500)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.startswith("Of the two steps, step 3 takes 9.00 ms, the other 3.00 ms: 50.0 % of the time") == told


@pytest.mark.parametrize(("us", "told"), [(5_300, True), (900, False)])
def test_a_slow_link_between_devices_is_named(tmp_path, us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 12_000, 1)
    trace.op("aten::to", 0, 9)
    for place, (to, took_us) in enumerate([(1, 450), (2, us), (1, 450), (2, us)]):
        trace.kernel("Memcpy PtoP (Device -> Device)", 20 + 6_000 * (place // 2), took_us, 2 + place, sort="copy",
                     stream=20 + to)  # fmt: skip
        trace.events[-1]["args"] |= {"bytes": 40_000_000, "fromDevice": 0, "toDevice": to}
    run = run_of(tmp_path, trace, *H100)
    says = "device 0 to 2 takes 10.6 ms of it at 7.55 GB/s, where 0 to 1 reaches 88.9 GB/s (up to 9.70 of 12.0 ms"
    assert (says in first_sentence(run)) == told
    assert ("NVLink" in finding_of(run, "copies").advice) == told


def test_the_operator_with_most_to_win_is_named_though_its_sizes_differ(tmp_path):
    trace, at = Made(), 100
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    sizes = [(512 + 64 * number, "aten::mm", 300) for number in range(6)] + [(512, "aten::bmm", 700)]
    for place, (size, op, us) in enumerate(sizes):
        dims = [[8, size, 512], [8, 512, 512]] if op == "aten::bmm" else [[size, 512], [512, 512]]
        trace.op(op, 10 * place, 8, **{"Input Dims": dims, "Input type": HALF})
        trace.kernel(made.GEMM, at, us, 10 * place + 2)
        at += us
    assert finding_of(run_of(tmp_path, trace, *H100), "slow-products").where == "aten::mm"


@pytest.mark.parametrize(
    ("kernel", "us", "says"),
    [
        (made.GEMM, 100, "too little work in one call"),
        (made.GEMM, 3000, "Pad them"),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_128x64_32x6_nn_align4", 100, "Pad them"),
    ],
)
def test_products_are_padded_where_that_wins_most(tmp_path, kernel, us, says):
    """Three products of some rows that are no multiple of 8, and one of an odd number of columns that takes `us`."""
    trace, at = Made(), 100
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    for place, (columns, took_us) in enumerate([(512, 200)] * 3 + [(1021, us)]):
        dims = [[141, 512], [512, columns]]
        trace.op("aten::mm", 10 * place, 8, **{"Input Dims": dims, "Input type": HALF})
        trace.kernel(kernel, at, took_us, 10 * place + 2)
        at += took_us
    assert says in finding_of(run_of(tmp_path, trace, *H100), "slow-products").advice


@pytest.mark.parametrize(("channels", "says"), [(4, "pad channels"), (64, "padding gains nothing")])
def test_padding_is_advised_by_all_kernels_off_tensor_cores_and_not_by_the_longest(tmp_path, channels, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for place, (of, us) in enumerate([(64, 500), (channels, 400)]):
        dims = [[512, of, 128], [64, of, 1], [64]]
        trace.op("aten::conv1d", 20 * place, 18)
        trace.op("aten::cudnn_convolution", 20 * place + 1, 15, **{"Input Dims": dims, "Input type": ["c10::Half"] * 3})
        trace.kernel(f"void gemmSN_TN_kernel<__half, {of}, 16, 2>", 50 + 500 * place, us, 20 * place + 2)
    assert says in finding_of(run_of(tmp_path, trace, *H100), "kernels-off-tensor-cores").advice


def test_products_of_a_batch_with_operands_of_their_own_are_not_told_to_be_joined(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    dims = [[256, 61, 16], [256, 16, 61]]
    trace.op("aten::bmm", 1, 8, **{"Input Dims": dims, "Input type": ["c10::Half"] * 2})
    trace.kernel("turing_fp16_sgemm_fp16_64x64_nn", 20, 400, 2)
    finding = finding_of(run_of(tmp_path, trace, *H100), "kernels-off-tensor-cores")
    assert "none can be joined" in finding.advice and "torch.cat" not in finding.snippet


def test_a_gpu_without_a_name_whose_kernels_are_old_is_not_told_to_take_bf16(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input Dims": [[1024, 1024]] * 2, "Input type": ["float"] * 2})
    trace.kernel("maxwell_sgemm_128x64_nn", 20, 900, 2)
    finding = finding_of(run_of(tmp_path, trace, ""), "fp32-products")
    assert "float16" in finding.snippet and "bfloat16" not in finding.snippet and "TF32" not in finding.advice


@pytest.mark.parametrize(("flush_us", "cut"), [(5_000, True), (30, False)])
def test_a_profiler_that_stops_within_the_last_step_is_none_of_it(tmp_path, flush_us, cut):
    trace = Made()
    for step in range(4):
        at = 1000 * step
        trace.event("mark", f"ProfilerStep#{step + 3}", at, 1000 + (flush_us if step == 3 else 0), 1)
        trace.op("aten::mm", at + 5, 900)
        trace.kernel(made.GEMM, at + 20, 960, at + 10)
    run = run_of(tmp_path, trace)
    assert run.windows["wall_us"].iloc[0] == pytest.approx(4000 if cut else 4030, abs=40)
    assert ("The steps differ" in first_sentence(run)) is False


@pytest.mark.parametrize(("first", "wall_us"), [(3, 3_960), (0, 10_000)])
def test_a_copy_that_waits_for_work_of_before_the_recording_begins_the_first_step(tmp_path, first, wall_us):
    """At the start of a program it is what sets up the device."""
    trace = Made()
    for step, start, us in ((0, 0, 7_000), (1, 7_000, 1_000), (2, 8_000, 1_000), (3, 9_000, 1_000)):
        trace.event("mark", f"ProfilerStep#{first + step}", start, us, 1)
        if step:
            trace.kernel(made.GEMM, start + 20, 960, start + 10)
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 6_040, 100, 100, sort="copy", call_us=6_050)
    trace.kernel(made.GEMM, 6_200, 780, 6_170)
    assert run_of(tmp_path, trace).windows["wall_us"].iloc[0] == pytest.approx(wall_us, abs=5)


@pytest.mark.parametrize("waits", [True, False])
def test_the_next_replay_is_launched_earlier_only_where_the_host_waits_for_results(tmp_path, waits):
    trace = Made()
    for number in range(10):
        at = 300 * number
        trace.event("mark", f"ProfilerStep#{number + 3}", at, 299, 1)
        trace.op("aten::fill_", at + 5, 10)
        trace.event("call", "cudaGraphLaunch", at + 100, 4, 1, correlation=number + 1)
        for node in range(3):
            start = at + 110 + 40 * node
            args = {"correlation": number + 1, "device": 0, "stream": 7}
            trace.event("kernel", made.GEMM, start, 40, "stream 7", **args)
        if waits:
            trace.event("call", "cudaStreamSynchronize", at + 106, 126, 1, correlation=1000 + number)
    advice = finding_of(run_of(tmp_path, trace, *H100), "launch-bound").advice
    assert ("launch the next replay" in advice) == waits and "replays one graph already" in advice


def test_of_collectives_alone_neither_idle_time_nor_overlap_is_told(tmp_path):
    """What computes was removed from the traces of two ranks, of which the second enters each collective later."""
    traces = []
    for rank, late_us in enumerate((0, 300)):
        trace = Made()
        for number in range(4):
            args = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 10_000, "Group size": 2}
            args |= {"Process Group Name": "0", "device": rank, "stream": 7, "correlation": number}
            at = 1000 * number + late_us
            trace.event("kernel", made.NCCL, at, 400 - late_us, "stream 7", **args)
        traces.append(trace)
    run = runs_of(tmp_path, traces)
    assert [finding.code for finding in diagnose(run)] == ["exposed-communication"]
    (finding,), sentence = diagnose(run), first_sentence(run)
    for text in (finding.title, finding.advice, sentence):
        assert "rank 1" in text and "idle" not in text and "overlap hides" not in text
    assert "holds collectives alone" in sentence and "only communicates" not in finding.title


LACKS = "The host still waits for the device for 0.790 ms after its last recorded work, so the trace lacks"


def waiting_trace(waits=(5, 1800)):
    """The last recorded work ends at 1,010 us, and a wait for the device after it."""
    trace = Made()
    trace.op("aten::mm", 0, 4)
    trace.kernel(made.GEMM, 10, 1000, 1)
    if waits:
        trace.event("call", "cudaStreamSynchronize", waits[0], waits[1] - waits[0], 1, correlation=99)
    return trace


@pytest.mark.parametrize(("waits", "told"), [((5, 1800), True), ((900, 1800), True), ((5, 1200), False), (None, False)])
def test_work_that_the_trace_lacks_at_its_end_is_told(tmp_path, waits, told):
    trace = waiting_trace(waits)
    trace.event("call", "cudaLaunchKernel", 4, 1, 1, correlation=98)
    sentence = first_sentence(run_of(tmp_path, trace, *H100))
    assert (LACKS in sentence) == told and ("so the trace lacks" in sentence) == told


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("all work is recorded", False),
        ("launched after the wait", False),
        ("captured", False),
        ("a graph", True),
        ("a part of a graph", True),
        ("a whole graph", False),
        ("launched before the trace", True),
        ("an early wait", True),
    ],
)
def test_a_wait_at_the_end_is_for_lost_work_only_if_the_trace_may_lack_some(tmp_path, why, told):
    """It may be for another device or process, or for the profiler."""
    trace = waiting_trace()
    if why == "launched after the wait":
        trace.event("call", "cudaLaunchKernel", 1805, 1, 1, correlation=98)
    elif why == "captured":
        for at, name in ((1, "cudaStreamBeginCapture"), (2, "cudaLaunchKernel"), (3, "cudaStreamEndCapture")):
            trace.event("call", name, at, 1, 1, correlation=95 + at)
    elif why == "a graph":
        trace.event("call", "cudaGraphLaunch", 4, 1, 1, correlation=98)
    elif why.endswith("of a graph") or why == "a whole graph":
        for number in range(1 + (why == "a whole graph")):
            trace.event("call", "cudaGraphLaunch", 4 + number / 2, 0.4, 1, correlation=90 + number)
            args = {"correlation": 90 + number, "device": 0, "stream": 7}
            trace.event("kernel", made.RELU, 1010 - 2 * number, 0, "stream 7", **args)
    elif why == "launched before the trace":
        trace.event("kernel", made.GEMM, -100, 90, "stream 7", correlation=1, device=0, stream=7)
    elif why == "an early wait":
        trace.event("call", "cudaStreamSynchronize", -200, 190, 1, correlation=98)
    assert (LACKS in first_sentence(run_of(tmp_path, trace, *H100))) == told


def test_what_16_bits_save_of_a_host_that_was_ahead_before_the_recording_is_told(tmp_path):
    trace = Made()
    trace.event("kernel", made.SIMT, 0, 600, "stream 7", correlation=1, device=0, stream=7)
    for step in range(3):
        trace.event("mark", f"ProfilerStep#{step}", 1000 * step, 1000, 1)
        for number in range(10 if step else 3):
            at = 1000 * step + 100 * (number if step else number + 7)
            trace.kernel(made.SIMT, at + 8, 90, at + 5)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.startswith("GEMM/conv takes 90.0 % of the step, in FP32. Beside it, the largest possible saving: ")
    assert "if the host is ahead there, GEMM/conv takes 90 % of the step in FP32; by the data sheet, 16" in sentence


@pytest.mark.parametrize("waits", [True, False])
def test_waits_after_which_the_host_launches_late_are_told_with_what_they_cost(tmp_path, waits):
    """The host needs 600 us to launch ten kernels, of which the device runs nine sooner; the last takes 300 us."""
    trace = Made()
    for number in range(6):
        at = 900 * number
        trace.event("mark", f"ProfilerStep#{number}", at, 900, 1)
        for place in range(10):
            launched = at + 60 * place
            trace.op("aten::relu", launched, 50)
            trace.kernel(made.RELU, launched + 8, 30 if place < 9 else 300, launched + 5)
        if waits:
            trace.op("aten::_local_scalar_dense", at + 600, 260)
            trace.event("call", "cudaStreamSynchronize", at + 605, 245, 1, correlation=9_000 + number)
    findings = {finding.code: finding for finding in diagnose(run_of(tmp_path, trace, *H100))}
    told = "The host launches late after 1 synchronization (aten::_local_scalar_dense): without these waits"
    assert ("host-syncs" in findings and findings["host-syncs"].title.startswith(told)) == waits
