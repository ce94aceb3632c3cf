"""Hostile inputs, each generated from a number, so that a harmful one can be reproduced.

>>> kind, write = hostile(4711)
>>> write(Path("room"))                # one file or folder in it, and its path
PosixPath('room/input.zip')
"""

import functools
import io
import json
import os
import random
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from amp_core.schema import TABLES
from amp_core.store.packing import pack
from amp_core.store.writer import RunWriter
from tests.robustness import values
from tests.robustness.bombs import BOMBS

Write = Callable[[Path], Path]
Files = dict[str, bytes]


@functools.cache
def valid_files() -> tuple[Files, Files]:
    """The files of a small run, both packed and still being written."""
    with tempfile.TemporaryDirectory() as room:
        writer = RunWriter(
            Path(room) / "a", config={"precision": "fp16", "lr": 1e-3}, model={"layers": {"w": "Linear"}}
        )
        for step in range(4):
            writer.append("steps", {"step": [step], "loss": [2.0 - step], "loss_scale": [65536.0], "skipped": [False]})
            counts = {"numel": [6, 6], "zero": [1, 1], "subnormal": [0, 0], "normal": [5, 5], "inf": [0] * 2}
            shape = {"nan": [0] * 2, "exp_min": [-3, -3], "exp_counts": [[2, 3], [5]], "absmax": [0.5, 0.1]}
            names = {"step": [step] * 2, "name": ["w", "b"], "kind": ["weight_grad"] * 2, "dtype": ["float32"] * 2}
            writer.append("tensors", names | counts | shape)
        writer.append("kernels", {"step": [1], "name": ["ampere_sgemm"], "count": [3], "total_us": [12.5]})
        writer.append("memory", {"step": [1], "number": [0], "moment": ["step begins"], "allocated_bytes": [100]})
        writer.event("skipped", name="w", step=2)
        (Path(room) / "a" / "console.log").write_text("one\r\ntwo\n")
        live = {p.relative_to(Path(room) / "a").as_posix(): p.read_bytes() for p in (Path(room) / "a").rglob("*.*")}
        writer.close()
        with zipfile.ZipFile(pack(Path(room) / "a")) as archive:
            packed = {name: archive.read(name) for name in archive.namelist()}
    return packed, live


def hostile(number: int) -> tuple[str, Write]:
    """The input of that number: its kind, and a function that writes it into a folder."""
    rng = random.Random(number)
    kind = rng.choice(list(KINDS))
    make = KINDS[kind]

    def write(room: Path) -> Path:
        return make(rng, room)

    return kind, write


# ---- bytes ----------------------------------------------------------------------------------------------------------


def mangled(rng: random.Random, data: bytes) -> bytes:
    """`data` with bytes flipped, truncated, duplicated, removed, or set to values that break counters."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not out:
            return bytes(out)
        at = rng.randrange(len(out))
        choice = rng.randrange(7)
        if choice == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            out[at] = rng.randrange(256)
        elif choice == 2:
            del out[at:]
        elif choice == 3:
            del out[at : at + rng.randrange(1, 64)]
        elif choice == 4:
            out[at:at] = out[at : at + rng.randrange(1, 64)]
        elif choice == 5:
            extreme = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 8))
            out[at : at + len(extreme)] = extreme
        else:  # near the end, where Parquet and zip keep their directories
            back = len(out) - 1 - min(len(out) - 1, int(rng.expovariate(1 / 100)))
            out[back] = rng.randrange(256)
    return bytes(out)


# ---- files of a run -------------------------------------------------------------------------------------------------


def _zip(room: Path, files: Files, how: int = zipfile.ZIP_STORED) -> Path:
    file = room / "input.zip"
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file


def _folder(room: Path, files: Files) -> Path:
    for name, data in files.items():
        (room / "input" / name).parent.mkdir(parents=True, exist_ok=True)
        (room / "input" / name).write_bytes(data)
    return room / "input"


def _either(rng: random.Random, room: Path, files: Files) -> Path:
    return _zip(room, files) if rng.random() < 0.5 else _folder(room, files)


def mangled_zip(rng: random.Random, room: Path) -> Path:
    how = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    file = _zip(room, valid_files()[0], how)
    file.write_bytes(mangled(rng, file.read_bytes()))
    return file


def mangled_parquet(rng: random.Random, room: Path) -> Path:
    files = dict(valid_files()[0])
    name = rng.choice([n for n in files if n.endswith(".parquet")])
    return _either(rng, room, files | {name: mangled(rng, files[name])})


def mangled_stream(rng: random.Random, room: Path) -> Path:
    files = dict(valid_files()[1])
    name = rng.choice([n for n in files if n.endswith(".arrows")])
    return _either(rng, room, files | {name: mangled(rng, files[name])})


def wrong_head(rng: random.Random, room: Path) -> Path:
    files = dict(valid_files()[0])
    head = json.loads(files["run.json"])
    choice = rng.randrange(5)
    if choice == 0:
        text = mangled(rng, files["run.json"])
    elif choice == 1:
        for name in rng.sample(sorted(head), rng.randrange(1, 4)):
            head[name] = values.value(rng, 3)
        text = json.dumps(head).encode()
    elif choice == 2:
        depth = rng.choice((10, 300, 900, 5_000, 100_000))
        text = files["run.json"].replace(b'"config": {', b'"config": {"deep": ' + b"[" * depth + b"]" * depth + b",", 1)
    elif choice == 3:
        name = rng.choice(("config", "environment", "model", "results", "process"))
        head[name] = {values.text(rng): values.value(rng, 4) for _ in range(rng.choice((1, 20, 2_000)))}
        text = json.dumps(head).encode()
    else:
        text = json.dumps(head).encode().replace(b"65536", b"9" * rng.choice((20, 400, 5_000))) + b" " * rng.choice(
            (0, 10, 5_000_000)
        )
    return _either(rng, room, files | {"run.json": text})


def wrong_table(rng: random.Random, room: Path) -> Path:
    """A valid Parquet file or Arrow stream whose columns violate the schema."""
    files = dict(valid_files()[0])
    table = rng.choice(list(TABLES.values()))
    rows = rng.choice((0, 1, 3, 50))
    columns_made = {}
    for column in table.columns:
        if column.required or rng.random() < 0.6:
            kind = column.type if rng.random() < 0.85 else rng.choice(values.TYPES)
            columns_made[column.name] = values.array(rng, kind, rows)
    for _ in range(rng.choice((0, 0, 1, 3))):
        columns_made[values.text(rng)] = values.array(rng, rng.choice(values.TYPES), rows)
    result = pa.table(columns_made)
    for name in [n for n in files if n.startswith(f"{table.name}/")]:
        del files[name]
    sink = io.BytesIO()
    if rng.random() < 0.6:
        pq.write_table(result, sink, compression=rng.choice(("zstd", "snappy", "gzip", "none")))
        return _either(rng, room, files | {f"{table.name}/00000.parquet": sink.getvalue()})
    with pa.ipc.new_stream(sink, result.schema) as stream:
        stream.write_table(result)
    return _either(rng, room, files | {f"{table.name}/00000.arrows": sink.getvalue()})


@functools.cache  # thousands of inputs have 264 different ones, which take up to 0.4 s
def _bomb(name: str, size: int) -> bytes:
    return BOMBS[name](size)


def bomb(rng: random.Random, room: Path) -> Path:
    """A small segment that decodes to very much, in some tables beside valid segments."""
    name = rng.choice(list(BOMBS))
    data = _bomb(name, 2 ** rng.randrange(20, 44))
    if rng.random() < 0.2:
        data = mangled(rng, data)
    return _either(rng, room, valid_files()[0] | {f"tensors/1.{'arrows' if 'stream' in name else 'parquet'}": data})


def wrong_names(rng: random.Random, room: Path) -> Path:
    """A zip whose members have forbidden names."""
    file = room / "input.zip"
    bad = (
        "../evil",
        "/tmp/evil",
        "..\\evil",
        "C:\\evil",
        "a/../../evil",
        "run.json/x",
        "./run.json",
        "//x",
        "",
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in valid_files()[0].items():
            if rng.random() < 0.9:
                prefix = rng.choice(("", "", "a/", "../", "/", "a/b/c/"))
                archive.writestr(zipfile.ZipInfo(prefix + name), data)
        for _ in range(rng.choice((1, 3, 300))):
            info = zipfile.ZipInfo(rng.choice((*bad, values.text(rng), f"steps/{values.text(rng)}.parquet")))
            if rng.random() < 0.3:
                info.external_attr = (rng.choice((stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR)) | 0o777) << 16
            if info.filename not in archive.NameToInfo or rng.random() < 0.02:
                bomb = b"\0" * rng.choice((0, 10, 300_000, 3_000_000)) if rng.random() < 0.1 else b"/etc/passwd"
                archive.writestr(info, bomb, zipfile.ZIP_DEFLATED)
    return file


def odd_folder(rng: random.Random, room: Path) -> Path:
    """A run folder with a link, a pipe, a folder or an empty file in place of a file."""
    folder = _folder(room, valid_files()[rng.randrange(2)])
    for file in rng.sample(sorted(p for p in folder.rglob("*.*") if p.is_file()), rng.randrange(1, 3)):
        file.unlink()
        choice = rng.randrange(6)
        if choice == 0:
            file.symlink_to("/etc/passwd")
        elif choice == 1:
            file.symlink_to(file)
        elif choice == 2:
            os.mkfifo(file)
        elif choice == 3:
            file.mkdir()
        elif choice == 4:
            file.write_bytes(b"")
        else:
            file.symlink_to("/dev/zero")
    if rng.random() < 0.2:
        table = folder / "steps"
        table.rename(room / "elsewhere")
        table.symlink_to(room / "elsewhere")
    return folder


def mangled_trace(rng: random.Random, room: Path) -> Path:
    file = room / "input.pt.trace.json"
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": duration, "args": args}
        for category, name, pid, tid, ts, duration, args in (
            ("cpu_op", "aten::mm", 1, 1, 10, 5, {"Sequence number": 1}),
            ("kernel", "sgemm", 0, 7, 12, 2, {"correlation": 3, "device": 0}),
            ("cuda_runtime", "cudaLaunchKernel", 1, 1, 11, 1, {"correlation": 3}),
            ("user_annotation", "ProfilerStep#3", 1, 1, 9, 9, {}),
        )
    ]
    events.append({"ph": "s", "id": 3, "pid": 1, "tid": 1, "ts": 11, "cat": "ac2g", "name": "ac2g"})
    for event in events:
        if rng.random() < 0.5:
            event[rng.choice(sorted(event))] = values.value(rng, 2)
        if isinstance(event.get("args"), dict) and rng.random() < 0.3:
            event["args"][rng.choice(("correlation", "device", "Sequence number", "Input Dims"))] = values.value(rng, 2)
    whole: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "A100"}], "traceEvents": events}
    if rng.random() < 0.4:
        whole[rng.choice(("deviceProperties", "distributedInfo", "traceEvents", "baseTimeNanoseconds"))] = values.value(
            rng, 3
        )
    text = json.dumps(whole).encode()
    file.write_bytes(mangled(rng, text) if rng.random() < 0.5 else text)
    return file


KINDS: dict[str, Callable[[random.Random, Path], Path]] = {
    f.__name__: f
    for f in (
        mangled_zip,
        mangled_parquet,
        mangled_stream,
        wrong_head,
        wrong_table,
        bomb,
        wrong_names,
        odd_folder,
        mangled_trace,
    )
}
