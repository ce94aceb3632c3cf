"""Marks on time axes, and the choice of a baseline run.

>>> step_marks(run)  # step, kind (`skipped` or `change`), what (in words)
>>> lost_gradient(run)
0.0031
>>> reference([{"precision": "fp16", "workload": "text-gpt"}, {"precision": "fp32", "workload": "text-gpt"}], 0)
1
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core.analysis.numerics.audits import own_audits
from amp_core.analysis.steps import MAX_WARMUP_STEPS, attempts_with_axes, warmup_steps
from amp_core.store.run import Run
from amp_core.text import formatting

TASK = ("workload", "size", "batch_size", "accumulate", "device")
"""Settings that must agree for two runs to train the same task on the same device."""
MAX_MARKS = 2000
"""Largest number of skipped steps that are marked, evenly chosen: more marks cannot be distinguished."""
_EVENT_TEXTS = {"phase change": "", "resumed": "training resumed", "traced": "operators traced"}
"""Kinds of events that begin a phase, and their texts; empty if the event has its own."""


def step_marks(run: Run) -> pd.DataFrame:
    """The marks of a run's time axes: skipped steps, and steps at which a phase of the run begins.

    Phases are the end of the warm-up, which timings leave out, audits, profiled and traced steps, a resumed run, and
    changes of watching. Columns: step, samples (cumulative; NaN if not recorded), time_s, kind (`skipped`
    or `change`), what (in words).
    """
    frame = attempts_with_axes(run)
    steps = frame["step"].to_numpy()
    skipped = np.flatnonzero(frame["skipped"].to_numpy())
    if len(skipped) > MAX_MARKS:
        skipped = skipped[np.linspace(0, len(skipped) - 1, MAX_MARKS).astype(int)]
    begun: dict[int, dict[str, None]] = {}  # a dict keeps the order, and each text once
    for step, what in _phases(run, frame):
        begun.setdefault(step, {})[what] = None
    wanted = np.array(sorted(begun), dtype=np.int64)
    changed = wanted[np.isin(wanted, steps)].tolist()
    places = np.concatenate([skipped, np.searchsorted(steps, changed)]).astype(int)
    return pd.DataFrame(
        {column: frame[column].to_numpy()[places] for column in ("step", "samples", "time_s")}
        | {
            "kind": ["skipped"] * len(skipped) + ["change"] * len(changed),
            "what": ["step skipped"] * len(skipped) + ["; ".join(begun[step]) for step in changed],
        }
    )


def _phases(run: Run, frame: pd.DataFrame) -> list[tuple[int, str]]:
    """Steps at which a phase begins, each with its description."""
    changes = []
    warm = warmup_steps(len(frame))
    if warm == MAX_WARMUP_STEPS:  # in a shorter run the end of the warm-up moves with each step
        changes.append((int(frame["step"].iloc[warm]), "warm-up over: timed from here on"))
    changes += [(int(step), "gradients audited in FP32") for step in pc.unique(run.table("audits")["step"]).to_pylist()]
    windows = run.table("windows").select(["step", "steps"]).to_pylist()
    changes += [
        (w["step"], f"{formatting.plural(w['steps'], 'step')} profiled" if w["steps"] else "profiled")
        for w in windows
        if w["step"] is not None
    ]
    events = run.events
    events = events[events["kind"].isin(_EVENT_TEXTS) & events["step"].notna()]
    for event in events[["step", "kind", "name", "detail"]].to_dict("records"):
        texts = [event["name"], event["detail"]] if event["kind"] == "phase change" else [_EVENT_TEXTS[event["kind"]]]
        changes.append((int(event["step"]), ": ".join(str(text) for text in texts if text)))
    return changes


def lost_gradient(run: Run) -> float | None:
    """Underflow of the gradient as a share (0–1) of its nonzero elements, measured by audits of the recipe at the
    run's own loss scale; None without an audit."""
    audits = own_audits(run)
    nonzero = audits["nonzero"].sum()
    return float(audits["lost"].sum() / nonzero) if nonzero else None


def baseline_index(configs: Sequence[Mapping[str, Any]], index: int) -> int | None:
    """Index of the FP32 run (else TF32) that trains the same task as `configs[index]`; None if there is none.

    If there are several, the first with the same seed, else the first.
    """
    own = configs[index]
    if not own.get("workload") or own.get("precision") in ("fp32", None):
        return None
    alike = [
        place
        for place, config in enumerate(configs)
        if place != index
        and config.get("precision") in ("fp32", "tf32")
        and all(config.get(name) == own.get(name) for name in TASK)
    ]

    def preference(place: int) -> tuple[bool, bool]:
        return (configs[place].get("precision") != "fp32", configs[place].get("seed") != own.get("seed"))

    return min(alike, key=preference, default=None)
