"""Peak memory and processor time of importing a trace of about a gigabyte, made of copies of a real one.

python -m tests.benchmarks.trace_memory rank-0.pt.trace.json.gz --gigabytes 1
"""

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_IDENTIFIERS = ("correlation", "External id", "external id")
_STEP = "ProfilerStep#"


def main() -> None:
    """Write the file, import it in a process of its own and print one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "large.json"
        copies = repeat(arguments.trace, file, int(arguments.gigabytes * 1e9))
        command = [sys.executable, "-m", "amp_core", "import-trace", str(file), "--out", f"{folder}/run"]
        subprocess.run(command, check=True, capture_output=True)
        size = file.stat().st_size
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("| file | copies | peak | processor time |\n| --- | --- | --- | --- |")
    print(f"| {size / 1e6:,.0f} MB | {copies} | {used.ru_maxrss / 1024:,.0f} MiB | {used.ru_utime:.0f} s |")


def repeat(trace: Path, file: Path, size: int) -> int:
    """Write copies of `trace` one after the other in time until `file` has `size` bytes; returns how many."""
    data = trace.read_bytes()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events = [event for event in document.pop("traceEvents") if isinstance(event, dict)]
    spans = [event for event in events if event.get("ph") == "X"]
    length = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans) + 1000
    steps = len({e["name"] for e in spans if str(e.get("name")).startswith(_STEP)})
    copies = 0
    with open(file, "w") as out:
        out.write(json.dumps(document)[:-1] + (", " if document else "") + '"traceEvents": [\n')
        while out.tell() < size:
            for number, event in enumerate(events):
                out.write(",\n" if copies or number else "")
                out.write(json.dumps(_shifted(event, copies, length, steps), indent=1))
            copies += 1
        out.write("]}")
    return copies


def _shifted(event: dict[str, Any], copy: int, length: float, steps: int) -> dict[str, Any]:
    result = dict(event)
    if "ts" in event:
        result["ts"] = event["ts"] + copy * length
    name = str(event.get("name"))
    if name.startswith(_STEP):
        result["name"] = f"{_STEP}{int(name.removeprefix(_STEP)) + copy * steps}"
    if isinstance(event.get("args"), dict):
        shift = 10_000_000 * copy
        result["args"] = {
            key: value + shift if key in _IDENTIFIERS and isinstance(value, int) else value
            for key, value in event["args"].items()
        }
    return result


if __name__ == "__main__":
    main()
