"""Facts of a run that several rules need: its signals, the order of its calls, entries of its head.

for row in signals(run, "eps lost").itertuples(): ...
for first, last, calls in call_orders(run): ...
facts(run.head.model, "dtypes")
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.ranks import rank_cause
from amp_core.findings.model import Severity
from amp_core.hardware.device_types import is_accelerator
from amp_core.store.run import Run

CallOrders = list[tuple[int, int, list[str]]]

GEMM_LAYERS = ("Linear", "Conv")
"""Classes whose names contain one of these are matrix products or convolutions, which autocast runs in 16 bits. That is
not true of `Bilinear`, whose weights are FP32 and whose operator promotes to the widest input."""


def signals(run: Run, *kinds: str) -> pd.DataFrame:
    """Events of these kinds, in order of time. Rules share the frame: do not modify it."""
    recorded = run.cached(["events"], _recorded_kinds)
    return run.cached(["events"], _signals, *(kind for kind in kinds if kind in recorded))


def _recorded_kinds(run: Run) -> frozenset[str]:
    return frozenset(pc.unique(run.table("events").column("kind")).to_pylist())


def _signals(run: Run, *kinds: str) -> pd.DataFrame:
    table = run.table("events")
    frame: pd.DataFrame = table.filter(pc.is_in(table.column("kind"), pa.array(kinds, pa.string()))).to_pandas()
    return frame


def call_orders(run: Run) -> CallOrders:
    """First and last step of each stretch of steps with the same calls, and the calls; empty if not recorded.

    Calls after the last recorded step are left out if they include an update of the scaler: they belong to an
    optimizer that was not watched, such as one that replaced the watched one. Rules share the list: do not modify it.
    """
    return run.cached(["events", "steps"], _call_orders)


def _call_orders(run: Run) -> CallOrders:
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


def split_call(call: str) -> tuple[str, int]:
    """The name of a call and the number of its optimizer."""
    name, _, number = call.partition(":")
    return name, int(number) if number.isdigit() else 0


def step_range(stretches: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """First and last step over all stretches."""
    return min(first for first, _ in stretches), max(last for _, last in stretches)


def facts(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A mapping from the head; empty if it is missing or something else."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def mappings(record: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """A list of mappings from the head; empty if it is missing or something else."""
    value = record.get(key)
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def has_fp32_masters(run: Run) -> bool:
    """Whether the optimizers update FP32 copies alone, kept outside of a model that is stored in 16 bits."""
    settings = mappings(run.head.config, "optimizer_settings")
    outside = (s.get("outside_model") == s.get("parameters") for s in settings)
    return bool(settings) and all(outside) and all(s.get("dtypes") == ["float32"] for s in settings)


def converted_at(run: Run, dtype: str) -> str:
    """` at step 15` if the program converted weights to `dtype` while it trained; empty otherwise."""
    frame = signals(run, "converted weights")
    frame = frame[frame["dtype"] == dtype]
    return f" at step {int(frame['step'].iloc[0]):,}" if len(frame) else ""


def on_gpu(run: Run) -> bool:
    """Whether the run was on a GPU or another accelerator."""
    return is_accelerator(run.head.config.get("device", run.head.environment.get("device")))


def by_framework(run: Run, *frameworks: str) -> Severity | None:
    """`info` if the loop is that of one of these frameworks, whose design the user does not decide; None, the guide's
    severity, for any other."""
    return "info" if str(run.head.config.get("framework") or "").startswith(frameworks) else None


def model_name(run: Run) -> str:
    """The class of the model: the name of the root module."""
    return str(run.head.model.get("class") or "model")


def ending_error(run: Run) -> str:
    """The message of the exception that ended the run, or of one of the scaler's that the program caught, after which
    no step came; empty without one."""
    cause = rank_cause(run)  # with several processes, the error of one ended the others
    if cause is not None:
        return cause.reason
    if run.status in ("failed", "lost"):
        return run.end_reason or ""
    caught, last = signals(run, "failed call"), last_step(run)
    caught = caught[caught["step"] > last] if last is not None and len(caught) else caught
    return str(caught["detail"].iloc[-1]) if len(caught) else ""


def ending_steps(run: Run) -> tuple[int, int] | None:
    """The step in which an error ended the run, as the first and the last; the last step if that is not known."""
    frame = signals(run, "failed in")
    step = frame["step"].dropna()
    last = int(step.iloc[-1]) if len(step) else last_step(run)
    return (last, last) if last is not None else None


def failing_module(run: Run) -> str:
    """The module that ran when the run failed; empty if not known."""
    frame = signals(run, "failed in")
    if frame.empty:
        return ""
    return str(frame["name"].iloc[-1])


def last_step(run: Run) -> int | None:
    """The last step recorded."""
    step: int | None = pc.max(run.table("steps").column("step")).as_py()
    return step


def optimizer_name(run: Run, index: int) -> str:
    """The name of an optimizer: its class, with its index if there are several."""
    names = run.head.config.get("optimizers")
    names = [str(n) for n in names] if isinstance(names, list) else []
    name = names[index] if index < len(names) else "optimizer"
    return f"{name} (optimizer {index})" if len(names) > 1 else name


def rounded_decays(run: Run) -> pd.DataFrame:
    """Events on averages whose decay rounds to 1: of buffers in forward, and of decays that several steps have in
    common, as a factor of the loop that is near 1 in one step only is no decay."""
    frame = signals(run, "rounded decay")
    if frame.empty:
        return frame
    steps = frame.groupby(["detail", "limit"])["step"].transform("nunique")
    return frame[(steps > 1) | (frame["phase"] == "forward")]


def is_second_moment(key: str) -> bool:
    """Whether an optimizer's state of that name holds second moments, as torch and others call them."""
    return "sq" in key or key in ("v", "nu")
