"""`ampscope forecast`: the gain of AMP on GPUs that are not here. A forecast, not a measurement.

ampscope forecast --workload text-bert --size large --gpu V100,A100,H100
ampscope forecast runs/a --gpu L4            a run with a traced step (train … --trace-ops)
ampscope forecast --workload text-gpt --gpu A100,H100 --calibrate runs/on-my-a100
"""

import argparse
import json
import math
import sys
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from amp_core.cli.settings import number
from amp_core.cli.untrusted import RUN_HELP
from amp_core.schema import RunError
from amp_core.schema.documents import versioned
from amp_core.store.run import load_run
from amp_core.text import formatting

if TYPE_CHECKING:
    from amp_core.forecast import Calibration, Forecast, StepTrace

LARGE_PARAMETERS = 50_000_000
"""From this size on, a notice says that building the model takes a while."""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "forecast",
        help="forecast step time, speed-up and memory on other GPUs",
        description="Forecasts from one traced step, either of a run or of a workload, which is traced without "
        "executing it. Example: ampscope forecast --workload text-bert --size large --gpu H100,A100,L4",
        allow_abbrev=False,
    )
    command.add_argument("folder", metavar="RUN", nargs="?", help=f"{RUN_HELP}; with a traced step (train --trace-ops)")
    command.add_argument("--workload", metavar="NAME", help="workload to trace instead of a run, or FILE.py:FUNCTION")
    command.add_argument("--size", metavar="SIZE", help="size of the workload")
    command.add_argument("--batch-size", metavar="N", type=int, help="samples per step of the workload")
    command.add_argument("--optimizer", metavar="NAME", help="optimizer of the workload")
    command.add_argument("--gpu", metavar="A,B,…", default="V100,A100,H100", help="GPUs (default %(default)s)")
    for bits in (8, 4):
        command.add_argument(
            f"--fp{bits}-frac",
            metavar="X",
            type=number,
            help=f"share of GEMM FLOPs that may run in {bits} bits, 0 to 1; forecasts this too",
        )
    command.add_argument(
        "--calibrate",
        metavar="RUN",
        help="a run measured on a GPU of yours: every forecast is multiplied by its measured over its forecast time",
    )
    command.add_argument(
        "--software-year", metavar="YEAR", type=int, help="year of PyTorch and CUDA's libraries (default: recent ones)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    from amp_core.forecast import forecast, measured_factor, traces_of_run
    from amp_core.hardware.data_sheets import named_part

    gpus = [name.strip() for name in arguments.gpu.split(",") if name.strip()]
    for name in gpus:
        named_part(name)  # fail before tracing
    if (arguments.folder is None) == (arguments.workload is None):
        raise RunError("give either RUN or --workload")
    factor, note = None, ""
    if arguments.folder is not None:
        extra = [name for name in ("size", "batch_size", "optimizer") if getattr(arguments, name) is not None]
        if extra:
            raise RunError(f"{extra[0]} applies to --workload; a run is forecast as it was traced")
        opened = load_run(arguments.folder)
        traces = traces_of_run(opened)
        measured = measured_factor(opened)
        factor = measured[1] if measured else None
    else:
        traces = _of_workload(arguments)
    if arguments.calibrate is not None:
        found = _calibration(arguments.calibrate, traces)
        factor, note = found.factor, found.note
    result = forecast(
        traces,
        gpus,
        factor=factor,
        calibrated=note,
        fp8_frac=arguments.fp8_frac,
        fp4_frac=arguments.fp4_frac,
        software_year=arguments.software_year,
    )
    print(_document(result) if arguments.json else in_words(result))
    return 0


def in_words(result: "Forecast") -> str:
    """The forecast as text: a table per GPU, and the notes."""
    low = "over_bf16" in result.table
    heads = ("GPU", "recipe", "step", "range", "speed-up", "range", "over TF32", "bound by", "memory", "largest batch")
    rows: list[tuple[object, ...]] = [(*heads, "over BF16") if low else heads]
    for row in result.table.to_dict("records"):
        if row["why_not"]:
            rows.append((row["gpu"], row["recipe"], formatting.NONE, row["why_not"], *[""] * (7 if low else 6)))
            continue
        rows.append(
            (
                row["gpu"],
                row["recipe"],
                formatting.number(row["step_ms"], "ms"),
                _range(row["step_ms_low"], row["step_ms_high"]),
                f"{formatting.number(row['speedup'])} ×",
                _range(row["speedup_low"], row["speedup_high"]),
                f"{formatting.number(row['over_tf32'])} ×" if row["over_tf32"] == row["over_tf32"] else formatting.NONE,
                row["bound_by"],
                "–".join(formatting.number(row[f"memory_bytes_{end}"] / 1e9) for end in ("low", "high")) + " GB"
                if row["memory_bytes_low"] == row["memory_bytes_low"] and row["memory_bytes_low"] is not None
                else formatting.NONE,
                formatting.whole_range(row["batch_low"], row["batch_high"]),
                *((_over_bf16(row),) if low else ()),
            )
        )
    table = [[str(cell) for cell in row] for row in rows]
    fits = [len(row[3]) for row, extra in zip(table, rows, strict=True) if any(extra[4:])]
    widths = [max(len(row[i]) for row in table) if i != 3 else max(fits) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([result.notes[0], "", *lines, "", *result.notes[1:]])


def _over_bf16(row: "dict[Hashable, Any]") -> str:
    if row["over_bf16"] != row["over_bf16"]:
        return formatting.NONE
    return f"{formatting.number(row['over_bf16'])} × ({_range(row['over_bf16_low'], row['over_bf16_high'])})"


def _range(low: float | None, high: float | None) -> str:
    if low is None or low != low:
        return formatting.NONE
    return f"{formatting.number(low)}–{formatting.number(high)}"


def _of_workload(arguments: argparse.Namespace) -> Any:
    from amp_core.settings.training import TrainConfig

    names = ("workload", "size", "batch_size", "optimizer")
    config = TrainConfig.from_dict({n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None})
    spec = config.resolved().spec
    if spec is not None and spec.parameters >= LARGE_PARAMETERS:
        gigabytes = 4 * spec.parameters / 1e9
        print(f"building the model temporarily takes {gigabytes:.1f} GB of memory …", file=sys.stderr, flush=True)

    from amp_core.train.step_on_fake_tensors import trace_workload

    return trace_workload(config)


def _calibration(folder: str, traces: "tuple[StepTrace, StepTrace]") -> "Calibration":
    """What the run in `folder` says of the step of `traces`. It need not have a traced step if its workload is one of
    AMPscope's: a run's settings never name a file to execute."""
    from amp_core.analysis.performance.traced_ops import traced_steps
    from amp_core.forecast import calibrate
    from amp_core.settings.catalog import WORKLOADS
    from amp_core.settings.training import TrainConfig

    measured = load_run(folder)
    own = None
    if not traced_steps(measured) and measured.head.config.get("workload") in WORKLOADS:
        from amp_core.train.step_on_fake_tensors import trace_workload

        names = ("workload", "size", "batch_size", "optimizer", "channels_last")
        settings = {name: measured.head.config.get(name) for name in names}
        own = trace_workload(TrainConfig.from_dict({k: v for k, v in settings.items() if v is not None}))
    calibration = calibrate(measured, traces, own)
    if calibration is None:
        device = measured.head.config.get("device")
        raise RunError(
            f"calibrate={folder!r} was recorded on {device!r}, not on a GPU whose data sheet is known; give a run with "
            "step times on one of those"
        )
    return calibration


def _document(result: "Forecast") -> str:
    rows = [
        {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()}
        for row in result.table.to_dict("records")
    ]
    record = {"measured": False, "notes": list(result.notes), "forecast": rows}
    return json.dumps(versioned(record), indent=1, allow_nan=False)
