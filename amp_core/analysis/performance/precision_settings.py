"""The precision that a program requests for each stage, and the dtypes seen there.

>>> precision_settings(run)[["stage", "asked", "source", "seen", "differs"]]
"""

from collections.abc import Iterator

import pandas as pd

from amp_core.formats import format_of
from amp_core.store.run import Run

STAGES = ("weights", "compute", "outputs", "accumulation", "gradients", "reduction", "optimizer state")
_LIGHTNING = {"16": "float16", "bf16": "bfloat16", "32": "float32", "64": "float64"}


def precision_settings(run: Run) -> pd.DataFrame:
    """One row per stage and setting, or per stage that was seen alone: stage, asked (dtype), source (of the setting),
    seen (dtypes in the first step; None: not seen), differs (one dtype was requested and another one seen)."""
    seen = dict(run.head.model.get("precision_seen") or {})
    rows: list[tuple[str, str | None, str | None]] = [row for row in _asked(run) if row[0] in STAGES]
    rows += [(stage, None, None) for stage in seen if stage in STAGES and stage not in {row[0] for row in rows}]
    frame = pd.DataFrame(sorted(rows, key=lambda row: STAGES.index(row[0])), columns=["stage", "asked", "source"])
    frame["seen"] = frame["stage"].map(seen)
    first = frame["seen"].str.partition(",")[0] if len(frame) else frame["seen"]
    known = frame["asked"].map(lambda dtype: format_of(dtype) is not None).astype(bool) & frame["seen"].notna()
    frame["differs"] = known & (frame["asked"] != first)
    return frame


def _asked(run: Run) -> Iterator[tuple[str, str, str]]:
    config = run.head.config
    for setting in run.head.model.get("precision_asked") or ():
        yield str(setting["stage"]), str(setting["dtype"]), str(setting["source"])
    trainer = config.get("trainer_precision")
    if trainer is not None:
        width, _, kind = str(trainer).partition("-")
        dtype = _LIGHTNING.get(width, str(trainer))
        yield "compute", dtype, f"Trainer(precision={str(trainer)!r})"
        yield "weights", "float32" if kind == "mixed" else dtype, f"Trainer(precision={str(trainer)!r})"
    elif (requested := format_of(config.get("requested_precision"))) is not None:
        yield "compute", str(requested.dtype), str(config.get("framework") or "the framework")
