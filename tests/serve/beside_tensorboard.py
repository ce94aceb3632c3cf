"""The same histograms read by AMPscope and by TensorBoard's event reader.

    python -m tests.serve.beside_tensorboard

60 sampled steps of 1,000 tensors are written in both formats and read back whole, in turns. The script prints processor
time, which other programs on the machine hardly affect. Needs `pip install tensorboard`.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from amp_core import load_run
from tests.serve.big_runs import BINS, big_run

STEPS, TENSORS = 60, 500
TURNS = 3


def write_events(folder: Path, run: Path) -> None:
    """Write the histograms of a run as TensorBoard events."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for row in load_run(run).tensors().itertuples():
        limits = 2.0 ** (row.exp_min + 1 + np.arange(BINS))
        histogram = HistogramProto(
            min=row.absmin,
            max=row.absmax,
            num=row.numel,
            sum=row.abs_sum,
            sum_squares=row.rms**2 * row.numel,
            bucket_limit=limits.tolist(),
            bucket=row.exp_counts.astype(float).tolist(),
        )
        value = Summary.Value(tag=f"{row.kind}/{row.name}", histo=histogram)
        writer.add_event(Event(step=row.step, wall_time=float(row.step), summary=Summary(value=[value])))
    writer.close()


def read_events(folder: Path) -> int:
    """The histograms that TensorBoard's reader returns."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder), size_guidance={"histograms": 0, "tensors": 0})
    result.Reload()
    by_kind = result.Tags()
    histograms = sum(len(result.Histograms(tag)) for tag in by_kind["histograms"])
    return histograms + sum(len(result.Tensors(tag)) for tag in by_kind["tensors"])


def read_run(folder: Path) -> int:
    """The histograms that AMPscope reads, each an array in a frame."""
    return len(load_run(folder).tensors())


def seconds(read: Callable[[Path], int], folder: Path) -> float:
    began = time.process_time()
    assert read(folder) == STEPS * TENSORS * 2
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if importlib.util.find_spec("tensorboard") is None:
        sys.exit("TensorBoard is not installed here; pip install tensorboard.")
    with tempfile.TemporaryDirectory(prefix="ampscope-beside-") as home:
        run, events = Path(home) / "run", Path(home) / "events"
        with big_run(run, STEPS, STEPS * TENSORS * 2, TENSORS):
            pass
        write_events(events, run)
        seconds(read_run, run)
        times = [(seconds(read_run, run), seconds(read_events, events)) for _ in range(TURNS)]
        ours, theirs = (statistics.median(t) for t in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        print(f"{STEPS * TENSORS * 2:,} histograms: AMPscope {ours:.2f} s, TensorBoard {theirs:.1f} s, {ratio:.0f} ×")


if __name__ == "__main__":
    main()
