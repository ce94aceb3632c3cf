"""What diagnose says first of a trace, and what it must not say."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, write


def run_of(tmp_path, trace, gpu="Tesla V100-SXM2-32GB"):
    properties = [{"name": gpu, "computeMajor": 7, "computeMinor": 0}]
    return load_run(
        import_traces([write(tmp_path / "t.json", trace.document(deviceProperties=properties))], tmp_path / "run")
    )


def products(*, backward=False, name=made.SIMT, dtype="float"):
    """A step of two products, the second in backward if asked for; idle for its last 200 µs."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for at in (10, 410):
        if backward and at > 10:
            trace.op("MmBackward0", 20, 10, 2)
        trace.op("aten::mm", 20, 8, 2 if backward and at > 10 else 1, **{"Input type": [dtype] * 2})
        trace.kernel(name, at, 400, 22, 2 if backward and at > 10 else 1)
    return trace


def test_findings_come_by_what_there_is_to_win_and_the_first_is_the_first_sentence(tmp_path):
    run = run_of(tmp_path, products(backward=True))
    wins = [f.win_ms for f in diagnose(run) if f.severity == "warning"]
    assert wins == sorted(wins, reverse=True) and len(wins) == 2
    assert diagnose(run)[0].code == "fp32-products"
    assert "80 % of the step in FP32" in first_sentence(run)
    # 800 µs at 125 / 15.7 of the rate
    assert wins[0] == pytest.approx(0.8 * (1 - 15.7 / 125))


def test_a_trace_that_trains_nothing_gets_no_advice_on_training(tmp_path):
    findings = diagnose(run_of(tmp_path, products()))
    assert findings[0].code == "fp32-products"
    assert not [f for f in findings if "loss" in f.snippet or "optimizer" in f.snippet or "GradScaler" in f.advice]


def test_a_trace_with_nothing_to_win_says_so(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 990, 2)
    run = run_of(tmp_path, trace)
    assert first_sentence(run).startswith("No change would save 5.00 % or more of the step: GEMM/conv takes 99.0 %")
    assert [f for f in diagnose(run) if f.severity == "warning"] == []


def test_concatenations_are_no_layout_changes_of_convolutions(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::cat", 1, 8)
    trace.kernel("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>", 10, 990, 2)
    assert not [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "layout-transposes"]


@pytest.mark.parametrize(("op", "says"), [("aten::copy_", "pin_memory"), ("aten::item", "loss.item()")])
def test_syncs_are_advised_on_by_their_operator(tmp_path, op, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.op(op, 300, 20)
    trace.event("call", "cudaStreamSynchronize", 301, 15, 1, correlation=77)
    trace.op("aten::mm", 590, 8)
    trace.kernel(made.GEMM, 600, 400, 592)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-syncs"]
    assert finding.where == op and says in finding.snippet and "fused" not in finding.snippet


def test_waiting_before_the_first_kernel_counts_though_the_step_begins_with_it(tmp_path):
    trace = products()
    trace.event("gpu_user_annotation", "ProfilerStep#3", 10, 800, "stream 7")
    late = [{**e, "ts": e["ts"] + 3000} if e["cat"] in ("kernel", "gpu_user_annotation") else e for e in trace.events]
    trace.events = late
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    run = run_of(tmp_path, trace)
    assert diagnose(run)[0].code == "host-bound"
    assert "79 % of the step because the host launches too late, 3.01 ms of it before the first kernel" in (
        first_sentence(run)
    )


def test_the_profilers_own_time_is_no_idle_time_of_a_trace_without_steps(tmp_path):
    trace = Made()
    trace.op("aten::mm", 5, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 5000, 1000, 6)
    trace.event("call", "cudaDeviceSynchronize", 100, 20_000, 1, correlation=9)
    run = run_of(tmp_path, trace)
    assert first_sentence(run).startswith("No change would save") and diagnose(run) == []


def test_a_window_that_is_hardly_used_is_told_to_be_start_up(tmp_path):
    trace = Made()
    for at in (0, 90_000):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 10, 100, at + 2)
    text = first_sentence(run_of(tmp_path, trace))
    assert "idle for 100 % of the profiled window" in text and text.endswith("profile after a warm-up.")


def test_another_accelerator_is_no_gpu_and_gets_no_advice_on_cuda(tmp_path):
    trace = Made()
    trace._names = {**trace._names, "call": "xpu_runtime"}
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 20, 8, **{"Input type": ["float"] * 2})
    trace.kernel("gemm_kernel", 500, 400, 22)
    run = run_of(tmp_path, trace, gpu="")
    assert "the device is idle" in first_sentence(run)
    assert not [f for f in diagnose(run) if "cuda" in f.snippet]


def test_ranges_of_nccl_without_a_kernel_show_that_the_device_was_not_recorded(tmp_path):
    trace = Made()
    trace.op("record_param_comms", 10, 60)
    trace.event("mark", "nccl:all_to_all", 14, 40, 1)
    assert [f.code for f in diagnose(run_of(tmp_path, trace))] == ["device-not-recorded"]
