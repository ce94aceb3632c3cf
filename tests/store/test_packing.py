"""Packed runs are unpacked unchanged; zips that are not valid runs are refused in one sentence."""

import io
import os
import random
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, load_run
from amp_core.interop.export import export
from amp_core.schema import TABLES
from amp_core.store import packing, sources
from amp_core.store.packing import pack, unpack
from amp_core.store.run import Run
from amp_core.store.untrusted import limits, zip_directory
from amp_core.store.writer import RunWriter
from tests.paths import ROOT

OLD = b"PK\x05\x06" + bytes(18)
"""A zip with nothing in it."""


def fill(writer: RunWriter) -> None:
    writer.append("steps", {"step": [0, 1], "loss": [float("nan"), None], "lr": [-float("inf"), float("inf")]})
    writer.append("tensors", {"step": [0], "name": ["w"], "exp_counts": [[1, 0, 2]], "exp_min": [-3]})
    writer.event("skipped", name="w", step=0)


def same(one: Run, other: Run) -> bool:
    tables = all(repr(one.table(t).to_pylist()) == repr(other.table(t).to_pylist()) for t in TABLES)
    return tables and one.head == other.head and one.console(100) == other.console(100)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "a", config={"precision": "fp16"}) as writer:
        fill(writer)
    (tmp_path / "a" / "console.log").write_text("one\ntwo\n")
    return tmp_path / "a"


def test_a_finished_run_is_unpacked_unchanged(finished: Path, tmp_path: Path) -> None:
    file = pack(finished)
    assert file == tmp_path / "a.zip"
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    assert names[0] == "run.json" and {n.rsplit(".", 1)[1] for n in names} == {"json", "parquet", "log"}
    assert same(load_run(file), load_run(finished))
    out = unpack(file, tmp_path / "new" / "b")
    assert same(load_run(out), load_run(finished)) and stat.S_IMODE(out.stat().st_mode) == 0o755
    assert sorted(p.name for p in out.iterdir()) == ["console.log", "events", "run.json", "steps", "tensors"]
    assert same(load_run(pack(file, tmp_path / "again.zip")), load_run(finished))  # a zip can be packed again


def test_a_long_table_is_packed_in_segments_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter(tmp_path / "a") as writer:
        writer.append("steps", {"step": list(range(1000)), "loss": [0.5] * 1000})
    monkeypatch.setattr(limits, "MAX_VALUES", 500 * len(TABLES["steps"].columns))
    monkeypatch.setattr(packing, "SEGMENT_ROWS", 400)
    file = pack(tmp_path / "a")
    with zipfile.ZipFile(file) as archive:
        contents = [n for n in archive.namelist() if n.startswith("steps")]
    assert contents == [f"steps/{i:05d}.parquet" for i in range(3)]
    out = unpack(file, tmp_path / "b")
    assert same(load_run(out), load_run(tmp_path / "a")) and len(list((out / "steps").iterdir())) == 3


def test_a_live_run_is_packed_with_its_rows_so_far(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a")
    fill(writer)
    file = pack(tmp_path / "a")
    writer.append("steps", {"step": [2]})
    packed = load_run(file)
    assert packed.steps["step"].tolist() == [0, 1]
    assert packed.head.status == "running" and packed.status == "lost"  # a zip is not live
    assert unpack(file, tmp_path / "b").is_dir()
    writer.close()


def test_a_lost_run_is_packed_as_lost(tmp_path: Path) -> None:
    code = (
        "import os, sys; from amp_core.store.writer import RunWriter\n"
        "w = RunWriter(sys.argv[1]); w.append('steps', {'step': [0]}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], cwd=ROOT).returncode == -9
    out = unpack(pack(tmp_path / "a"), tmp_path / "b")
    assert load_run(out).status == "lost" and load_run(out).steps["step"].tolist() == [0]


def test_unknown_columns_and_rank_are_kept(tmp_path: Path) -> None:
    for rank in (0, 1):
        with RunWriter(tmp_path / "a", rank=rank, world_size=2) as writer:
            fill(writer)
    extra = pa.table({"step": [7], "temperature": [2.5]})
    pq.write_table(extra, tmp_path / "a" / "steps" / "more.parquet")
    out = unpack(pack(tmp_path / "a"), tmp_path / "b")
    rows = load_run(out).table("steps").to_pylist()
    assert [(r["step"], r["rank"], r["temperature"]) for r in rows][-2:] == [(1, 1, None), (7, 0, 2.5)]


def test_a_failed_pack_keeps_the_old_file(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.zip").write_bytes(OLD)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(RunError, match=r"out='.*out\.zip' cannot be written: No space left on device"):
        pack(finished, tmp_path / "out.zip")
    assert (tmp_path / "out.zip").read_bytes() == OLD and sorted(os.listdir(tmp_path)) == ["a", "out.zip"]  # noqa: PTH208


def test_an_existing_target_is_refused(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(RunError, match=r"out='.*b' exists already; give a folder that does not exist yet"):
        unpack(pack(finished), tmp_path / "b")


# ---- hostile zips ---------------------------------------------------------------------------------------------------

Members = list[tuple[zipfile.ZipInfo, bytes]]


def members(file: Path) -> Members:
    with zipfile.ZipFile(file) as archive:
        return [(zipfile.ZipInfo(m.filename), archive.read(m)) for m in archive.infolist()]


def zipped(*contents: tuple[zipfile.ZipInfo | str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", how) as archive:
        for name, data in contents:
            archive.writestr(name, data, how)
    return sink.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def patched(data: bytes, name: bytes, local: tuple[int, bytes], central: tuple[int, bytes]) -> bytes:
    """`data` with bytes replaced in the member's two headers, each at an offset from its signature."""
    out = bytearray(data)
    for signature, fixed, (offset, value) in ((b"PK\3\4", 30, local), (b"PK\1\2", 46, central)):
        at = out.find(signature)
        while out[at + fixed : at + fixed + len(name)] != name:
            at = out.find(signature, at + 4)
        out[at + offset : at + offset + len(value)] = value
    return bytes(out)


def renamed_columns(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


ZEROS = b"\0" * 50_000_000

HOSTILE: dict[str, tuple[Callable[[Members], bytes], str]] = {
    "empty": (lambda m: b"", "not a packed run"),
    "text": (lambda m: b"not a zip at all" * 100, "not a packed run"),
    "no-members": (lambda m: zipped(), "run.json is missing"),
    "no-head": (lambda m: zipped(*m[1:]), "run.json is missing"),
    "truncated": (lambda m: zipped(*m)[:-200], "not a packed run"),
    "cut-in-the-middle": (lambda m: zipped(*m)[1000:], "is damaged|not a packed run"),
    "traversal": (lambda m: zipped(*m, ("../evil.txt", b"x")), "'../evil.txt' points outside"),
    "traversal-of-all": (lambda m: zipped(*[(f"../../{i.filename}", d) for i, d in m]), "points outside"),
    "absolute": (lambda m: zipped(*m, ("/tmp/evil.txt", b"x")), "points outside"),
    "backslash": (lambda m: zipped(*m, ("..\\evil.txt", b"x")), "points outside"),
    "drive": (lambda m: zipped(*m, ("C:evil.txt", b"x")), "points outside"),
    "link": (lambda m: zipped(*m, (link("steps/zz.parquet"), b"/etc/passwd")), "is a link"),
    "twice": (lambda m: zipped(*m, m[1]), "occurs twice"),
    "encrypted": (
        lambda m: patched(zipped(*m), b"steps/00000.parquet", (6, b"\1"), (8, b"\1")),
        "is encrypted",
    ),
    "bomb": (lambda m: zipped(*m, ("steps/00001.arrows", ZEROS)), "would grow to more than 200 times"),
    "bomb-beside": (lambda m: zipped(*m, ("README", ZEROS)), "would grow to more than 200 times"),
    "bomb-that-lies": (
        lambda m: patched(
            zipped(*m, ("steps/00001.arrows", ZEROS)), b"steps/00001.arrows", (22, b"\0\1\0\0"), (24, b"\0\1\0\0")
        ),
        "00001.arrows is damaged",
    ),
    "huge-by-its-own-word": (
        lambda m: patched(
            zipped(*m, how=zipfile.ZIP_STORED),
            b"steps/00000.parquet",
            (22, b"\xff\xff\xff\x7f"),
            (24, b"\xff\xff\xff\x7f"),
        ),
        "would grow to more than|GiB",
    ),
    "wrong-checksum": (
        lambda m: patched(zipped(*m), b"steps/00000.parquet", (14, b"abcd"), (16, b"abcd")),
        "steps/00000.parquet is damaged",
    ),
    "unknown-compression": (
        lambda m: patched(zipped(*m), b"steps/00000.parquet", (8, b"\x63\0"), (10, b"\x63\0")),
        "steps/00000.parquet is damaged",
    ),
    "head-is-no-json": (lambda m: zipped(("run.json", b"{"), *m[1:]), "run.json is not a run head"),
    "head-is-newer": (lambda m: zipped(("run.json", b'{"schema": 99}'), *m[1:]), "schema=99, which is newer"),
    "head-is-deep": (
        lambda m: zipped(("run.json", b'{"schema": 1, "config": ' + b'{"a":' * 700 + b"1" + b"}" * 701), *m[1:]),
        "run.json is not a run head",
    ),
    "head-is-huge": (lambda m: zipped(("run.json", b" " * 5_000_000 + b"{}"), *m[1:]), "run.json"),
    "no-parquet": (
        lambda m: zipped(m[0], ("steps/00000.parquet", b"PAR1" + b"x" * 500)),
        "steps/00000.parquet is damaged",
    ),
    "no-arrows": (lambda m: zipped(m[0], ("steps/00000.arrows", b"x" * 500)), "steps/00000.arrows is damaged"),
    "rows-without-end": (
        lambda m: zipped(
            m[0], ("steps/00000.parquet", renamed_columns(pa.table({"step": pa.nulls(2**17, pa.int64())})))
        ),
        "it holds 131,072 values; at most 100,000 are read",
    ),
    "no-step": (
        lambda m: zipped(m[0], ("steps/0.parquet", renamed_columns(pa.table({"loss": [1.0]})))),
        "has no column 'step'",
    ),
    "text-for-numbers": (
        lambda m: zipped(m[0], ("steps/0.parquet", renamed_columns(pa.table({"step": ["a"]})))),
        "column 'step' of type string, which is no int64",
    ),
    "null-step": (
        lambda m: zipped(m[0], ("steps/0.parquet", renamed_columns(pa.table({"step": pa.array([1, None])})))),
        "steps has rows without 'step'",
    ),
    "columns-of-one-name": (
        lambda m: zipped(
            m[0],
            (
                "steps/0.parquet",
                renamed_columns(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["step", "step"])),
            ),
        ),
        "two columns of one name|step",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_zip_raises_one_sentence_and_nothing_is_written(
    kind: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 100_000)
    make, says = HOSTILE[kind]
    file = tmp_path / "evil.zip"
    file.write_bytes(make(members(pack(finished))))
    room = tmp_path / "room"
    room.mkdir()
    with pytest.raises(RunError, match=says) as caught:
        unpack(file, room / "b")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert list(room.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.zip", "evil.zip", "room"]


def end_of_zip(directory_bytes: int, *, large: bool) -> bytes:
    """The end records of a zip with a directory of `directory_bytes` bytes."""
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 2**32 - 1 if large else directory_bytes, 0, 0)
    if not large:
        return end
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, directory_bytes, 0)
    return record + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1) + end


@pytest.mark.parametrize("large", [False, True])
def test_a_large_directory_is_refused_before_it_is_read(large: bool, tmp_path: Path) -> None:
    file = tmp_path / "many.zip"
    file.write_bytes(bytes(100) + end_of_zip(zip_directory.MAX_DIRECTORY_BYTES + 2**20, large=large))
    for taken in (lambda: unpack(file, tmp_path / "b"), lambda: load_run(file)):
        with pytest.raises(RunError, match=r"its directory is 5\.0 MiB; that of a packed run is at most 4 MiB"):
            taken()


def test_a_zip64_with_very_many_entries_is_read_like_zipfile_does(tmp_path: Path) -> None:
    entries = 65_600
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(entries):
            archive.writestr(f"{number:05d}", b"")
    with (tmp_path / "a.zip").open("rb") as file:
        assert zip_directory._directory_bytes(file) == entries * (46 + 5)
    with zip_directory.open_zip(tmp_path / "a.zip") as archive:
        assert len(archive.namelist()) == entries


def test_too_many_members_are_refused(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pack(finished)
    monkeypatch.setattr(packing, "MAX_MEMBERS", 3)
    with pytest.raises(RunError, match="holds 5 files; a packed run has at most 3"):
        unpack(file, tmp_path / "b")
    monkeypatch.setattr(packing, "MAX_MEMBERS", 100)
    monkeypatch.setattr(packing, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(RunError, match=r"would unpack to 0\.0 GiB"):
        unpack(file, tmp_path / "b")


def test_the_unpacked_size_is_checked_before_unpacking(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "large.zip"
    make, _ = HOSTILE["huge-by-its-own-word"]
    file.write_bytes(make(members(pack(finished))))
    monkeypatch.setattr(packing, "MAX_UNPACKED_BYTES", 2**30)
    with pytest.raises(RunError, match=r"would unpack to 2\.0 GiB; a packed run has at most 1 GiB"):
        unpack(file, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_rows_of_many_files_together_are_limited(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = renamed_columns(pa.table({"step": pa.nulls(1000, pa.int64()).fill_null(1)}))
    file = tmp_path / "many.zip"
    file.write_bytes(zipped(members(pack(finished))[0], *[(f"steps/{i}.parquet", one) for i in range(10)]))
    assert len(load_run(file).steps) == 10_000
    monkeypatch.setattr(sources, "MAX_ZIPPED_BYTES", 2**20)
    with pytest.raises(RunError, match=r"holds more than 0\.000977 GiB of rows"):
        unpack(file, tmp_path / "b")


def test_files_beside_the_run_are_not_unpacked(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "hand-made.zip"
    extra = [
        ("__MACOSX/._run.json", b"x"),
        ("a/job.json", b"{}"),
        ("a/steps/run.sh", b"rm"),
        ("a/evil/0.parquet", b"x"),
    ]
    file.write_bytes(zipped(*[(f"a/{i.filename}", d) for i, d in members(pack(finished))], *extra))
    out = unpack(file, tmp_path / "b")
    assert sorted(p.name for p in out.rglob("*") if p.is_file()) == ["00000.parquet"] * 3 + ["console.log", "run.json"]
    assert same(load_run(out), load_run(finished))


def test_flipped_bytes_are_refused_or_harmless(finished: Path, tmp_path: Path) -> None:
    whole = bytearray(pack(finished).read_bytes())
    rng = random.Random(0)
    refused = 0
    for i in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 8))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file = tmp_path / "x.zip"
        file.write_bytes(data)
        try:
            unpack(file, tmp_path / f"out-{i}")
        except RunError:
            refused += 1
            assert not (tmp_path / f"out-{i}").exists()
    assert refused > 75


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("out", ["run.json", "steps/00000.parquet", "new.zip"])
def test_nothing_is_written_inside_a_run(finished: Path, tmp_path: Path, out: str) -> None:
    before = contents(finished)
    with pytest.raises(RunError, match=r"out=.* is inside the run .*; give a place outside it"):
        pack(finished, finished / out)
    file = pack(finished)
    for write in (lambda: unpack(file, finished / "b"), lambda: export(load_run(finished), "csv", finished / "b")):
        with pytest.raises(RunError, match="is inside the run"):
            write()
    assert contents(finished) == before


def test_the_zip_of_the_current_folder_is_written_beside_it(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    assert pack(".") == tmp_path / "a.zip"


def test_only_a_zip_is_replaced(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"out=.*thesis.tex' is a different kind of file"):
        pack(finished, tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert pack(finished, pack(finished)) == tmp_path / "a.zip"
