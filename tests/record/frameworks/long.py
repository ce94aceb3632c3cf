"""Each framework's stock example for a few hundred steps, watched and not: `python -m tests.record.frameworks.long`.

    python -m tests.record.frameworks.long --steps 300 --only lightning

For each framework and precision: whether the losses are the same bit for bit, what is missing in the tables of the run,
and what `diagnose` warns of; and for each fault that was planted, whether it was found. Every framework has a process
of its own, and keeps its settings there. Ends with 0 where all is as it should be.
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
from tests.record.frameworks.healthy import FULL, holes, warned

HEADS = ("framework", "precision", "fault", "steps", "losses", "tables", "found")


def healthy(name: str, precision: str, steps: int, folder: Path) -> tuple[bool, list[str]]:
    """Train bare and watched, and hold one against the other: whether all is well, and the row."""
    example = EXAMPLES[name]
    bare = example.train(precision, steps, None)
    watched = example.train(precision, steps, folder)
    run = load_run(folder)
    differ = sum(a != b for a, b in zip(bare.losses, watched.losses, strict=True))
    missing = holes(run, len(watched.losses), EVERY, watched.parameters, example.columns or FULL)
    found = warned(run)
    row = [name, precision, "none", str(len(watched.losses))]
    row += [f"{differ} differ" if differ else "the same", "; ".join(missing) or "full", ", ".join(found) or "nothing"]
    return not (differ or missing or found), row


def faulty(name: str, fault: str, steps: int, folder: Path) -> tuple[bool, list[str]]:
    """Train with something wrong: whether it was found, and the row."""
    precision, code = EXAMPLES[name].faults[fault]
    done = EXAMPLES[name].train(precision, steps, folder, fault)
    found = warned(load_run(folder))
    said = f"{code}{''.join(f', {c}' for c in found if c != code)}" if code in found else f"not {code}: {found}"
    return code in found, [name, precision, fault, str(len(done.losses)), "", "", said]


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
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # how the command calls itself
    given = options.parse_args()
    if given.worker is not None:
        with tempfile.TemporaryDirectory() as folder:
            given.worker.write_text(json.dumps(rows_of(given.only, given.steps, Path(folder))))
        return 0
    rows: list[list[str]] = []
    good = True
    for name, example in EXAMPLES.items():
        if given.only not in (None, name):
            continue
        if find_spec(example.package) is None:
            print(f"{name}: left out, {example.package} is not installed")
            continue
        say(name)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "tests.record.frameworks.long", "--worker", str(results), "--only", name]
            done = subprocess.run(
                [*command, "--steps", str(given.steps)],
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
