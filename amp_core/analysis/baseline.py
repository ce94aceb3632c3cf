"""What a page marks on its time axes, and which run another one is held against.

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
from amp_core.analysis.steps import WARMUP_STEPS, along, warmup_steps
from amp_core.store.run import Run
from amp_core.text import formatting

TASK = ("workload", "size", "batch_size", "accumulate", "device")
"""Settings in which two runs must agree to be of one task on one machine."""
MAX_MARKS = 2000
"""So many marks are made at most, evenly chosen among the skipped steps: more could not be told apart."""
_TOLD = {"phase change": "", "resumed": "training resumed", "traced": "operators traced"}
"""Kinds of events that begin a phase, and how they are told."""


def step_marks(run: Run) -> pd.DataFrame:
    """Steps worth a mark on every time axis: skipped ones, and those at which the run was in another phase.

    Phases are the end of the warm-up that timings leave out, audits, profiled and traced steps, a resumed training, and
    changes of how it is watched. Columns: step, samples (seen so far; NaN where not recorded), time_s, kind (`skipped`
    or `change`), what (in words).
    """
    frame = along(run)
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
    """Steps at which another phase begins, each with what it is."""
    found = []
    warm = warmup_steps(len(frame))
    if warm == WARMUP_STEPS:  # of a run that has just begun it would move with each step
        found.append((int(frame["step"].iloc[warm]), "warm-up over: timed from here on"))
    found += [(int(step), "gradients audited in FP32") for step in pc.unique(run.table("audits")["step"]).to_pylist()]
    windows = run.table("windows").select(["step", "steps"]).to_pylist()
    found += [
        (w["step"], f"{formatting.plural(w['steps'], 'step')} profiled" if w["steps"] else "profiled")
        for w in windows
        if w["step"] is not None
    ]
    events = run.events
    events = events[events["kind"].isin(_TOLD) & events["step"].notna()]
    for event in events[["step", "kind", "name", "detail"]].to_dict("records"):
        said = [event["name"], event["detail"]] if event["kind"] == "phase change" else [_TOLD[event["kind"]]]
        found.append((int(event["step"]), ": ".join(str(text) for text in said if text)))
    return found


def lost_gradient(run: Run) -> float | None:
    """Share (0–1) of the nonzero gradient elements that the recipe turned to zero, as its audits measured it at the
    run's own loss scale; None without an audit."""
    audits = own_audits(run)
    nonzero = audits["nonzero"].sum()
    return float(audits["lost"].sum() / nonzero) if nonzero else None


def reference(configs: Sequence[Mapping[str, Any]], of: int) -> int | None:
    """The place of the FP32 run (TF32 failing that) that trains the same task as `configs[of]`; None without one.

    With several the one of the same seed, and among those the first.
    """
    own = configs[of]
    if not own.get("workload") or own.get("precision") in ("fp32", None):
        return None
    alike = [
        place
        for place, config in enumerate(configs)
        if place != of
        and config.get("precision") in ("fp32", "tf32")
        and all(config.get(name) == own.get(name) for name in TASK)
    ]

    def rank(place: int) -> tuple[bool, bool]:
        return (configs[place].get("precision") != "fp32", configs[place].get("seed") != own.get("seed"))

    return min(alike, key=rank, default=None)
