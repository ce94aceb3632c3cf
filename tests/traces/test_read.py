"""The rows of a trace: numbers that can be added up by hand, in every layout, and traces that torch wrote."""

import json

import pandas as pd
import pytest
import torch

from amp_core.traces import read_trace
from tests.traces import made
from tests.traces.made import Made, read, training, write


def us(rows, column):
    """Time by the values of a column; "" for null."""
    return rows.groupby(rows[column].fillna(""))["total_us"].sum().to_dict()


@pytest.fixture(params=["new", "old", "list"])
def layout(request):
    return request.param


def test_every_layout_gives_the_same_rows(tmp_path, layout):
    _, rows = read(tmp_path, training(layout))
    _, new = read(tmp_path, training("new"))
    rows["top_op"] = rows["top_op"].str.removesuffix("0")
    new["top_op"] = new["top_op"].str.removesuffix("0")
    pd.testing.assert_frame_equal(rows, new)


def test_kernels_have_their_operator_phase_shapes_and_precision(tmp_path, layout):
    _, rows = read(tmp_path, training(layout))
    assert set(rows["step"]) == {5} and set(rows["steps"]) == {2} and set(rows["device"]) == {"cuda:0"}
    assert us(rows, "phase") == {"forward": 600, "backward": 1000, "optimizer": 100}
    forward = rows[(rows["name"] == made.GEMM) & (rows["phase"] == "forward")].iloc[0]
    assert (forward["op"], forward["top_op"], forward["count"]) == ("aten::addmm", "aten::linear", 2)
    assert (forward["tensor_core"], forward["precision"], forward["category"]) == ("yes", "fp16", "gemm")
    assert json.loads(forward["in_shapes"]) == [[4], [8, 16], [16, 4]]
    assert json.loads(forward["in_dtypes"]) == ["c10::Half"] * 3
    backward = rows[(rows["phase"] == "backward") & (rows["category"] == "gemm")]
    assert backward["op"].tolist() == ["aten::mm", "aten::mm"]
    assert set(backward["top_op"].str.removesuffix("0")) == {"AddmmBackward"}
    assert dict(zip(backward["name"], backward["precision"], strict=True)) == {made.GEMM: "fp16", made.SIMT: "fp32"}
    assert us(rows, "category") == {
        "memcpy": 80,
        "cast": 20,
        "gemm": 1000,
        "elementwise": 100,
        "communication": 400,
        "reduction": 20,
        "optimizer": 80,
    }


def test_the_window_adds_up(tmp_path, layout):
    trace, rows = read(tmp_path, training(layout))
    (window,) = pd.DataFrame(trace.windows).to_dict("records")
    named = None if layout == "list" else "NVIDIA A100-SXM4-80GB"
    assert window == {
        "step": 5,
        "steps": 2,
        "device": "cuda:0",
        "device_name": named,
        "wall_us": 1990,
        "busy_us": 2 * (300 + 490),
        "idle_us": 1990 - 2 * 790,
        "longest_idle_us": 50,
        "reach_frac": 1.0,
        "reach_half_frac": 0.898,
        "reach_most_frac": 0.632,
        "reach_all_frac": 0.482,
        "unwaited_us": 155,
        "unwaited_op": None,
        "unwaited_op_us": 260,
        "unwaited_alone_us": 155,
        "optimizer_sooner_us": 0,
        "data_us": 200,
        "idle_data_us": 200,
        "optimizer_us": None,
        "watch_us": 0,
        "kernel_us": rows["total_us"].sum(),
        "launches": 18,
        "cast_us": 20,
        "communication_us": 400,
        "communication_alone_us": 2 * (900 - 760),
        "idle_between_collectives_us": 0,
        "sync_us": 520,
        "syncs": 2,
        "last_syncs": 1,
        "inner_syncs": 0,
        "idle_sync_us": 90,
        "idle_syncs": 2,
        "idle_wait_us": 20,
        "idle_wait_lost_us": 0,
        "idle_latency_us": 0,
        "idle_filling_us": 0,
        "idle_late_start_us": 20,
        "idle_graph_us": 0,
        "idle_handover_us": 0,
        "copies_alone_us": 2 * 40,
        "host_function": None,
        "host_function_us": 0,
        "host_function_launches": 0,
        "host_second": None,
        "host_second_us": 0,
        "data_function": None,
        "data_function_us": 0,
        "idle_dispatch_us": 100,
        "idle_elsewhere_us": 0,
        "idle_copy_us": 0,
        "idle_copy_sync_us": 0,
        "longer_gap_steps": 0,
        "longer_optimizer_us": 0,
        "longer_function": None,
        "longer_function_us": 0,
        "longer_function_launches": 0,
        "longer_call": None,
        "longer_call_us": 0,
        "longer_compile_us": 0,
        "longer_place": None,
        "longer_place_us": 0,
        "longer_second": None,
        "longer_second_us": 0,
        "longer_host_wait_us": 0,
        "late_until_us": 150,
        "late_us": 100,
        "late_step": 5,
        "late_step_us": 50,
        "lead_outside_us": 0,
        "idle_between_waits_us": 50,
        "launches_between_waits": 9,
        "host_op": "aten::linear",
        "host_op_us": 80.0,
        "host_call": None,
        "host_call_kind": None,
        "host_call_us": 0,
        "host_call_op": None,
        "host_call_op_us": 0,
        "host_rest_op": "aten::linear",
        "host_rest_op_us": 80.0,
        "host_outside_us": 8.0,
        "host_between": "aten::copy_ and aten::linear",
        "host_between_us": 4,
        "alone_loading_us": 0,
        "lead_us": 0,
        "lead_data_us": 0,
        "sync_op": None,
        "inner_sync_op": None,
        "idle_profiling_us": 0,
        "host_us": pytest.approx(647, abs=1),
        "host_kernel": None,
        "host_kernel_us": 0,
        "host_range": None,
        "host_range_us": 0,
        "idle_sync_op": None,
        "idle_sync_op_us": 90,
        "idle_wait_op": None,
        "idle_wait_op_us": 0,
        "idle_wait_sync_us": 0,
        "products": 6,
        "began_us": made.BASE,
        "pause_us": 0,
    }


def test_phases_of_steps_are_times_of_the_device(tmp_path, layout):
    trace, _ = read(tmp_path, training(layout))
    steps = pd.DataFrame(trace.step_rows)
    assert steps["step"].tolist() == [5, 6] and steps["step_ms"].tolist() == [0.99, 0.99]
    assert steps["time_s"].tolist() == pytest.approx([0.99e-3, 1.99e-3])
    assert steps["data_ms"].tolist() == [0.1, 0.1]
    assert steps["forward_ms"].tolist() == pytest.approx([0.35, 0.35])  # until the end of the ReLU at 450
    assert steps["backward_ms"].tolist() == pytest.approx([0.31, 0.31])  # until the last product at 760
    assert steps["optimizer_ms"].tolist() == pytest.approx([0.19, 0.19])


def test_operators_are_those_of_the_first_step(tmp_path):
    trace, _ = read(tmp_path, training())
    ops = pd.DataFrame(trace.ops).set_index("op")
    assert set(ops["step"]) == {5} and (ops["count"] == 1).all()
    assert ops.loc["aten::addmm", "in_dtypes"] == "float16"
    assert ops.loc["aten::relu", "phase"] == "forward" and ops.loc["aten::_foreach_norm", "phase"] == "optimizer"
    casts = ops.loc[["aten::copy_"]]
    assert sorted(casts["cast_bytes"]) == [0, 16 * 4 * 2]
    assert "aten::linear" not in ops.index and "record_param_comms" not in ops.index


@pytest.mark.parametrize(
    ("modules", "name", "whole"),
    [("ampscope", "blocks.0.fc", ""), ("python", "Net_0.Linear_3", "Net_0"), (None, None, None)],
)
def test_the_module_is_that_of_the_operator_or_in_backward_of_its_forward(tmp_path, modules, name, whole):
    trace, rows = read(tmp_path, training(modules=modules))
    products = rows[rows["category"] == "gemm"]
    assert set(products["phase"]) == {"forward", "backward"} and set(products["module"]) == {name}
    assert set(rows[rows["op"] == "aten::relu"]["module"]) == {whole}
    assert rows[rows["phase"] == "optimizer"]["module"].isna().all()
    assert pd.DataFrame(trace.ops).set_index("op").loc["aten::addmm", "module"] == name


def test_without_marked_steps_the_trace_is_one_window_without_a_number(tmp_path):
    document = training()
    document["traceEvents"] = [e for e in document["traceEvents"] if not e["name"].startswith("ProfilerStep")]
    trace, rows = read(tmp_path, document)
    assert rows["step"].isna().all() and rows["steps"].isna().all() and trace.steps == 0
    assert us(rows, "phase") == {"forward": 600, "backward": 1000, "optimizer": 100}
    (window,) = pd.DataFrame(trace.windows).to_dict("records")
    assert window["step"] is None and window["wall_us"] == 1800 and window["busy_us"] == 1580


def test_non_consecutive_steps_are_separate_windows(tmp_path):
    document = training(steps=3)
    for event in document["traceEvents"]:
        if event["name"] == "ProfilerStep#7":
            event["name"] = "ProfilerStep#50"
    trace, rows = read(tmp_path, document)
    windows = pd.DataFrame(trace.windows)
    assert windows[["step", "steps", "launches"]].values.tolist() == [[5, 2, 18], [50, 1, 9]]
    assert rows[rows["step"] == 50]["total_us"].sum() == 850


def test_kernels_launched_outside_the_steps_have_no_step(tmp_path):
    document = training(steps=2)
    document["traceEvents"] = [e for e in document["traceEvents"] if e["name"] != "ProfilerStep#6"]
    trace, rows = read(tmp_path, document)
    assert rows[rows["step"].isna()]["total_us"].sum() == rows[rows["step"] == 5]["total_us"].sum() == 850
    (window,) = pd.DataFrame(trace.windows).to_dict("records")
    assert (window["steps"], window["launches"], window["wall_us"]) == (1, 9, 990)


def test_kernels_of_a_graph_belong_to_the_call_that_launched_it(tmp_path):
    graph = Made()
    graph.op("aten::graph_user", 0, 50)
    graph.event("call", "cudaGraphLaunch", 10, 5, 1, correlation=9)
    for i in range(3):
        graph.event("kernel", made.GEMM, 20 + 10 * i, 10, 7, correlation=9, device=0)
    _, rows = read(tmp_path, graph.document())
    assert rows[["op", "count", "total_us"]].values.tolist() == [["aten::graph_user", 3, 30]]


def test_kernels_without_their_call_are_linked_by_external_id_or_not_at_all(tmp_path):
    lone = Made()
    lone.op("aten::mm", 0, 50)
    lone.event("kernel", "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN", 20, 10, 7, correlation=9, device=0)
    lone.events[-1]["args"]["External id"] = lone.events[0]["args"]["External id"]
    lone.event("kernel", made.GEMM, 40, 10, 7, correlation=99, device=0)
    lone.events[-1]["args"]["External id"] = 99
    _, rows = read(tmp_path, lone.document())
    assert rows["op"].fillna("").tolist() == ["aten::mm", ""] and rows["phase"].fillna("").tolist() == ["forward", ""]


def test_the_own_time_of_a_cpu_operator_excludes_inner_operators_and_watching(tmp_path):
    cpu = Made()
    cpu.op("aten::linear", 0, 100)
    cpu.op("aten::addmm", 20, 60)
    cpu.event("mark", "ampscope.phase:watch", 40, 1, 1)
    cpu.event("mark", "ampscope.phase:forward", 55, 1, 1)
    _, rows = read(tmp_path, cpu.document())
    assert rows.set_index("op")["total_us"].to_dict() == {"aten::linear": 100 - 60, "aten::addmm": 60 - (55 - 40)}


def test_a_copy_between_types_is_a_cast_where_both_are_known(tmp_path):
    copies = Made()
    for at, types in ((0, ["c10::Half", "float"]), (20, ["c10::Half", "Mystery"]), (40, ["float", "float"])):
        copies.op("aten::copy_", at, 10, **{"Input Dims": [[16, 4], [16, 4]], "Input type": types})
    trace = read_trace(write(tmp_path / "t.json", copies.document()))
    assert sum(trace.ops["cast_bytes"]) == 16 * 4 * 2


def test_each_device_has_its_own_window(tmp_path):
    document = training()
    for event in document["traceEvents"]:
        if event["name"] == made.NCCL:
            event["args"]["device"] = 1
    document["deviceProperties"].append({"name": "other"})
    trace, rows = read(tmp_path, document)
    windows = pd.DataFrame(trace.windows).set_index("device")
    assert windows.loc["cuda:1", "busy_us"] == 400 and windows.loc["cuda:1", "device_name"] == "other"
    assert windows.loc["cuda:0", "communication_us"] == 0
    assert us(rows, "device") == {"cuda:0": 1300, "cuda:1": 400}


def test_inference_counts_as_forward(tmp_path):
    quiet = Made()
    quiet.op("aten::mm", 0, 50)
    quiet.kernel(made.GEMM, 20, 10, 5)
    _, rows = read(tmp_path, quiet.document())
    assert rows["phase"].tolist() == ["forward"]


def test_a_second_micro_batch_and_zero_grad_between_do_not_hide_forward(tmp_path):
    two = Made()
    for at in (0, 200):
        two.op("aten::mm", at, 20)
        two.kernel(made.GEMM, at + 20, 10, at + 5)
        two.event("mark", "Optimizer.zero_grad#SGD.zero_grad", at + 30, 5, 1)
        two.op("MmBackward0", at + 60, 20, 2)
        two.kernel(made.GEMM, at + 90, 10, at + 65, 2)
    two.event("mark", "Optimizer.step#SGD.step", 300, 10, 1)
    two.kernel(made.ADAM, 310, 10, 305)
    two.kernel(made.RELU, 400, 10, 390)
    _, rows = read(tmp_path, two.document())
    assert us(rows, "phase") == {"forward": 20, "backward": 20, "optimizer": 10, "": 10}


def test_kernels_of_ampscope_are_separate(tmp_path):
    own = Made()
    own.event("mark", "ProfilerStep#0", 0, 1000, 1)
    own.event("mark", "ampscope.phase:data", 0, 1, 1)
    own.event("mark", "ampscope.phase:forward", 100, 1, 1)
    own.op("aten::mm", 110, 20)
    own.kernel(made.GEMM, 200, 100, 115)
    own.event("mark", "ampscope.phase:watch", 150, 1, 1)
    own.op("aten::abs", 160, 20)
    own.kernel(made.RELU, 250, 100, 170)
    own.event("mark", "ampscope.phase:backward", 400, 1, 1)
    own.op("MmBackward0", 410, 10, 2)
    own.kernel(made.GEMM, 450, 50, 415, 2)
    own.event("mark", "ampscope.phase:after_backward", 430, 1, 1)
    own.op("aten::norm", 500, 10)
    own.kernel(made.NORM, 520, 10, 505)
    own.event("mark", "ampscope.phase:optimizer", 540, 1, 1)
    own.event("mark", "ampscope.phase:watch", 545, 1, 1)
    own.event("mark", "ampscope.phase:optimizer", 560, 1, 1)
    own.op("aten::_fused_sgd_", 570, 10)
    own.kernel(made.ADAM, 600, 10, 575)
    trace, rows = read(tmp_path, own.document())
    assert us(rows, "phase") == {"forward": 100, "watch": 100, "backward": 50, "optimizer": 20}
    (window,) = pd.DataFrame(trace.windows).to_dict("records")
    # Its kernels run alone from 300 to 350; the device is idle during its host work: 150 to 200, 350 to 400, 545 to
    # 560.
    assert (window["data_us"], window["watch_us"]) == (100, 50 + 50 + 50 + 15)
    assert window["busy_us"] + window["idle_us"] == window["wall_us"] == 1000


def test_phases_may_be_marked_on_any_thread(tmp_path):
    """On a GPU the hooks that mark backward and its end run on a thread of autograd."""
    marked = Made()
    marked.event("mark", "ampscope.phase:forward", 0, 1, 1)
    marked.op("aten::mm", 5, 5)
    marked.kernel(made.GEMM, 20, 10, 6)
    marked.event("mark", "ampscope.phase:backward", 12, 1, 2)
    marked.op("MmBackward0", 15, 10, 2)
    marked.kernel(made.SIMT, 40, 10, 16, 2)
    marked.event("mark", "ampscope.phase:watch", 17, 1, 2)
    marked.kernel(made.RELU, 60, 10, 18, 2)
    marked.event("mark", "ampscope.phase:backward", 20, 1, 2)
    marked.kernel(made.NCCL, 70, 10, 30, 2)
    marked.event("mark", "ampscope.phase:after_backward", 32, 1, 2)
    marked.kernel(made.NORM, 80, 10, 35)
    marked.event("mark", "ampscope.phase:optimizer", 40, 1, 1)
    marked.kernel(made.ADAM, 90, 10, 45)
    _, rows = read(tmp_path, marked.document())
    phases = dict(zip(rows["name"], rows["phase"], strict=True))
    assert phases == {
        made.GEMM: "forward",
        made.SIMT: "backward",
        made.RELU: "watch",
        made.NCCL: "backward",
        made.NORM: "optimizer",
        made.ADAM: "optimizer",
    }


def test_a_trace_of_a_cpu_has_operators_and_their_own_time(tmp_path):
    file = tmp_path / "cpu.json.gz"
    model = torch.nn.Linear(8, 4)
    with torch.profiler.profile(record_shapes=True) as profiler:
        for number in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                model(torch.ones(2, 8)).sum().backward()
    profiler.export_chrome_trace(str(file))
    trace = read_trace(file)
    rows = pd.DataFrame(trace.kernels)
    assert rows["tensor_core"].isna().all() and set(rows["device"]) == {"cpu"} and trace.device == "cpu"
    windows = pd.DataFrame(trace.windows)
    assert windows["steps"].tolist() == [3] and windows["launches"].isna().all()
    product = rows[rows["op"] == "aten::addmm"].iloc[0]
    assert (product["count"], product["category"], product["precision"]) == (3, "gemm", "fp32")
    assert product["phase"] == "forward" and product["top_op"] == "aten::linear"
    outer = rows[rows["op"] == "aten::linear"]
    assert 0 < outer["total_us"].sum() < sum(trace.windows["busy_us"])
    ops = pd.DataFrame(trace.ops).set_index("op")
    assert ops.loc["aten::addmm", "count"] == 1 and ops.loc["aten::sum", "count"].sum() == 2
    assert not {"aten::linear", "aten::copy_", "aten::expand", "aten::t"} & set(ops.index)
    inside = rows[rows["step"].notna()]
    assert inside["total_us"].sum() == pytest.approx(windows["kernel_us"].sum())


def test_the_head_has_the_facts_of_the_trace(tmp_path):
    trace, _ = read(
        tmp_path,
        training(
            distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8},
            cuda_runtime_version=12040,
            baseTimeNanoseconds=10**18,
            junk={"x": 1},
        ),
    )
    assert (trace.rank, trace.world_size, trace.device) == (3, 8, "cuda:0")
    assert trace.gpus == [
        {
            "name": "NVIDIA A100-SXM4-80GB",
            "capability": "8.0",
            "memory_bytes": 85 * 10**9,
            "multiprocessors": 108,
        }
    ]
    assert trace.facts == {"schemaVersion": 1, "cuda_runtime_version": 12040}
    assert trace.began_us == made.BASE + 1e15


def launched(name, types, op="aten::_scaled_dot_product_flash_attention", **head):
    """One kernel of an operator with inputs of these types."""
    one = Made()
    one.op(op, 0, 20, **{"Input Dims": [[8, 8]] * len(types), "Input type": types})
    one.kernel(name, 10, 50, 5)
    return one.document(**head)


AMD = {"deviceProperties": [{"name": "AMD Instinct MI300X", "warpSize": 64, "computeMajor": 9, "computeMinor": 4}]}


@pytest.mark.parametrize(
    ("name", "types", "head", "tensor_core", "precision"),
    [
        ("attn_fwd", ["c10::BFloat16"] * 3, AMD, "yes", "bf16"),
        ("attn_fwd", ["float"] * 3, AMD, "unknown", "fp32"),
        ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_bA16_t128x32x512", ["c10::BFloat16"] * 2, {}, "yes", "fp8"),
        ("void gemm_unknown_e4m3<1>", ["c10::BFloat16"] * 2, {}, "unknown", None),
        ("void ck::kernel_gemm_xdl_cshuffle_v3<1>", ["float"] * 2, AMD, "yes", "fp32"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", ["float"] * 2, {}, "yes", "tf32"),
    ],
)
def test_precision_is_the_names_and_else_the_operators(tmp_path, name, types, head, tensor_core, precision):
    _, rows = read(tmp_path, launched(name, types, **head))
    assert rows["tensor_core"].tolist() == [tensor_core]
    assert [None if p != p else p for p in rows["precision"]] == [precision]


@pytest.mark.parametrize(
    ("linked", "products", "expected"),
    [
        ("c10::BFloat16", made.SIMT, ("yes", "bf16")),  # of the same name
        ("float", made.GEMM, ("unknown", None)),
        (None, made.GEMM, ("yes", None)),  # a model in 16 bits
        (None, made.SIMT, ("unknown", None)),
    ],
)
def test_products_by_dot_in_a_graph_are_classified_by_the_rest_of_the_trace(tmp_path, linked, products, expected):
    """A captured graph records no operator for its kernels."""
    trace = Made()
    trace.op("aten::mm", 0, 20, **{"Input type": ["c10::Half"] * 2 if products == made.GEMM else ["float"] * 2})
    trace.kernel(products, 100, 400, 5)
    if linked is not None:
        trace.op("vllm::unified_attention", 30, 20, **{"Input type": [linked] * 3})
        trace.kernel("kernel_unified_attention_2d", 600, 20, 35)
    trace.kernel("kernel_unified_attention_2d", 700, 20, 60)
    _, rows = read(tmp_path, trace.document())
    (row,) = rows[(rows["name"] == "kernel_unified_attention_2d") & rows["op"].isna()].to_dict("records")
    assert (row["tensor_core"], row["precision"] if isinstance(row["precision"], str) else None) == expected


@pytest.mark.parametrize(
    ("name", "op", "expected"),
    [
        ("triton_", "triton_poi_fused_add_0", ("no", "elementwise")),
        ("triton_", "triton_red_fused_sum_0", ("no", "reduction")),
        ("triton_", "aten::mm", ("unknown", "gemm")),
    ],
)
def test_a_kernel_of_inductor_without_a_name_has_that_of_its_operator(tmp_path, name, op, expected):
    trace = Made()
    trace.op(op, 0, 50)
    trace.kernel(name, 20, 10, 5)
    _, kernels = read(tmp_path, trace.document())
    assert (kernels["tensor_core"].item(), kernels["category"].item()) == expected


def test_random_numbers_are_no_norm(tmp_path):
    trace = Made()
    trace.op("aten::normal_", 0, 50)
    _, kernels = read(tmp_path, trace.document())
    assert kernels["category"].item() == "elementwise"


def test_work_is_linked_to_calls_that_have_only_an_external_id(tmp_path):
    """As some versions of ROCm write it: the correlation of a launch is the `External id` of both."""
    trace = Made()
    for number in range(4):
        trace.op("aten::mm", 100 * number, 20, **{"Input type": ["c10::Half"] * 2})
        trace.op("aten::view", 100 * number + 50, 20)
        trace.kernel(made.GEMM, 100 * number + 10, 80, 100 * number + 5)
    for event in trace.events:
        arguments = event.get("args", {})
        if "correlation" in arguments:
            arguments["External id"] = arguments.pop("correlation") - 10_000
    _, kernels = read(tmp_path, trace.document())
    assert set(kernels["op"]) == {"aten::mm"} and kernels["count"].sum() == 4


@pytest.mark.parametrize("on_gpu", [False, True])
def test_traces_without_categories_hold_operators_and_no_kernels(tmp_path, on_gpu):
    """As torch.autograd.profiler wrote them up to PyTorch 1.7: the times on the device are those of operators."""
    events = [{"name": "aten::mm", "ph": "X", "ts": 10.5, "dur": 30, "tid": 1, "pid": "CPU functions", "args": {}}]
    if on_gpu:
        events.append({"name": "aten::mm", "ph": "s", "ts": 10.5, "tid": 1, "pid": "CPU functions", "id": 0})
        events.append(events[0] | {"tid": 0, "pid": "CUDA functions"})
    trace = read_trace(write(tmp_path / "t.json", events))
    assert trace.unrecorded == on_gpu
    assert trace.kernels == {} if on_gpu else trace.kernels["name"] == ["aten::mm"]
