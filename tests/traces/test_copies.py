"""What is said of copies, fills and synchronizations."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, products, run_of


@pytest.mark.parametrize(
    ("copy", "trains", "says"),
    [
        ("Memcpy HtoD (Pageable -> Device)", False, "pin_memory"),
        ("Memcpy HtoD (Pinned -> Device)", False, "stream"),
        ("Memcpy DtoD (Device -> Device)", False, "compile"),
        ("Memcpy PtoP (Device -> Device)", True, "nproc-per-node"),
        ("CopyHostToDevice", False, "pin_memory"),
        ("CopyDeviceToHost", False, ".cpu() once"),
        ("FillBuffer", False, "torch.empty"),
        ("__amd_rocclr_copyBuffer", False, "non_blocking"),
        ("Memset (Device)", True, "torch.empty"),
        ("Memset (Device)", False, "torch.empty"),
    ],
)
def test_copies_are_advised_on_by_their_direction(tmp_path, copy, trains, says):
    trace = products(backward=trains)
    trace.kernel(copy, 810, 150, 430, sort="copy")
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert finding.where == copy and says in finding.snippet
    assert ("pin_memory" in finding.snippet) == ("Pageable" in copy or copy == "CopyHostToDevice")


@pytest.mark.parametrize("loads", [False, True])
def test_code_for_a_loader_is_shown_where_the_trace_has_one(tmp_path, loads):
    trace = products()
    if loads:
        trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5, 1)
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 810, 150, 430, sort="copy")
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert ("DataLoader(data" in finding.snippet) == loads == ("x.pin_memory()" not in finding.snippet)


@pytest.mark.parametrize(
    ("outer", "inner", "says"), [("aten::zero_",) * 2 + ("set_to_none",), ("aten::zeros", "aten::zero_", "torch.empty")]
)
def test_fills_of_gradients_are_told_from_those_of_new_tensors(tmp_path, outer, inner, says):
    trace = products(backward=True)
    trace.op(outer, 425, 20)
    if inner != outer:
        trace.op(inner, 427, 10)
    trace.kernel("Memset (Device)", 810, 150, 430, sort="copy")
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert says in finding.snippet


@pytest.mark.parametrize(("stream", "already"), [(7, False), (20, True)])
def test_copies_on_a_stream_of_their_own_are_not_told_to_move_to_one(tmp_path, stream, already):
    trace = products()
    trace.kernel(made.COPY, 810, 150, 430, sort="copy", stream=stream)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert ("on a stream of their own" in finding.advice) == already


def test_pageable_copies_in_both_directions_are_told_to_pin(tmp_path):
    trace = products()
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 810, 80, 800, sort="copy")
    trace.kernel("Memcpy DtoH (Device -> Pageable)", 890, 100, 880, sort="copy")
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert "DtoH" in finding.where and "pin_memory=True" in finding.snippet


@pytest.mark.parametrize(("memory", "pin"), [("Pageable", True), ("Pinned", False)])
def test_the_host_that_copies_while_the_device_waits_is_told_to_pin(tmp_path, memory, pin):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2_000, 1)
    trace.kernel(made.RELU, 5, 3, 2)
    trace.op("aten::to", 100, 1_200)
    trace.kernel(f"Memcpy HtoD ({memory} -> Device)", 1_310, 40, 800, sort="copy", call_us=500)
    trace.kernel(made.GEMM, 1_400, 500, 1_380)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-bound"]
    assert finding.where == "aten::to" and ("pin_memory=True" in finding.snippet) == pin


@pytest.mark.parametrize(("op", "created"), [("aten::ones", True), ("aten::sort", False)])
def test_copies_of_tensors_that_the_host_creates_are_not_told_to_pin(tmp_path, op, created):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.kernel(made.RELU, 5, 3, 2)
    trace.op(op, 10, 4_900)
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 5_000, 4_000, 4_950, sort="copy", call_us=4_020)
    trace.kernel(made.RELU, 9_100, 800, 9_050)
    findings = {f.code: f for f in diagnose(run_of(tmp_path, trace))}
    assert ("device=device" in findings["copies"].snippet) == created
    assert ("pin_memory" in findings["copies"].snippet) == (not created)
    # The operator takes 94 % of what the host could save.
    (*_, last) = findings["host-bound"].evidence()
    assert last.endswith("saved, with all else that the host does meanwhile, limit 5.00 %")


@pytest.mark.parametrize(
    ("op", "trains", "says"),
    [
        ("aten::copy_", False, "pin_memory"),
        ("aten::item", True, "loss.item()"),
        ("aten::item", False, "torch.where(condition, a, b)"),
    ],
)
def test_syncs_are_advised_on_by_their_operator(tmp_path, op, trains, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.op(op, 20, 300)
    trace.event("call", "cudaStreamSynchronize", 21, 295, 1, correlation=77)
    trace.op("aten::mm", 590, 8)
    trace.op("MmBackward0" if trains else "aten::linear", 589, 20)
    trace.kernel(made.GEMM, 600, 400, 592)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-syncs"]
    assert finding.where == op and says in finding.snippet and "fused" not in finding.snippet


def test_thousands_of_syncs_are_written_as_a_whole_number(tmp_path):
    trace = Made()
    for at in range(0, 1200 * 100, 100):
        trace.op("aten::mm", at, 8)
        trace.kernel(made.GEMM, at + 10, 40, at + 2)
        trace.event("call", "cudaStreamSynchronize", at + 11, 40, 1, correlation=77)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-syncs"]
    assert "1,199 synchronizations" in finding.title  # the last one is followed by nothing


def test_copies_alone_are_the_largest_saving_of_a_trace_without_kernels(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel("Memcpy DtoH (Device -> Pageable)", 10, 900, 2, sort="copy")
    run = run_of(tmp_path, trace)
    assert first_sentence(run).startswith("Largest possible saving: the GPU only copies and fills for 90 % of the step")
    assert diagnose(run)[0].code == "copies"


@pytest.mark.parametrize(("moved", "told"), [(3_000_000, "moves 1.43 MiB at 20.0 GB/s"), (None, "")])
def test_copies_are_told_with_their_rate(tmp_path, moved, told):
    trace = Made()
    for number in range(2):
        trace.event("mark", f"ProfilerStep#{number}", 1_000 * number, 1_000, 1)
        trace.kernel(made.COPY, 1_000 * number + 10, 75, 1_000 * number + 5, sort="copy")
        if moved:
            trace.events[-1]["args"]["bytes"] = moved // 2
        trace.kernel(made.GEMM, 1_000 * number + 85, 900, 1_000 * number + 50)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert ("moves" in finding.title) == bool(told) and told in finding.title


@pytest.mark.parametrize(("copies", "told"), [(2, True), (40, False)])
def test_results_that_are_copied_at_once_are_not_told_to_be_copied_occasionally(tmp_path, copies, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.kernel(made.GEMM, 10, 4_000, 2)
    for number in range(copies):
        us = 5_000 / copies
        trace.kernel("Memcpy DtoH (Device -> Pageable)", 4_010 + us * number, us, 3_000 + number, sort="copy")
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert ("pin_memory=True" in finding.snippet, "only occasionally" in finding.advice) == (told, not told)


def test_copies_that_compiled_code_starts_are_not_told_to_be_compiled(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    for number in range(10):
        trace.op("CompiledFunction", 900 * number, 800)
        trace.op("aten::clone", 900 * number + 5, 100)
        trace.kernel("Memcpy DtoD (Device -> Device)", 900 * number + 50, 400, 900 * number + 10, sort="copy")
        trace.op("aten::mm", 900 * number + 200, 50)
        trace.kernel(made.GEMM, 900 * number + 460, 400, 900 * number + 210)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "copies"]
    assert finding.advice.startswith("Compiled code itself") and "compile them too" not in finding.advice


@pytest.mark.parametrize("moved", [-5, 9e17, "many"])
def test_bytes_that_cannot_be_are_none(tmp_path, moved):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1_000, 1)
    for number in range(20):
        trace.kernel(made.COPY, 40 * number + 10, 30, 40 * number + 5, sort="copy")
        trace.events[-1]["args"]["bytes"] = moved
    run = run_of(tmp_path, trace)
    assert run.kernels["moved_bytes"].isna().all()
    assert [f.title for f in diagnose(run) if f.code == "copies" and "moves" in f.title] == []
