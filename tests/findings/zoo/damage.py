"""Runs of which a table was damaged after it was written."""

from pathlib import Path

import pyarrow.parquet as pq

from tests.findings.zoo.case import case
from tests.synthetic import write


@case("damaged-table", "tensors")
def cut_file(into: Path, faulty: bool) -> None:
    write(into, "healthy")
    if faulty:
        file = into / "tensors" / "00000.parquet"
        file.write_bytes(file.read_bytes()[:5000])


@case("damaged-table", "device")
def other_bytes(into: Path, faulty: bool) -> None:
    write(into, "bf16")
    if faulty:
        (into / "device" / "00000.parquet").write_bytes(b"<html>404 Not Found</html>")


@case("damaged-table", "events")
def missing_column(into: Path, faulty: bool) -> None:
    write(into, "healthy")
    if faulty:
        file = into / "events" / "00000.parquet"
        pq.write_table(pq.read_table(file).drop_columns(["kind"]), file)
