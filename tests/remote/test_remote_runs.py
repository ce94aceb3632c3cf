"""Reading and writing runs at addresses: in fsspec's memory, and on an S3 server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.store import upload
from amp_core.store.packing import pack
from amp_core.store.segment_writer import OpenSegment
from amp_core.store.writer import RunWriter
from tests.paths import SAMPLE_RUNS
from tests.waiting import wait_for


def filesystem(address: str) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(address, use_listings_cache=False)


def files(address: str) -> list[str]:
    fs, root = filesystem(address)
    return sorted(path.removeprefix(root).lstrip("/") for path in fs.find(root))


def uploaded(name: str, address: str) -> str:
    fs, root = filesystem(address)
    for file in (SAMPLE_RUNS / name).rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{root}/{name}/{file.relative_to(SAMPLE_RUNS / name).as_posix()}", file.read_bytes())
    return f"{address}/{name}"


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_run_is_the_same_in_every_store(store: str, request: pytest.FixtureRequest) -> None:
    here = load_run(SAMPLE_RUNS / "fp16-overflow")
    there = load_run(uploaded("fp16-overflow", request.getfixturevalue(store)))
    assert there.name == here.name and there.status == here.status and str(there.path).endswith("/fp16-overflow")
    for table in ("steps", "tensors", "events"):
        assert repr(there.table(table).to_pylist()) == repr(here.table(table).to_pylist())  # NaN counts as equal to NaN
    there.validate(full=True)
    assert [f.code for f in diagnose(there)] == [f.code for f in diagnose(here)]
    before = there.fingerprint()
    assert not there.refresh() and there.fingerprint() == before


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_packed_run_is_read_in_place(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fs, root = filesystem(request.getfixturevalue(store))
    fs.pipe_file(f"{root}/a.zip", pack(SAMPLE_RUNS / "bf16", tmp_path / "a.zip").read_bytes())
    run = load_run(f"{request.getfixturevalue(store)}/a.zip")
    assert run.steps.equals(load_run(SAMPLE_RUNS / "bf16").steps) and len(run.fingerprint()) == 1


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_an_address_without_a_run_raises_one_sentence(store: str, request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue(store)
    with pytest.raises(RunError, match=r"/none' holds no run: run\.json is missing$"):
        load_run(f"{address}/none")
    with pytest.raises(RunError, match=r"/none\.zip' does not exist"):
        load_run(f"{address}/none.zip")
    uploaded("fp32", address)
    fs, root = filesystem(address)
    fs.pipe_file(f"{root}/fp32/steps/00000.parquet", b"PAR1 but not")
    with pytest.raises(RunError, match=r"^steps/00000\.parquet is damaged"):
        load_run(f"{address}/fp32").steps  # noqa: B018
    fs.pipe_file(f"{root}/fp32/run.json", b"[" * 5_000_000)
    with pytest.raises(RunError, match=r"run\.json is larger than 4 MiB"):
        load_run(f"{address}/fp32")


def test_uploaded_open_streams_are_read_too(memory: str, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "live")
    writer.append("steps", {"step": [0, 1], "loss": [2.0, float("nan")]})
    fs, root = filesystem(f"{memory}/live")
    for name in ("run.json", "steps/00000.arrows"):
        fs.pipe_file(f"{root}/{name}", (tmp_path / "live" / name).read_bytes())
    run = load_run(f"{memory}/live")
    assert len(run.steps) == 2
    writer.append("steps", {"step": [2]})
    fs.pipe_file(f"{root}/steps/00000.arrows", (tmp_path / "live" / "steps" / "00000.arrows").read_bytes())
    assert run.refresh() and run.steps.step.tolist() == [0, 1, 2]
    writer.close()


@pytest.mark.parametrize("store", ["memory", "s3", "tmp_path"])
def test_only_sealed_segments_are_written_at_an_address(store: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue(store)
    if store == "tmp_path":
        pytest.importorskip("fsspec")
        place = f"file://{place}"
    writer = RunWriter(f"{place}/runs/a", config={"precision": "fp16"}, seal_bytes=10_000)
    assert files(f"{place}/runs/a") == ["run.json"]
    assert load_run(f"{place}/runs/a").status == "running"
    for step in range(300):
        writer.append("steps", {"step": [step], "loss": [1.0 / (step + 1)]})
    writer.event("skipped", step=7)
    staging = writer.folder
    assert staging.is_dir()
    writer.close()
    there = files(f"{place}/runs/a")
    assert len([f for f in there if f.startswith("steps/")]) > 3
    assert all(f == "run.json" or f.endswith(".parquet") for f in there)
    assert not staging.exists()
    run = load_run(f"{place}/runs/a")
    assert run.status == "finished" and run.name == "a" and run.steps.step.tolist() == list(range(300))
    assert run.events.kind.tolist() == ["skipped", "ended"]


def test_segments_arrive_during_the_run(memory: str) -> None:
    writer = RunWriter(f"{memory}/a", seal_age_s=0.0)  # each row is a segment, sent by a background thread
    run = load_run(f"{memory}/a")
    for step in range(5):
        writer.append("steps", {"step": [step]})

    def all_there() -> bool:
        run.refresh()
        return len(run.steps) == 5

    wait_for(all_there)
    assert run.is_live and run.steps.step.tolist() == [0, 1, 2, 3, 4]
    writer.close()
    assert run.refresh() and run.status == "finished"


def test_short_runs_are_sent_soon_and_long_ones_in_few_files() -> None:
    assert [upload.seal_age_s(age) for age in (0.0, 50.0, 600.0, 1e6)] == [10.0, 10.0, 60.0, 300.0]
    sent = age = 0.0
    while age < 7 * 86_400:
        age += upload.seal_age_s(age)
        sent += 1
    assert sent < 2200


def test_an_address_that_holds_a_run_is_refused(memory: str) -> None:
    RunWriter(f"{memory}/a").close()
    with pytest.raises(RunError, match=r"^into='memory://.*/a' already holds a run"):
        RunWriter(f"{memory}/a")
    fs, root = filesystem(memory)
    fs.pipe_file(f"{root}/b/thesis.txt", b"x")
    with pytest.raises(RunError, match=r"/b' holds other files \('thesis.txt'\)"):
        RunWriter(f"{memory}/b")


def test_a_missing_bucket_is_refused_and_not_created(s3: str) -> None:
    with pytest.raises(RunError, match=r"^into='s3://no-such-bucket-here/a' .* the bucket does not exist"):
        RunWriter("s3://no-such-bucket-here/a")
    assert not filesystem(s3)[0].exists("no-such-bucket-here")


def test_a_store_that_fails_temporarily_gets_all_segments_in_the_end(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(f"{memory}/a", seal_age_s=0.0)
    put, failing = upload.Shipment._put, [True]

    def flaky(self: upload.Shipment, name: str, data: bytes) -> None:
        if failing[0]:
            raise ConnectionError("no route to host")
        put(self, name, data)

    monkeypatch.setattr(upload.Shipment, "_put", flaky)
    for step in range(5):
        writer.append("steps", {"step": [step]})
    failing[0] = False
    writer.close()
    run = load_run(f"{memory}/a")
    assert run.status == "finished" and len(run.steps) == 5 and not writer.folder.exists()


def test_segments_that_cannot_be_sent_are_kept_and_reported(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(f"{memory}/a")
    writer.append("steps", {"step": [0]})

    def dead(self: upload.Shipment, name: str, data: bytes) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(upload.Shipment, "_put", dead)
    monkeypatch.setattr(upload, "PAUSES_S", (0.0, 0.0))
    with pytest.warns(RuntimeWarning, match=r"3 files of the run could not be sent .*no route to host.*kept in"):
        writer.close()
    kept = load_run(writer.folder)
    assert kept.status == "finished" and len(kept.steps) == 1


def test_a_segment_that_cannot_be_sealed_is_sent_as_it_is(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    writer = RunWriter(f"{memory}/a")
    writer.append("steps", {"step": [0, 1, 2]})
    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    run = load_run(f"{memory}/a")
    assert run.status == "finished" and run.steps.step.tolist() == [0, 1, 2]
    assert files(f"{memory}/a") == ["events/00000.arrows", "run.json", "steps/00000.arrows"]
    assert not writer.folder.exists()


def test_a_table_whose_file_cannot_be_closed_leaves_the_others_their_rows(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = OpenSegment.close

    def fails(segment: OpenSegment) -> None:
        close(segment)
        if segment.path.parent.name == "events":
            raise OSError(28, "No space left on device")

    writer = RunWriter(f"{memory}/a")
    for table in ("events", "steps", "memory"):
        writer.append(table, {"step": [0]} if table != "events" else {"kind": ["x"], "step": [0]})
    monkeypatch.setattr(OpenSegment, "close", fails)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    run = load_run(f"{memory}/a")
    assert run.status == "finished" and not writer.folder.exists()
    assert (len(run.steps), len(run.memory)) == (1, 1) and "x" in set(run.events.kind)


LOOP = """
import torch
from amp_core import watch
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rec = watch(model, optimizer, into={into!r}, every=5)
for _ in range(20):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
"""


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ("rec.close()", "finished", 0),
        ("", "finished", 0),
        ("raise ValueError('boom')", "failed", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "stopped", -15),
    ],
    ids=["closed", "left open", "raised", "terminated"],
)
def test_watch_writes_to_an_object_store_however_the_program_ends(end: str, status: str, code: int, s3: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOOP.format(into=f"{s3}/runs/a", end=end)], capture_output=True)
    assert done.returncode == code, done.stderr.decode()
    run = load_run(f"{s3}/runs/a")
    assert (run.status, len(run.steps)) == (status, 20)
    assert sorted(run.tensors().step.unique()) == [0, 5, 10, 15]
    assert isinstance(run.steps, pd.DataFrame) and run.steps.loss.notna().all()


def test_two_processes_train_into_a_bucket(s3: str) -> None:
    """Each process sends its own segments, and rank 0 sends the head."""
    command = "train --workload digits-cnn --precision bf16 --steps 6 --nproc 2 --device cpu --no-evaluate --every 2"
    line = [sys.executable, "-m", "amp_core", *command.split(), "--out", f"{s3}/ddp"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    run = load_run(f"{s3}/ddp")
    assert run.status == "finished" and run.head.world_size == 2
    assert run.steps[["step", "rank"]].to_numpy().tolist() == [[s, r] for s in range(6) for r in (0, 1)]
    assert run.tensors(kind="weight_grad").groupby(["rank", "step"]).size().nunique() == 1
    assert {"steps/00000.parquet", "steps/00000.r1.parquet"} <= set(files(f"{s3}/ddp"))
