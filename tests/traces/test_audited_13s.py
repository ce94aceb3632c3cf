"""Savings that belong together, which public traces showed to be told apart or too small."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.saving import ProductSaving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_refuted_kernels import SOFTMAX
from tests.traces.test_told_products import A100, BF16

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
