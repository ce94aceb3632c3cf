"""`import-trace`: from files to a run that every page can open."""

import gzip
import json

import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.__main__ import main
from amp_core.analysis import amdahl, compare, overview, step_cost
from amp_core.figures.chart_data import chart_csv
from amp_core.findings import first_sentence
from amp_core.hardware.gpus import gpu_of
from amp_core.report import report_html
from amp_core.traces import import_notes, import_traces, read_trace
from amp_core.views import KERNELS
from tests.traces.made import BASE, GEMM, RELU, Made, run_of, training, write
from tests.traces.test_step_windows import queued


def trace_of(tmp_path, rank=None, name="t.json", **head):
    recorded = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 4}}
    return write(tmp_path / name, training(**recorded, **head))


def test_a_trace_becomes_a_run(tmp_path):
    run = load_run(import_traces([trace_of(tmp_path)], tmp_path / "run", name="profiled"))
    run.validate(full=True)
    assert (run.status, run.name, run.head.world_size) == ("finished", "profiled", 1)
    assert run.head.config == {
        "source": "import",
        "format": "torch.profiler",
        "traces": ["t.json"],
        "device": "cuda:0",
        "optimizers": ["AdamW"],
        "sync_call": "cudaStreamSynchronize",
        "loader": "workers",
    }
    assert run.head.environment["gpus"][0]["capability"] == "8.0"
    assert run.head.created_at.startswith("2023-11-14T22:13:20")
    assert run.steps["step"].tolist() == [5, 6] and run.steps["loss"].isna().all()
    assert run.table("steps").column("skipped").null_count == 2
    assert len(run.windows) == 1 and len(run.kernels) == 9 and len(run.ops) > 5
    assert run.events["kind"].tolist() == ["started", "ended"]
    assert "2 marked steps" in run.events["detail"].iloc[0]


def test_each_rank_has_its_own_segments(tmp_path):
    files = [trace_of(tmp_path, rank, f"{rank}.json") for rank in (2, 0)]
    run = load_run(import_traces(files, tmp_path / "run"))
    run.validate(full=True)
    assert run.head.world_size == 4 and run.status == "finished"
    assert sorted(set(run.kernels["rank"])) == [0, 2] and run.windows["rank"].tolist() == [0, 2]
    assert {f.name for f in (tmp_path / "run" / "kernels").iterdir()} == {"00000.parquet", "00000.r2.parquet"}
    per_rank = run.kernels.groupby("rank")["total_us"].sum()
    assert per_rank[0] == per_rank[2] == 1700


def test_the_trace_of_a_later_rank_alone_becomes_a_run_too(tmp_path):
    run = load_run(import_traces([trace_of(tmp_path, 3)], tmp_path / "run"))
    run.validate(full=True)
    assert set(run.kernels["rank"]) == {3} and run.head.world_size == 4 and run.status == "finished"
    assert not [f for f in diagnose(run) if f.code == "rank-ended"]  # the traces of the other ranks are missing


def test_traces_without_a_rank_are_numbered_in_order(tmp_path):
    files = [trace_of(tmp_path, name=f"{n}.json") for n in "ab"]
    run = load_run(import_traces(files, tmp_path / "run"))
    assert sorted(set(run.kernels["rank"])) == [0, 1] and run.head.world_size == 2


def test_two_traces_of_one_rank_are_refused(tmp_path):
    files = [trace_of(tmp_path, 1, f"{n}.json") for n in "ab"]
    with pytest.raises(RunError, match="hold two of one rank"):
        import_traces(files, tmp_path / "run")


@pytest.mark.parametrize(("later_us", "process", "refused"), [(5000, 77, True), (5000, 78, False), (500, 77, False)])
def test_traces_that_one_process_recorded_one_after_the_other_are_no_ranks(tmp_path, later_us, process, refused):
    """Each lasts 1,000 µs; those of other processes, or at the same time, are."""
    files = []
    for start, pid in ((0, 77), (later_us, process)):
        trace = Made()
        trace.op("aten::mm", start, 1000)
        trace.events[-1]["pid"] = pid
        files.append(write(tmp_path / f"at_{start}.json", trace.document()))
    if refused:
        with pytest.raises(
            RunError, match=r"'at_0.json', 'at_5000.json'\] were recorded by one process, 77, one after"
        ):
            import_traces(files, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    else:
        assert load_run(import_traces(files, tmp_path / "run")).head.world_size == 2


def test_nothing_is_written_if_a_trace_is_damaged(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RunError, match=r"trace='bad\.json' is cut off"):
        import_traces([trace_of(tmp_path), tmp_path / "bad.json"], tmp_path / "runs" / "run")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["bad.json", "t.json"]


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("x")
    with pytest.raises(RunError, match="exists already"):
        import_traces([trace_of(tmp_path)], tmp_path / "run")
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["mine"]


def test_the_command_prints_the_folder_and_a_summary(tmp_path, capsys):
    assert main(["import-trace", str(trace_of(tmp_path, name="t.json.gz")), "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == str(tmp_path / "run")
    # 2 × (200 + 200) µs in FP16 products; copies and fills do not count
    assert out[1] == "1.62 ms of kernels: 49.4% on tensor cores, 50.6% without, 0.0% unclassified"
    assert main(["import-trace", str(tmp_path / "none"), "--out", str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err.startswith("ampscope: trace=")
    assert main(["import-trace", "--out", "x"]) == 2


def test_the_device_with_the_most_work_is_that_of_the_run(tmp_path):
    document = training()
    for event in document["traceEvents"]:
        event.get("args", {}).update({"device": 2} if "device" in event.get("args", {}) else {})
    assert read_trace(write(tmp_path / "t.json", document)).device == "cuda:2"


def test_the_step_time_of_a_trace_is_the_same_on_all_pages(tmp_path):
    loop = queued(3, before=90)
    loop.events[-1]["dur"] += 60  # the last step is slower
    run = load_run(import_traces([write(tmp_path / "t.json", loop.document())], tmp_path / "run"))
    assert step_cost(run).step_us == overview(run).speed.step_ms * 1e3 == 320
    assert compare([run, run]).table["step_ms"].tolist() == [0.32, 0.32]


def unmarked(tmp_path, **head):
    document = training(**head)
    document["traceEvents"] = [e for e in document["traceEvents"] if not e["name"].startswith("ProfilerStep")]
    return write(tmp_path / "t.json", document)


def test_a_trace_without_steps_has_a_report_and_findings_of_its_window(tmp_path):
    run = load_run(import_traces([unmarked(tmp_path)], tmp_path / "run"))
    page = report_html([run])
    assert "The profiled window takes 1.80 ms; it has no step markers." in page
    assert "Window</th><td>1.80 ms" in page.replace("<td>Window</td>", "<th>Window</th>")
    assert not [f for f in diagnose(run) if "per step" in f.title or "the step" in f.title]


def test_the_time_that_importing_took_is_not_the_trainings(tmp_path):
    run = load_run(import_traces([trace_of(tmp_path)], tmp_path / "run"))
    assert overview(run).duration_s == pytest.approx(1.99e-3)
    assert overview(load_run(import_traces([unmarked(tmp_path)], tmp_path / "other"))).duration_s is None


def test_the_numbering_of_traces_without_ranks_is_told(tmp_path, capsys):
    files = [str(trace_of(tmp_path, name=f"{n}.json")) for n in "ab"]
    assert main(["import-trace", *files, "--out", str(tmp_path / "run")]) == 0
    note = "note: traces without ranks were numbered in the order given: a.json is rank 0, b.json is rank 1"
    assert note in capsys.readouterr().out.splitlines()


def test_a_chart_of_kernels_as_csv_has_their_names(tmp_path):
    run = load_run(import_traces([trace_of(tmp_path)], tmp_path / "run"))
    table = chart_csv(KERNELS.figure(KERNELS.frame(run), False)).decode()
    assert GEMM in table and "\n0," not in table and ",0\n" not in table


def without_device(category, name, more=()):
    """A trace of one step whose operators launch work that is not in it."""
    made = Made()
    made.event("mark", "ProfilerStep#3", 0, 100, 1)
    for at in (10, 40):
        made.op("aten::mm", at, 20)
        made.event(category, name, at + 5, 2, 1, correlation=at)
    for event in more:
        made.event(*event)
    return made.document(deviceProperties=[])


@pytest.mark.parametrize(
    ("category", "name", "device"),
    [
        ("cuda_runtime", "cudaLaunchKernel", "cuda"),
        ("cuda_driver", "cuLaunchKernelEx", "cuda"),
        ("cuda_runtime", "hipExtModuleLaunchKernel", "cuda"),
        ("xpu_runtime", "urEnqueueKernelLaunch", "xpu"),
        ("xpu_driver", "zeCommandListAppendLaunchKernel", "xpu"),
        ("privateuse1_driver", "LaunchKernel", "privateuseone"),
        ("hpu_op", "synLaunch", "hpu"),
        ("mtia_runtime", "runFunction - job_prep_and_submit_for_execution", "mtia"),
    ],
)
def test_launches_without_kernels_show_that_the_device_was_not_recorded(tmp_path, category, name, device):
    trace = read_trace(write(tmp_path / "t.json", without_device(category, name)))
    assert (trace.unrecorded, trace.launches, trace.device, trace.kernels) == (True, 2, device, {})


@pytest.mark.parametrize(
    ("category", "name", "activity"),
    [
        ("cuda_runtime", "cudaLaunchKernel", "CUDA"),
        ("xpu_runtime", "urEnqueueKernelLaunch", "XPU"),
        ("privateuse1_driver", "LaunchKernel", "PrivateUse1"),
        ("hpu_op", "synLaunch", "HPU"),
        ("mtia_runtime", "runFunction - job_prep_and_submit_for_execution", "MTIA"),
    ],
)
def test_a_device_that_was_not_recorded_is_told_and_no_cpu_run_is_made_of_it(tmp_path, category, name, activity):
    file = write(tmp_path / "t.json", without_device(category, name))
    run = load_run(import_traces([file], tmp_path / "run"))
    assert run.kernels.empty and run.windows.empty and run.steps["step"].tolist() == [3]
    assert amdahl(step_cost(run)) is None
    (finding,) = [f for f in diagnose(run) if f.code == "device-not-recorded"]
    assert "2 launches but no kernel" in finding.title and f"ProfilerActivity.{activity}" in finding.snippet
    assert ("the driver kept the kernels back" in finding.advice) == (activity == "CUDA")
    assert diagnose(run)[0] == finding
    if activity == "XPU":  # once: a report takes seconds
        run.validate(full=True)
        assert report_html([run])


def test_operators_of_a_gpu_alone_tell_that_its_work_is_missing(tmp_path):
    trace = read_trace(write(tmp_path / "t.json", without_device("cpu_op", "aten::cudnn_convolution")))
    assert trace.unrecorded and trace.notes == [
        "t.json: operators of a GPU but no kernel: device activity was not recorded"
    ]


@pytest.mark.parametrize(("number", "device"), [(0, "cpu"), (1, "cuda"), (12, "xpu"), (13, "cpu")])
def test_memory_of_a_device_alone_tells_that_its_work_is_missing(tmp_path, number, device):
    trace = Made()
    trace.op("aten::mm", 0, 800)
    for at in (10, 20):
        event = {"ph": "i", "name": "[memory]", "pid": 77, "tid": 1, "ts": BASE + at}
        memory = {"Device Type": number, "Device Id": 0, "Bytes": 8, "Total Allocated": 8, "Total Reserved": 8}
        trace.events.append(event | {"args": memory})
    run = load_run(import_traces([write(tmp_path / "t.json", trace.document())], tmp_path / "run"))
    assert run.head.config["device"] == device
    findings = [f for f in diagnose(run) if f.code == "device-not-recorded"]
    assert len(findings) == (device != "cpu")
    for finding in findings:
        assert "contains allocations of its memory but no kernel" in finding.title and finding.value == 2


def test_waits_alone_make_no_device_of_a_cpu_run(tmp_path):
    """The profiler itself waits for the devices of the machine."""
    trace = read_trace(write(tmp_path / "t.json", without_device("cuda_runtime", "cudaDeviceSynchronize")))
    assert not trace.unrecorded and trace.device == "cpu" and trace.windows["device"] == ["cpu"]


@pytest.mark.parametrize(
    ("category", "device"),
    [
        ("xpu_runtime", "xpu:0"),
        ("privateuse1_runtime", "privateuseone:0"),
        ("hpu_op", "hpu:0"),
        ("hip_runtime", "cuda:0"),
    ],
)
def test_devices_have_the_type_of_their_runtime(tmp_path, category, device):
    made = Made()
    made.op("aten::mm", 0, 20)
    made.event(category, "launch", 5, 2, 1, correlation=9)
    made.event("kernel", "gemm_kernel", 10, 50, 7, correlation=9, device=0)
    trace = read_trace(write(tmp_path / "t.json", made.document()))
    assert trace.device == device and trace.kernels["op"] == ["aten::mm"]


def test_work_of_an_mtia_is_read_without_its_waits(tmp_path):
    made = Made()
    made.op("aten::add", 0, 20)
    for name, start in (("merge", 10), ("event_wait", 60), ("event_record", 70)):
        made.event("mtia_ccp_events", name, start, 50, 7)
        made.events[-1]["pid"] = 17
    document = made.document(deviceProperties=[{"id": 17, "name": "ARTEMIS"}])
    trace = read_trace(write(tmp_path / "t.json", document))
    assert trace.kernels["name"] == ["merge"] and trace.windows["device"] == ["mtia:17"]
    assert trace.windows["device_name"] == ["ARTEMIS"]
    sentence = first_sentence(load_run(import_traces([tmp_path / "t.json"], tmp_path / "run")))
    assert "100 % of its kernel time cannot be classified" in sentence


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"name": "", "warpSize": 64, "computeMajor": 9, "computeMinor": 4, "numSms": 304}, "AMD Instinct MI300X"),
        ({"warpSize": 64, "computeMajor": 9, "computeMinor": 0, "numSms": 104}, "AMD GPU"),
        ({"name": "AMD Instinct MI210", "warpSize": 64, "computeMajor": 9, "computeMinor": 0}, "AMD Instinct MI210"),
        ({"name": "", "warpSize": 32, "computeMajor": 9, "computeMinor": 0}, "GPU"),
    ],
)
def test_a_gpu_with_warps_of_64_threads_is_amds(tmp_path, properties, name):
    trace = read_trace(write(tmp_path / "t.json", training(deviceProperties=[properties])))
    assert trace.gpus[0]["name"] == name
    assert gpu_of(name, trace.gpus[0]["capability"]).known is (name == "GPU")


def test_fp32_products_of_amds_matrix_cores_are_not_finished(tmp_path):
    made = Made()
    made.event("mark", "ProfilerStep#3", 0, 100, 1)
    made.op("aten::mm", 0, 20, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]})
    made.kernel("Cijk_Ailk_Bljk_SB_MT128x64x16_MI32x32x1x2_SN", 10, 90, 5)
    properties = [{"name": "AMD Instinct MI300X", "warpSize": 64, "computeMajor": 9, "computeMinor": 4}]
    document = made.document(deviceProperties=properties)
    run = load_run(import_traces([write(tmp_path / "t.json", document)], tmp_path / "run"))
    cost = step_cost(run)
    assert cost.us("matrix") == 90 and cost.us("tensor") == cost.tf32_us == 0 and cost.rate_ratio == 1307.4 / 163.4
    assert "GEMM/conv, in FP32" in set(cost.parts["label"]) and not [
        f for f in diagnose(run) if f.code == "tf32-baseline"
    ]


def test_a_device_that_is_not_listed_is_amds_if_its_kernels_are(tmp_path):
    made = Made()
    made.op("aten::mm", 0, 20, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]})
    made.kernel("Cijk_Ailk_Bljk_SB_MT128x64x16_MI32x32x1x2_SN", 10, 90, 5)
    run = load_run(import_traces([write(tmp_path / "t.json", made.document(deviceProperties=[]))], tmp_path / "run"))
    assert step_cost(run).device_name == "AMD GPU"
    assert set(run.kernels["precision"]) == {"fp32"}  # not TF32: matrix cores multiply FP32 too


def imported_from(tmp_path, data):
    (tmp_path / "odd.json").write_bytes(data)
    return load_run(import_traces([tmp_path / "odd.json"], tmp_path / "odd"))


def edited(change):
    document = training()
    for event in document["traceEvents"]:
        if "dur" in event:
            change(event)
    return json.dumps(document).encode()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_trace_in_utf_16_is_read(tmp_path, encoding):
    run = imported_from(tmp_path, json.dumps(training()).encode(encoding))
    assert run.kernels["total_us"].sum() == 1700 and import_notes(run) == []


def test_times_written_as_text_are_read_with_a_note(tmp_path):
    run = imported_from(tmp_path, edited(lambda event: event.update(ts=str(event["ts"]), dur=str(event["dur"]))))
    assert run.kernels["total_us"].sum() == 1700 and run.steps["step_ms"].tolist() == [0.99, 0.99]
    assert len(import_notes(run)) == 1


def test_events_of_negative_duration_are_left_out_with_a_note(tmp_path):
    def negate(event):
        if event["name"] == RELU:
            event["dur"] = -event["dur"]

    run = imported_from(tmp_path, edited(negate))
    assert run.kernels["total_us"].sum() == 1600 and "2 events" in import_notes(run)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda event: event.update(dur=-event["dur"]),
        lambda event: event.update(ts=event["ts"] * 1000),  # nanoseconds
        lambda event: event.update(ts="now"),
    ],
)
def test_a_trace_without_any_valid_time_is_refused_for_that(tmp_path, change):
    with pytest.raises(RunError, match="valid ts and dur"):
        imported_from(tmp_path, edited(change))


def test_a_trace_that_holds_its_kernels_twice_is_refused(tmp_path):
    document = training()
    document["traceEvents"] *= 2
    with pytest.raises(RunError, match="twice"):
        imported_from(tmp_path, json.dumps(document).encode())


@pytest.mark.parametrize("layout", ["new", "list"])
@pytest.mark.parametrize(
    "after", [b"garbage", b"]", b"}", b"0", b"\x00", json.dumps(training()).encode(), b" " * 2**21 + b"garbage"]
)
def test_data_after_a_trace_is_named(tmp_path, layout, after):
    with pytest.raises(RunError, match=r"damaged: .* follows its last bracket"):
        imported_from(tmp_path, json.dumps(training(layout)).encode() + after)


def test_data_after_a_compressed_trace_is_named(tmp_path):
    packed = gzip.compress(json.dumps(training()).encode())
    with pytest.raises(RunError, match="damaged: what follows"):
        imported_from(tmp_path, packed + b"garbage")
    with pytest.raises(RunError, match="follows its last bracket"):
        imported_from(tmp_path, packed + packed)


def test_space_after_a_trace_is_no_damage(tmp_path):
    assert len(imported_from(tmp_path, json.dumps(training()).encode() + b" \r\n\t" * 2**19).kernels)


def test_the_report_of_a_trace_without_device_activity_tells_of_no_loss(tmp_path):
    trace = Made()
    trace.op("aten::cudnn_convolution", 0, 100)
    page = report_html([run_of(tmp_path, trace)])
    assert "The trace holds no work of a device." in page and "at the start" not in page


def test_the_report_of_a_trace_counts_waits_in_whole_numbers(tmp_path):
    trace = Made()
    for number in range(29):
        trace.kernel(GEMM, 10 + 100 * number, 50, 100 * number)
        trace.event("call", "cudaStreamSynchronize", 55 + 100 * number, 7, 1, correlation=number)
    page = report_html([run_of(tmp_path, trace)])
    for name in ("Host syncs", "Kernels, copies and fills"):
        assert f'<th scope="row">{name}</th><td>29</td>' in page


def test_several_traces_are_told_to_be_imported_before_a_diagnosis(tmp_path, capsys):
    paths = [str(trace_of(tmp_path, rank, f"{rank}.json")) for rank in range(2)]
    assert main(["diagnose", *paths]) != 0
    assert "2 paths are too many" in (said := capsys.readouterr().err) and "import-trace" in said


def test_products_of_amds_vector_units_in_16_bits_are_no_fp32_and_gain_nothing_by_16_bits(tmp_path):
    made = Made()
    made.event("mark", "ProfilerStep#3", 0, 100, 1)
    made.op("aten::miopen_convolution", 0, 20, **{"Input type": ["c10::Half", "c10::Half"]})
    made.kernel("miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_f3x2_stride1", 10, 90, 5)
    properties = [{"name": "AMD Instinct MI300X", "warpSize": 64, "computeMajor": 9, "computeMinor": 4}]
    file = write(tmp_path / "t.json", made.document(deviceProperties=properties))
    cost = step_cost(load_run(import_traces([file], tmp_path / "run")))
    assert cost.us("matrix") == cost.narrow_us == 90
    assert "GEMM/conv, on vector units" in set(cost.parts["label"])
    bound = amdahl(cost)
    assert bound is not None and bound.half_expected == 1.0
