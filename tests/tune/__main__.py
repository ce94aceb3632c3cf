"""How often the real command picks the right recipe: `python -m tests.tune [REPEATS] [SECONDS]`, minutes long.

Each search is `ampscope tune` as a user starts it, on the workloads of `workloads.py` that wait as long as a device
would take. The answer is right when it has the precision that is known to be, and for tiny gradients a loss scale, and
is confirmed: told by the evidence, and no guess of a search whose budget was used up. Beside the time that each took
stands the time of the processors, which other work on the machine changes less.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tune.workloads import HERE, WAITS


def main(repeats: int, budget_s: int) -> int:
    """Search again and again; 1 where an answer was wrong."""
    right = dict.fromkeys(WAITS, 0)
    for repeat in range(repeats):
        for name, (_, wanted) in WAITS.items():
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
            found = json.loads(done.stdout)
            scaled = name != "tiny_gradients" or found["config"]["init_scale"] > 1
            is_right = found["config"]["precision"] == wanted and found["confirmed"] and scaled
            right[name] += is_right
            took = f"{found['seconds']:.0f} s, {_processors_s() - before:.0f} s of processors"
            print(f"{name}, seed {repeat}: {found['answer']} ({took})", flush=True)
            if not is_right:
                print(
                    *(f"    {r['stage']} {r['name']}: {r['speed_ratio']} {r['out']}" for r in found["tried"]), sep="\n"
                )
                print(f"    {found['why']} {found['left_out']}", flush=True)
    print(", ".join(f"{name} {count} of {repeats} right" for name, count in right.items()))
    return int(any(count < repeats for count in right.values()))


def _processors_s() -> float:
    """What ended child processes, and theirs, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*given, *(3, 300)[len(given) :]))
