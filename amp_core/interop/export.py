"""A run's tables for other tools: Parquet, CSV, or a TensorBoard log.

    >>> export(load_run("runs/a"), "parquet", "exported")
    [PosixPath('exported/run.json'), PosixPath('exported/steps.parquet'), …]

Parquet: one file per table, all types kept; the folder is itself a run. CSV: null is an empty cell, NaN is `nan`, lists
are JSON; text that a spreadsheet would take for a formula gets a leading apostrophe. TensorBoard: headline scalars,
and per tensor a histogram of log2 magnitudes.
"""

import os
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet as pq

from amp_core.schema import TABLES, RunError
from amp_core.store.atomic import new_folder, replace_file
from amp_core.store.run import Run

FORMS = ("tensorboard", "parquet", "csv")


def export(run: Run, to: str, out: str | os.PathLike[str]) -> list[Path]:
    """Write `run` into the new folder `out` as `to`, one of `FORMS`, and return the files.

    Raises `RunError` for an unknown form, an existing folder, and a run that cannot be read.
    """
    if to not in FORMS:
        raise RunError(f"to={to!r} is unknown; choose one of {', '.join(FORMS)}")
    with new_folder(out) as aside:
        if to == "tensorboard":
            from amp_core.interop.to_tensorboard import write_log

            write_log(run, aside)
        else:
            replace_file(aside / "run.json", run.head.to_json().encode())
            for name in TABLES:
                table = run.table(name)
                if table.num_rows and to == "parquet":
                    pq.write_table(table, aside / f"{name}.parquet", compression="zstd")
                elif table.num_rows:
                    from amp_core.text.csv_safe import csv_safe  # here, because it imports pandas

                    pyarrow.csv.write_csv(csv_safe(table), aside / f"{name}.csv")
        names = sorted(file.name for file in aside.iterdir())
    return [Path(out) / name for name in names]
