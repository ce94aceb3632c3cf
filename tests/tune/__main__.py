"""How often the real command picks the right recipe: `python -m tests.tune [REPEATS] [SECONDS] [FIRST_SEED]`.

Each search is `ampscope tune` as a user starts it, on those workloads of `workloads.py` that wait as long as a device
would take, and lasts SECONDS at most. It is right if the confirmed recipe has the known best precision, for tiny
gradients also a loss scale; undecided if it names a recipe and says that the budget did not decide; wrong if it
confirms another one or fails. The script prints the wall time of each search and its processor time, which other work
on the machine affects less, and the machine's load when it ended.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.tune.workloads import HERE, WAITS


def main(repeats: int, budget_s: int, first_seed: int) -> int:
    """Search repeatedly; returns 1 if an answer was wrong."""
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in WAITS}
    for seed in range(first_seed, first_seed + repeats):
        for name in WAITS:
            before = _processors_s()
            result = _search(name, budget_s, seed)
            outcome = outcome_of(name, result)
            outcomes[name][outcome] += 1
            took = f"{result['seconds']:.0f} s, {_processors_s() - before:.0f} s of processors" if result else ""
            load = f"load {os.getloadavg()[0]:.1f}"
            print(f"{outcome}: {name}, seed {seed}: {result and result['answer']} ({took}, {load})", flush=True)
            if result and outcome != "right":
                print(
                    *(f"    {r['stage']} {r['name']}: {r['speed_ratio']} {r['out']}" for r in result["tried"]), sep="\n"
                )
                print(f"    {result['why']} {result['left_out']}", flush=True)
    for name, counts in outcomes.items():
        print(f"{name}: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("right", "undecided", "wrong")))
    return int(any(counts["wrong"] for counts in outcomes.values()))


def outcome_of(name: str, result: dict | None) -> str:
    """`right`, `undecided` or `wrong`: the answer of a search on a workload; None for a command that failed."""
    if result is None:
        return "wrong"
    if not result["confirmed"]:
        return "undecided"
    is_scaled = name != "tiny_gradients" or result["config"]["init_scale"] > 1
    return "right" if result["config"]["precision"] == WAITS[name][1] and is_scaled else "wrong"


def _search(name: str, budget_s: int, seed: int) -> dict | None:
    """What the command printed; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "amp_core", "tune", f"{HERE}:waiting_{name}", "--json", "--device", "cpu"]
        command += ["--budget", str(budget_s), "--steps", "60", "--lr", "0.005", "--seed", str(seed)]
        command += ["--out", str(Path(folder) / "tune")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr)
        return None
    return json.loads(done.stdout)


def _processors_s() -> float:
    """Processor time of all ended descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*arguments, *(3, 300, 0)[len(arguments) :]))
