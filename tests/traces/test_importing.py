"""`import-trace`: from files to a run that every page can open."""

import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.__main__ import main
from amp_core.traces import import_traces, read_trace
from tests.traces.made import training, write


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
    }
    assert run.head.environment["gpus"][0]["capability"] == "8.0"
    assert run.head.created_at.startswith("2023-11-14T22:13:20")
    assert run.steps["step"].tolist() == [5, 6] and run.steps["loss"].isna().all()
    assert run.table("steps").column("skipped").null_count == 2
    assert len(run.windows) == 1 and len(run.kernels) == 9 and len(run.ops) > 5
    assert run.events["kind"].tolist() == ["started", "ended"]
    assert "2 marked steps" in run.events["detail"].iloc[0]


def test_ranks_have_segments_of_their_own(tmp_path):
    files = [trace_of(tmp_path, rank, f"{rank}.json") for rank in (2, 0)]
    run = load_run(import_traces(files, tmp_path / "run"))
    run.validate(full=True)
    assert run.head.world_size == 4 and run.status == "finished"
    assert sorted(set(run.kernels["rank"])) == [0, 2] and run.windows["rank"].tolist() == [0, 2]
    assert {f.name for f in (tmp_path / "run" / "kernels").iterdir()} == {"00000.parquet", "00000.r2.parquet"}
    per_rank = run.kernels.groupby("rank")["total_us"].sum()
    assert per_rank[0] == per_rank[2] == 1700


def test_a_trace_of_a_later_rank_alone_is_a_run_too(tmp_path):
    run = load_run(import_traces([trace_of(tmp_path, 3)], tmp_path / "run"))
    run.validate(full=True)
    assert set(run.kernels["rank"]) == {3} and run.head.world_size == 4 and run.status == "finished"
    assert not [f for f in diagnose(run) if f.code == "rank-ended"]  # the other ranks' traces were not given


def test_traces_without_a_rank_are_numbered_in_order(tmp_path):
    files = [trace_of(tmp_path, name=f"{n}.json") for n in "ab"]
    run = load_run(import_traces(files, tmp_path / "run"))
    assert sorted(set(run.kernels["rank"])) == [0, 1] and run.head.world_size == 2


def test_two_traces_of_one_rank_are_refused(tmp_path):
    files = [trace_of(tmp_path, 1, f"{n}.json") for n in "ab"]
    with pytest.raises(RunError, match="hold two of one rank"):
        import_traces(files, tmp_path / "run")


def test_nothing_is_written_where_a_trace_is_broken(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RunError, match=r"trace='bad\.json' is cut off"):
        import_traces([trace_of(tmp_path), tmp_path / "bad.json"], tmp_path / "runs" / "run")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["bad.json", "t.json"]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("x")
    with pytest.raises(RunError, match="exists already"):
        import_traces([trace_of(tmp_path)], tmp_path / "run")
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["mine"]


def test_command_prints_where_and_what(tmp_path, capsys):
    assert main(["import-trace", str(trace_of(tmp_path, name="t.json.gz")), "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == str(tmp_path / "run")
    # 2 × (200 + 200) µs of 1,700 in FP16 products, 2 × 100 in one on CUDA cores
    assert out[1] == "1.7 ms of kernels, copies and fills: 47.1% on tensor cores, 52.9% without, 0.0% unknown by name"
    assert main(["import-trace", str(tmp_path / "none"), "--out", str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err.startswith("ampscope: trace=")
    assert main(["import-trace", "--out", "x"]) == 2


def test_device_with_the_most_work_is_the_runs(tmp_path):
    document = training()
    for event in document["traceEvents"]:
        event.get("args", {}).update({"device": 2} if "device" in event.get("args", {}) else {})
    assert read_trace(write(tmp_path / "t.json", document)).device == "cuda:2"


def test_the_step_time_of_a_trace_is_the_same_on_all_pages(tmp_path):
    from amp_core.analysis import compare, overview, step_cost
    from tests.traces.test_read import queued

    loop = queued(3, before=90)
    loop.events[-1]["dur"] += 60  # the last step is slower
    run = load_run(import_traces([write(tmp_path / "t.json", loop.document())], tmp_path / "run"))
    assert step_cost(run).step_us == overview(run).speed.step_ms * 1e3 == 320
    assert compare([run, run]).table["step_ms"].tolist() == [0.32, 0.32]
