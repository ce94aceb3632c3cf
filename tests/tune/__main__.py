"""How often the real command picks the right recipe: `python -m tests.tune [REPEATS] [SECONDS]`, minutes long.

Each search is `ampscope tune` as a user starts it, on those workloads of `workloads.py` that wait as long as a device
would take. The answer is right if it has the known best precision, for tiny gradients also a loss scale, and is
confirmed: based on evidence, not a guess of a search that used up its budget. The script prints the wall time of each
search and its processor time, which other work on the machine affects less.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tune.workloads import HERE, WAITS


def main(repeats: int, budget_s: int) -> int:
    """Search repeatedly; returns 1 if an answer was wrong."""
    right = dict.fromkeys(WAITS, 0)
    for repeat in range(repeats):
        for name, (_, expected) in WAITS.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "amp_core", "tune", f"{HERE}:waiting_{name}", "--json"]
                command += ["--budget", str(budget_s), "--steps", "60", "--lr", "0.005", "--seed", str(repeat)]
                before = _processors_s()
                done = subprocess.run(
                    [*command, "--device", "cpu", "--out", str(Path(folder) / "tune")],
                    capture_output=True,
                    text=True,
                    check=False,
                )
            if done.returncode:
                print(done.stderr)
                continue
            result = json.loads(done.stdout)
            scaled = name != "tiny_gradients" or result["config"]["init_scale"] > 1
            is_right = result["config"]["precision"] == expected and result["confirmed"] and scaled
            right[name] += is_right
            took = f"{result['seconds']:.0f} s, {_processors_s() - before:.0f} s of processors"
            print(f"{name}, seed {repeat}: {result['answer']} ({took})", flush=True)
            if not is_right:
                print(
                    *(f"    {r['stage']} {r['name']}: {r['speed_ratio']} {r['out']}" for r in result["tried"]), sep="\n"
                )
                print(f"    {result['why']} {result['left_out']}", flush=True)
    print(", ".join(f"{name} {count} of {repeats} right" for name, count in right.items()))
    return int(any(count < repeats for count in right.values()))


def _processors_s() -> float:
    """Processor time of all ended descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*arguments, *(3, 300)[len(arguments) :]))
