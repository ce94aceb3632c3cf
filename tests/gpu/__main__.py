"""Every check that needs a GPU, in one command or in three: `python -m tests.gpu [--part 1] [--out DIR]`.

Requires torch, numpy, pandas, pyarrow and psutil; the table begins with what is missing without other packages.
Prints a table, and writes it to the folder with `results.json` and sample runs. Exits with 1 if a check failed, else
with 0. `--device cpu --quick` tests the command itself on any machine.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch

from amp_core.record.environment import environment
from tests.gpu.checks import PARTS, VERDICTS, Row, all_checks
from tests.gpu.runner import run_checks, work


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.partition("\n")[0])
    options.add_argument("--part", type=int, choices=PARTS, help="a third of the checks, which takes nine minutes")
    options.add_argument("--minutes", type=float, help="time limit; by default nine for each part")
    options.add_argument("--out", type=Path, help="folder for the table and the sample runs; by default a new one")
    options.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    options.add_argument("--quick", action="store_true", help="a few steps of the smallest models: nothing is timed")
    options.add_argument("--only", help="comma-separated names of checks")
    options.add_argument("--list", action="store_true", help="print the names of the checks and exit")
    for name in ("--worker", "--results", "--until"):  # passed to worker processes
        options.add_argument(name, help=argparse.SUPPRESS)
    given = options.parse_args()
    checks = all_checks()
    if given.list:
        print("\n".join(check.name for check in checks))
        return 0
    device = torch.device(given.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("tests.gpu: torch finds no CUDA device here; give --device cpu --quick to try the command itself")
            return 2
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if given.worker is not None:
        chosen = [check for name in given.worker.split(",") for check in checks if check.name == name]
        work(chosen, device, given.quick, given.out, Path(given.results), float(given.until))
        return 0
    parts = PARTS if given.part is None else (given.part,)
    minutes = given.minutes or 9.0 * len(parts)
    only = given.only.split(",") if given.only else [check.name for check in checks if check.part in parts]
    if unknown := set(only) - {check.name for check in checks}:
        print(f"tests.gpu: --only {', '.join(sorted(unknown))} is not a check; --list prints the names")
        return 2
    out: Path = given.out.resolve() if given.out else Path(tempfile.mkdtemp(prefix="ampscope-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    if (out / "runs").exists():
        print(f"tests.gpu: --out {out} holds runs already; give a new folder")
        return 2
    begun = time.monotonic()
    rows = run_checks(
        [check for check in checks if check.name in only],
        device,
        given.quick,
        out,
        minutes * 60 - 5,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    took = time.monotonic() - begun
    lacking = f"Missing here: {'; '.join(missing())}.\n\n" if missing() else ""
    text = f"{machine(device)}; {took:.0f} s\n\n{lacking}{table(rows)}\n\n{summary(rows)}\n"
    (out / "results.md").write_text(text)
    record = {"machine": environment(), "device": str(device), "seconds": took, "rows": [row.to_dict() for row in rows]}
    (out / "results.json").write_text(json.dumps(record, indent=1, default=str))
    archive = packed(out)
    print(f"{text}\nwritten to {out}, and archived in {archive}")
    return 1 if any(row.verdict in ("FAIL", "error") for row in rows) else 0


def packed(out: Path) -> Path:
    """Write the folder as one zip next to it: a run is many small files, and some machines return files one by one."""
    archive = out.with_name(f"{out.name}.zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(path for path in out.rglob("*") if path.is_file()):
            file.write(path, Path(out.name) / path.relative_to(out))
    return archive


def machine(device: torch.device) -> str:
    """The machine that ran the checks."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} processor"
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"


OPTIONAL = {
    "pynvml": "no device samples and counters (nvidia-ml-py)",
    "numba": "slow statistics on the CPU",
    "sklearn": "no digits, and so no frameworks (scikit-learn)",
    "triton": "no reduce-overhead",
}
"""Modules that a machine may lack, and what is missing then."""


def missing() -> list[str]:
    """What this machine lacks, and what is missing without it."""
    lacking = [f"{module}: {loss}" for module, loss in OPTIONAL.items() if find_spec(module) is None]
    no_compiler = not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    return lacking + (["a C compiler: no reduce-overhead"] if no_compiler else [])


def table(rows: list[Row]) -> str:
    """A markdown table, one line per row."""
    lines = [("check", "asked", "measured", "verdict"), ("---",) * 4]
    lines += [(row.check, row.asked, row.measured, row.verdict) for row in rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def summary(rows: list[Row]) -> str:
    """The number of rows with each verdict."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


if __name__ == "__main__":
    sys.exit(main())
