"""Torn and damaged runs: complete rows are read, anything else raises one sentence."""

import random
from pathlib import Path

import pyarrow as pa
import pytest

from amp_core import RunError, load_run
from amp_core.schema import TABLES
from amp_core.store.segment_reader import File, read_parquet, read_stream
from amp_core.store.writer import RunWriter


def event_stream(tmp_path: Path, rows: int) -> bytes:
    writer = RunWriter(tmp_path / "a")
    for step in range(rows):
        writer.event("warning", name=f"n{step}", step=step)
    data = (tmp_path / "a" / "events" / "00000.arrows").read_bytes()
    writer.close()
    return data


def test_a_stream_cut_at_any_byte_gives_whole_rows_and_later_the_rest(tmp_path: Path) -> None:
    data = event_stream(tmp_path, 4) + b"\xff\xff\xff\xff\x00\x00\x00\x00"
    events, rows = TABLES["events"], 0
    for length in range(len(data) + 1):
        file = File("events/00000.arrows", length, 0)
        cut = read_stream(file, data[:length], events, None)
        assert cut.rows >= rows and cut.offset <= length
        rows = cut.rows
        if cut.table is not None:
            assert cut.table.column("step").to_pylist() == list(range(rows))
        if length % 7 == 0:  # the rest, once it is written
            whole = read_stream(file, data[cut.offset :], events, cut)
            assert whole.table is not None and whole.table.column("step").to_pylist() == [0, 1, 2, 3]
            assert whole.table.column("name").to_pylist() == ["n0", "n1", "n2", "n3"]
    assert rows == 4


def test_a_cut_stream_is_readable_through_the_run_too(foreign_run: Path, tmp_path: Path) -> None:
    data = event_stream(tmp_path, 4)
    (foreign_run / "events").mkdir()
    for length in (0, 5, 300, len(data) // 2, len(data) - 1, len(data)):
        (foreign_run / "events" / "00000.arrows").write_bytes(data[:length])
        names = load_run(foreign_run).events["name"].tolist()
        assert names == [f"n{i}" for i in range(len(names))]
    assert len(names) == 4
    (foreign_run / "events" / "00000.arrows").write_bytes(
        data + b"\0" * 5000
    )  # zeros that a power cut leaves on some file systems
    assert len(load_run(foreign_run).events) == 4


def test_damaged_tables_raise_one_sentence(foreign_run: Path, tmp_path: Path) -> None:
    data = bytearray(event_stream(tmp_path, 4))
    (foreign_run / "events").mkdir()
    (foreign_run / "events" / "00000.arrows").write_bytes(b"GIF89a" + bytes(data))
    with pytest.raises(RunError, match=r"events/00000\.arrows is damaged: no message starts at byte 0") as caught:
        _ = load_run(foreign_run).events
    assert "\n" not in str(caught.value)
    (foreign_run / "events" / "00000.arrows").unlink()
    (foreign_run / "events" / "00000.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RunError, match=r"events/00000\.parquet is damaged"):
        _ = load_run(foreign_run).events


def test_flipped_bytes_raise_only_run_errors(tmp_path: Path) -> None:
    # Only Parquet: a crafted schema message can make Arrow abort, which is why a sandbox process decodes untrusted
    # files.
    event_stream(tmp_path, 4)
    whole = (tmp_path / "a" / "events" / "00000.parquet").read_bytes()
    rng, refused = random.Random(1), 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 20))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        try:
            file = File("events/00000.parquet", len(data), 0)
            segment = read_parquet(file, pa.BufferReader(bytes(data)), TABLES["events"], None)
        except RunError:
            refused += 1
            continue
        assert segment.table is not None
        segment.table.to_pylist()
    assert refused > 100
