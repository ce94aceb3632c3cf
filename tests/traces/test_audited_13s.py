"""Savings that belong together, which public traces showed to be told apart or too small."""

from types import SimpleNamespace

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.saving import ProductSaving, step_share
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_judged import H100, decoding
from tests.traces.test_refuted_kernels import SOFTMAX
from tests.traces.test_told_products import A100, BF16, TENSILE, products_of

GATHER = "void at::native::vectorized_gather_kernel<16, long>"


def in_order(calls, dtypes=BF16):
    """A trace of operators that launch a kernel each, far ahead of the device: (operator, kernel, µs, shapes)."""
    trace, at = Made(), 100.0 + 10 * len(calls)
    for number, (op, kernel, us, shapes) in enumerate(calls):
        trace.op(op, 10 * number, 8, **{"Input Dims": shapes, "Input type": dtypes})
        trace.kernel(kernel, at, us, 10 * number + 2)
        at += us
    return trace


def attention(layers=3, *, scores=2048, gelu_us=40.0):
    """Layers of attention in steps, each after a product and a GELU."""
    heads = [[32, scores, 64], [32, 64, scores]]
    return in_order(
        [
            call
            for layer in range(layers)
            for call in (
                ("aten::mm", made.GEMM, 100.0 + layer, [[2048, 2048], [2048, 2048]]),
                ("aten::gelu", made.RELU, gelu_us + layer, []),
                ("aten::bmm", made.GEMM, 300.0 + layer, heads),
                ("aten::_softmax", SOFTMAX, 400.0, [[32, scores, scores]]),
                ("aten::bmm", made.GEMM, 290.0 + layer, [[32, scores, scores], [32, scores, 64]]),
            )
        ]
    )


def test_softmax_and_the_products_beside_it_are_one_saving(tmp_path):
    run = run_of(tmp_path, attention(), *A100)
    findings = diagnose(run)
    assert [f.code for f in findings] == ["memory-bound-kernels"]
    sentence = first_sentence(run)
    assert sentence.startswith("Largest possible saving: attention in steps takes 87 % of the profiled window")
    assert "aten::_softmax alone 35 % and its products 52 %" in sentence
    # Two products of 17.2 GFLOP each at half of 312 TFLOP/s, three times.
    fused_us = 3 * 2 * 2 * 32 * 2048**2 * 64 / (0.5 * 312e6)
    halves_us = (41 * 3) / 2
    assert findings[0].win_ms == pytest.approx((3 * 400 + 301 * 3 + 291 * 3 - fused_us + halves_us) / 1e3, rel=1e-3)


def test_attention_that_saves_less_than_other_kernels_is_told_after_them(tmp_path):
    finding = finding_of(run_of(tmp_path, attention(gelu_us=4000.0), *A100), "memory-bound-kernels")
    assert (
        finding.title.startswith("Unfused norms, elementwise kernels") and "; attention in steps takes" in finding.title
    )
    assert "Softmax takes long beside products of batches" in finding.advice and "torch.compile" in finding.snippet


def experts(products_us, tokens=256, matrices=16, passes=3):
    """Copies of an expert's weights for each token, and the products that read these; each pass takes longer."""
    return in_order(
        [
            call
            for number in range(passes)
            for call in (
                ("aten::index", GATHER, 300.0 + number, [[matrices, 512, 1024], []]),
                ("aten::bmm", made.GEMM, products_us + number, [[tokens, 1, 512], [tokens, 512, 1024]]),
                ("aten::silu", made.RELU, 10.0, [[tokens, 1, 1024]]),
            )
        ]
    )


@pytest.mark.parametrize("gpu", [A100, ("", (0, 0))])
@pytest.mark.parametrize(("products_us", "share"), [(200.0, "98 %"), (20.0, "97 %")])
def test_copies_of_matrices_and_the_products_that_read_them_are_one_saving(tmp_path, products_us, share, gpu):
    run = run_of(tmp_path, experts(products_us), *gpu)
    sentence = first_sentence(run)
    told = f"aten::index and the products of batches that read its copies take {share} of the profiled window"
    assert f"argest possible saving: {told}: it copies a matrix of 512 × 1024 for each of 256 products" in sentence
    finding = finding_of(run, "slow-products")
    both_us = 3 * (301 + products_us + 1)
    kb = 3 * 16 * 512 * 1024 * 2 / 1e3
    # At the data sheet's rate; of a device that is not named, at that at which the copies are read and written.
    read_us = kb / 2039 if gpu is A100 else 3 * 301 * 16 / (2 * 256)
    saving = possible_savings(run).of("slow-products", ProductSaving)
    assert (saving.unlimited or saving).saved_us == pytest.approx(both_us - read_us, rel=1e-3)
    assert "several of each matrix" in finding.advice and "grouped_mm" in finding.snippet


def test_copies_of_matrices_are_told_beside_a_larger_saving(tmp_path):
    trace = experts(50.0)
    trace.op("aten::relu", 5000, 8)
    trace.kernel(made.RELU, 5010, 5, 5002)
    sentence = first_sentence(run_of(tmp_path, trace, *A100))
    assert sentence.count("the products of batches that read its copies take") == 1
    assert sentence.startswith("Largest possible saving: the GPU is idle")


MOE = "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1"


@pytest.mark.parametrize(("second", "share"), [(f"{MOE}_swiglu", "80.8 %"), (made.GEMM, "40.4 %")])
def test_a_product_counts_with_its_kernels_variants(tmp_path, second, share):
    trace = decoding("step[DECODE bs=1]", MOE)
    halves = [event for event in trace.events if event["name"] == MOE]
    for event in halves:
        event["dur"] /= 2
        trace.events.append(event | {"name": second, "ts": event["ts"] + event["dur"]})
    sentence = first_sentence(run_of(tmp_path, trace, *H100))
    assert f"takes {share}." in sentence
    assert (f"{MOE} with 1 variant of it, takes" in sentence) == (second != made.GEMM)


@pytest.mark.parametrize(("busy_us", "told"), [(80, True), (63, False)])
def test_attention_is_told_beside_products_that_decode(tmp_path, busy_us, told):
    trace = decoding("step[DECODE bs=1]", product_us=60, busy_us=busy_us)
    for event in trace.events:
        event["name"] = "paged_attention_ll4mi_QKV_mfma16_kernel" if event["name"] == made.RELU else event["name"]
    sentence = first_sentence(run_of(tmp_path, trace, *H100))
    assert "products in 16 bits take" in sentence and ("Attention takes another" in sentence) == told


@pytest.mark.parametrize("is_pipeline", [True, False])
@pytest.mark.parametrize(("own_us", "named"), [(50, "ndimage/zoom.py(739): zoom"), (3000, "<built-in function shift>")])
def test_loading_by_a_pipeline_is_told_to_get_faster_and_not_another_loader(tmp_path, is_pipeline, own_us, named):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 20_000, 1)
    for number, at in enumerate((1000, 11_000)):
        trace.op("aten::mm", at - 900, 8)
        trace.kernel(made.GEMM, at - 890, 800 + number, at - 898)
        trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 8500, 1)
        folder = "transformers/pipelines" if is_pipeline else "project"
        trace.event("python_function", f"{folder}/pt_utils.py(180): __next__", at, 8500, 1)
        trace.event("python_function", "scipy/ndimage/zoom.py(739): zoom", at + 100, 8000 + number, 1)
        trace.event("python_function", "<built-in function shift>", at + 110 + own_us, 7980 + number - own_us, 1)
        trace.op("aten::mm", at + 8600, 20)
        trace.kernel(made.GEMM, at + 8630, 300, at + 8602)
    finding = finding_of(run_of(tmp_path, trace, *A100), "waiting-for-data")
    assert finding.where == named
    assert ("use_fast=True" in finding.snippet) == is_pipeline == ("num_workers" not in finding.snippet)


def test_slow_products_take_no_less_than_the_shortest_kernels(tmp_path):
    """Twelve products of 8 µs each, which an A100 computes in 0.3 µs, beside kernels of 3 µs."""
    factors = [[128, 512], [512, 512]]
    calls = [
        call for n in range(12) for call in (("aten::mm", made.GEMM, 8.0, factors), ("aten::relu", made.RELU, 3.0, []))
    ]
    calls.append(("aten::gelu", made.RELU, 400.0, []))  # the host is ahead
    saving = possible_savings(run_of(tmp_path, in_order(calls), *A100)).of("slow-products", ProductSaving)
    assert (saving.unlimited or saving).saved_us == pytest.approx(12 * (8 - 3))


def test_a_share_just_below_the_least_one_does_not_look_like_it():
    cost = SimpleNamespace(step_us=1000.0)
    shares = {us: step_share(us, cost) for us in (46.0, 49.8, 50.0, 44.0, 996.0)}
    assert shares == {46.0: "4.6 %", 49.8: "4.98 %", 50.0: "5 %", 44.0: "4 %", 996.0: "99.6 %"}


@pytest.mark.parametrize(
    ("factors", "padded"),
    [
        ([[1025, 8192], [8192, 1025]], "M 1025 · N 1032 · K 8192"),
        ([[1025, 8190], [8190, 1024]], "M 1025 · N 1024 · K 8192"),
        ([[1025, 8192], [8192, 1024]], ""),
    ],
)
def test_only_sizes_whose_elements_lie_side_by_side_are_padded(tmp_path, factors, padded):
    trace = products_of(factors, TENSILE.format(parts=1, stream=0), us=100.0)
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    assert (f"pad them ({padded})" in sentence) if padded else "pad them" not in sentence


@pytest.mark.parametrize("idle_us", [0, 400])
def test_sizes_to_pad_are_told_beside_idle_time_too(tmp_path, idle_us):
    trace = products_of([[1024, 8192], [8192, 1025]], TENSILE.format(parts=1, stream=0), us=200.0)
    trace.op("aten::relu", 2090 + idle_us, 8)
    trace.kernel(made.RELU, 2100 + idle_us, 20, 2092 + idle_us)
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    assert ("the GPU is idle" in sentence) == bool(idle_us)
    assert "pad them (M 1024 · N 1032 · K 8192)" in sentence
