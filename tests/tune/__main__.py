"""How often the real command picks the right recipe: `python -m tests.tune [REPEATS] [SECONDS]`, minutes long.

Each search is `ampscope tune` as a user starts it, on the workloads of `workloads.py` that wait as long as a device
would take. The answer is right when it has the precision that is known to be, and for tiny gradients a loss scale.
"""

import json
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
            right[name] += (found["config"]["precision"] == wanted) and scaled
            print(f"{name}, seed {repeat}: {found['answer']} ({found['seconds']:.0f} s)", flush=True)
            if found["config"]["precision"] != wanted:
                print(
                    *(f"    {r['stage']} {r['name']}: {r['speed_ratio']} {r['out']}" for r in found["tried"]), sep="\n"
                )
                print(f"    {found['why']} {found['left_out']}", flush=True)
    print(", ".join(f"{name} {count} of {repeats} right" for name, count in right.items()))
    return int(any(count < repeats for count in right.values()))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*given, *(3, 120)[len(given) :]))
