"""What several rules ask of a run: its signals, the order of its calls, facts of its head.

for row in signals(run, "eps lost").itertuples(): ...
for first, last, calls in orders(run): ...
facts(run.head.model, "dtypes")
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.ranks import rank_cause
from amp_core.analysis.steps import recipe
from amp_core.findings.model import Severity
from amp_core.formats import FORMATS
from amp_core.hardware.device_types import is_accelerator
from amp_core.store.run import Run

Orders = list[tuple[int, int, list[str]]]

LOWERED = ("Linear", "Conv")
"""Classes with one of these in their name are matrix products or convolutions, which autocast runs in 16 bits. That is
not so of `Bilinear`, whose weights are FP32 and whose operator takes the widest of its inputs."""


def signals(run: Run, *kinds: str) -> pd.DataFrame:
    """Events of these kinds, in order of time."""
    return run.cached_frame(["events"], _signals, *kinds)


def _signals(run: Run, *kinds: str) -> pd.DataFrame:
    table = run.table("events")
    frame: pd.DataFrame = table.filter(pc.is_in(table.column("kind"), pa.array(kinds))).to_pandas()
    return frame


def orders(run: Run) -> Orders:
    """First and last step of each stretch of steps with the same calls, and the calls; empty where not recorded.

    Calls after the last recorded step are left out where the scaler was updated among them: they are of steps of an
    optimizer that was not watched, one that replaced the watched one, say.
    """
    frame = signals(run, "calls")
    frame = frame[(frame["rank"] == 0) & frame["step"].notna()]
    if frame.empty:
        return []
    steps = [int(s) for s in frame["step"]]
    end = pc.max(run.table("steps").column("step")).as_py()
    lasts = [*(s - 1 for s in steps[1:]), max(steps[-1], end if end is not None else 0)]
    return [
        (first, last, str(name).split())
        for first, last, name in zip(steps, lasts, frame["name"], strict=True)
        if last >= first and not ((end is None or first > end) and "update" in str(name).split())
    ]


def of(call: str) -> tuple[str, int]:
    """The name of a call and the number of its optimizer."""
    name, _, number = call.partition(":")
    return name, int(number) if number.isdigit() else 0


def span(stretches: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """First and last step of all stretches together."""
    return min(first for first, _ in stretches), max(last for _, last in stretches)


def facts(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A mapping from the head; empty where it is not there or is something else."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def listed(record: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """A list of mappings from the head, likewise."""
    value = record.get(key)
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def autocast_dtype(run: Run) -> str | None:
    """`float16` or `bfloat16` where the run's forward was under autocast; None where it was not or is not known."""
    config = run.head.config
    dtype = config.get("autocast_dtype")
    if isinstance(dtype, str):
        return dtype
    if dtype is not None or "autocast_dtype" in config:
        return None
    form = FORMATS.get((recipe(run) or "").removesuffix("-unscaled"))
    return form.dtype if form is not None and form.autocast else None


def on_gpu(run: Run) -> bool:
    """Whether the run was on a GPU or another accelerator."""
    return is_accelerator(run.head.config.get("device", run.head.environment.get("device")))


def by_framework(run: Run, *frameworks: str) -> Severity | None:
    """`info` where the loop is that of one of these frameworks: what it does by design is good to know, and not for its
    user to change. None, the guide's severity, for any other."""
    return "info" if str(run.head.config.get("framework") or "").startswith(frameworks) else None


def model_name(run: Run) -> str:
    """The class of the model, which stands for the module that has no name."""
    return str(run.head.model.get("class") or "model")


def ended_by(run: Run) -> str:
    """What the exception said that ended the run; empty where none did."""
    cause = rank_cause(run)  # of several processes one failed, and its error ended the others
    if cause is not None:
        return cause.reason
    return run.end_reason or "" if run.status in ("failed", "lost") else ""


def failed_in(run: Run) -> str:
    """The module that was at work when the run failed; empty where that is not known."""
    frame = signals(run, "failed in")
    if frame.empty:
        return ""
    return str(frame["name"].iloc[-1])


def last_step(run: Run) -> int | None:
    """The last step recorded."""
    step: int | None = pc.max(run.table("steps").column("step")).as_py()
    return step


def optimizer_name(run: Run, index: int) -> str:
    """What to call an optimizer: its class, numbered where there are several."""
    names = run.head.config.get("optimizers")
    names = [str(n) for n in names] if isinstance(names, list) else []
    name = names[index] if index < len(names) else "optimizer"
    return f"{name} (optimizer {index})" if len(names) > 1 else name
