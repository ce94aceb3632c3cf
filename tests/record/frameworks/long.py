"""Each framework's stock example for a few hundred steps, watched and unwatched: `python -m
tests.record.frameworks.long`.

    python -m tests.record.frameworks.long --steps 300 --only lightning

For each framework and precision, checks that the losses are bit-identical, that no values of the run are missing, and
that `diagnose` warns of nothing; and that it reports each planted fault. Each framework runs in its own process, since
some keep global settings. The exit code is 0 if all checks pass.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

from amp_core import load_run
from tests.benchmarks.measuring import say, table
from tests.record.frameworks.examples import EVERY, EXAMPLES
from tests.record.frameworks.healthy import FULL, missing_values, warning_codes

HEADS = ("framework", "precision", "fault", "steps", "losses", "tables", "found")


def healthy(name: str, precision: str, steps: int, folder: Path) -> tuple[bool, list[str]]:
    """Train unwatched and watched and compare both: whether all is well, and the row of the table."""
    example = EXAMPLES[name]
    unwatched = example.train(precision, steps, None)
    watched = example.train(precision, steps, folder)
    run = load_run(folder)
    differ = sum(a != b for a, b in zip(unwatched.losses, watched.losses, strict=True))
    missing = missing_values(run, len(watched.losses), EVERY, watched.parameters, example.columns or FULL)
    codes = warning_codes(run)
    row = [name, precision, "none", str(len(watched.losses))]
    row += [f"{differ} differ" if differ else "the same", "; ".join(missing) or "full", ", ".join(codes) or "nothing"]
    return not (differ or missing or codes), row


def faulty(name: str, fault: str, steps: int, folder: Path) -> tuple[bool, list[str]]:
    """Train with a fault: whether `diagnose` reports it, and the row of the table."""
    precision, code = EXAMPLES[name].faults[fault]
    done = EXAMPLES[name].train(precision, steps, folder, fault)
    codes = warning_codes(load_run(folder))
    result = f"{code}{''.join(f', {c}' for c in codes if c != code)}" if code in codes else f"not {code}: {codes}"
    return code in codes, [name, precision, fault, str(len(done.losses)), "", "", result]


def rows_of(name: str, steps: int, folder: Path) -> list[tuple[bool, list[str]]]:
    """All rows of one framework."""
    warnings.simplefilter("ignore")
    rows = [healthy(name, precision, steps, folder / precision) for precision in EXAMPLES[name].precisions]
    faults = enumerate(EXAMPLES[name].faults)
    return rows + [faulty(name, fault, steps, folder / f"fault-{i}") for i, fault in faults]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=250)
    options.add_argument("--only", choices=EXAMPLES)
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # used by the command for each framework
    arguments = options.parse_args()
    if arguments.worker is not None:
        with tempfile.TemporaryDirectory() as folder:
            arguments.worker.write_text(json.dumps(rows_of(arguments.only, arguments.steps, Path(folder))))
        return 0
    rows: list[list[str]] = []
    good = True
    for name, example in EXAMPLES.items():
        if arguments.only not in (None, name):
            continue
        if find_spec(example.package) is None:
            print(f"{name}: left out, {example.package} is not installed")
            continue
        say(name)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "tests.record.frameworks.long", "--worker", str(results), "--only", name]
            done = subprocess.run(
                [*command, "--steps", str(arguments.steps)],
                env=os.environ | example.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                rows.append([name, "", "", "", "", "", f"the process ended with {done.returncode}"])
                good = False
                continue
            for well, row in json.loads(results.read_text()):
                rows.append(row)
                good = good and well
    print(table(HEADS, rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
