"""What further traces of other people's programs refuted: sizes of copies, waiting that is none of a loop, and what
shows a device."""

import json

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.rank_waiting import started_apart
from amp_core.findings import first_sentence
from amp_core.traces import read_trace
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of, runs_of
from tests.traces.test_collectives import collective

PAGEABLE = "Memcpy HtoD (Pageable -> Device)"


@pytest.mark.parametrize(("op", "told"), [("mine::lookup_exact_cuda", True), ("mine::lookup_cuda_count", False)])
def test_an_operator_that_is_named_after_a_device_runs_on_it(tmp_path, op, told):
    trace = Made()
    trace.op(op, 0, 8_000)
    trace.op("aten::add", 8_000, 1_000)
    codes = [f.code for f in diagnose(run_of(tmp_path, trace))]
    assert ("device-not-recorded" in codes) == told and ("idle-gpu" in codes) != told


def copies(tmp_path, copied_bytes, kernel_us=0.0):
    """Two steps of a millisecond, each nearly all in one copy from memory that is not pinned."""
    trace = Made()
    for step in range(2):
        at = 1000 * step
        trace.event("mark", f"ProfilerStep#{step}", at, 1000, 1)
        trace.kernel(PAGEABLE, at + 20, 950, at + 10, sort="copy", call_us=962)
        trace.events[-1]["args"]["bytes"] = copied_bytes
        if kernel_us:
            trace.kernel(made.RELU, at + 975, kernel_us, at + 973)
    return run_of(tmp_path, trace)


@pytest.mark.parametrize(
    ("copied_bytes", "kernel_us", "saved_ms"),
    [(6_000, 0.0, 1.0), (30_000_000, 0.0, 0.5), (30_000_000, 20.0, 0.4975), (120_000_000, 0.0, 0.05)],
)
def test_copies_are_no_faster_than_the_link_to_the_host(tmp_path, copied_bytes, kernel_us, saved_ms):
    # At 60 GB/s 30 MB take 500 µs; 120 MB are faster here, and no faster at their own rate. 50 µs are idle beside them.
    finding = finding_of(copies(tmp_path, copied_bytes, kernel_us), "copies")
    assert finding.win_ms == pytest.approx(saved_ms, rel=1e-3)


@pytest.mark.parametrize(("capability", "gb_per_s"), [((7, 0), 60), ((7, 5), 15), ((8, 0), 30), ((8, 9), 30),
                                                     ((9, 0), 60), ((12, 0), 60)])  # fmt: skip
def test_the_link_to_the_host_is_that_of_the_gpus_generation(tmp_path, capability, gb_per_s):
    """V100 and H100 are also sold with links that are faster than PCIe."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("aten::copy_", 1, 20)
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 10, 9_000, 2, sort="copy")
    trace.events[-1]["args"]["bytes"] = 30_000_000
    finding = finding_of(run_of(tmp_path, trace, "NVIDIA GPU", capability), "copies")
    assert finding.win_ms == pytest.approx(9.0 - 30 / gb_per_s, abs=0.03)


def test_a_head_that_was_cut_by_hand_is_left_out(tmp_path, capsys):
    document = made.training()
    text = json.dumps(document)
    events = text[text.index('"traceEvents"') :]
    file = tmp_path / "t.json"
    file.write_text('{\n {"id": 6, "name": "NVIDIA P' + " " * (2**20) + events, encoding="utf-8")
    trace = read_trace(file)
    assert trace.repaired == 1 and trace.steps == 2
    assert any("1 value was not valid JSON and was repaired or left out" in note for note in trace.notes)


@pytest.mark.parametrize("later_waits", [False, True])
def test_ranks_that_began_at_different_times_tell_nothing_of_a_loop(tmp_path, later_waits):
    ranks = []
    for rank in range(2):
        trace = Made()
        trace.kernel(made.GEMM, 60, 20, 20)
        first = 1980 if rank else 100
        collective(trace, first, 2000 - first, first - 20)
        for n in range(3):
            at = 2000 + 1000 * n
            enters = at + (930 if rank or not later_waits else 50)
            trace.kernel(made.GEMM, at, enters - at, at - 30)
            collective(trace, enters, at + 950 - enters, at - 20)
        ranks.append(trace)
    run = runs_of(tmp_path, ranks)
    assert started_apart(run) != later_waits
    if not later_waits:
        finding = finding_of(run, "exposed-communication")
        assert "begin what was recorded at different times" in finding.advice and "nproc" not in finding.snippet


def test_casts_alone_are_not_told_to_be_compiled(tmp_path):
    trace = Made()
    for n in range(8):
        host, at = 60 * n, 500 + 990 * n
        trace.op("aten::copy_", host, 15, **{"Input Dims": [[4096, 4096]] * 2, "Input type": ["c10::Half", "float"]})
        trace.kernel(made.CAST, at, 300, host + 5)
        trace.op("aten::mm", host + 25, 10)
        trace.kernel(made.GEMM, at + 300, 690, host + 28)
    finding = finding_of(run_of(tmp_path, trace), "memory-bound-kernels")
    assert "torch.compile" not in finding.snippet and "keep weights" in finding.advice


def test_the_first_work_of_a_step_after_a_wait_is_not_told_to_be_captured(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.event("gpu_user_annotation", "ProfilerStep#3", 200, 790, "stream 7")
    trace.events[-1]["pid"] = 0
    trace.op("aten::mm", 150, 30)
    trace.kernel(made.GEMM, 200, 400, 160)
    trace.kernel(made.GEMM, 600, 390, 170)
    trace.event("call", "cudaStreamSynchronize", 200, 792, 1)
    run = run_of(tmp_path, trace)
    finding = finding_of(run, "launch-bound")
    assert "between kernels of" not in first_sentence(run)
    assert "idle between steps" in finding.advice and "compile" not in finding.snippet


@pytest.mark.parametrize(("slow", "told"), [(32, "the fastest tenth of"), (12, "the median of"), (0, "")])
def test_calls_most_of_which_wait_for_a_processor_are_held_against_the_fastest(tmp_path, slow, told):
    trace, at = Made(), 0
    for n in range(40):
        us = 5_000 if n >= 40 - slow else 100
        trace.op("aten::mm", at, us, **{"Input Dims": [[64, 64]] * 2, "Input type": ["float"] * 2})
        at += us + 1
    found = [f.title for f in diagnose(run_of(tmp_path, trace)) if f.code == "shared-processor"]
    assert [told in title for title in found] == ([True] if told else [])


def test_bf16_that_a_gpu_emulates_is_named(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 5, 8, **{"Input Dims": [[512, 512]] * 2, "Input type": ["c10::BFloat16"] * 2})
    kernel = "void magma_sgemmEx_kernel<float, __nv_bfloat16, __nv_bfloat16, false, false, 6, 3, 5, 3, 3>(int, int)"
    trace.kernel(kernel, 20, 970, 6)
    run = run_of(tmp_path, trace, "Tesla T4", (7, 5))
    sentence = first_sentence(run)
    assert "on inputs in BF16, which the tensor cores of this GPU do not take" in sentence
    assert "FP16 is" in sentence and "16 bits are" not in sentence
    assert "BF16 is emulated" in finding_of(run, "fp32-products").advice


def test_a_quantized_model_is_not_moved_to_a_gpu_as_it_is(tmp_path):
    trace = Made()
    trace.op("quantized::linear_dynamic", 0, 900)
    trace.op("aten::addmm", 900, 500, **{"Input Dims": [[64], [64, 64], [64, 64]], "Input type": ["float"] * 3})
    finding = finding_of(run_of(tmp_path, trace), "idle-gpu")
    assert "before quantization" in finding.title and "torchao" in finding.advice
