"""The precision that a program requests for each stage, and the dtypes seen there.

>>> precision_settings(run)[["stage", "asked", "source", "seen", "differs"]]
"""

from collections.abc import Iterator, Mapping

import pandas as pd

from amp_core.formats import format_of
from amp_core.store.run import Run
from amp_core.text import formatting

STAGES = ("weights", "compute", "outputs", "accumulation", "gradients", "reduction", "optimizer state")
_LIGHTNING = {"trainer_precision": "Trainer", "fabric_precision": "Fabric"}
"""Who was told a precision of Lightning, by the key in the run's config."""
_WIDTHS = {"16": "float16", "bf16": "bfloat16", "32": "float32", "64": "float64"}
"""Dtype by the first part of such a precision."""


def precision_settings(run: Run) -> pd.DataFrame:
    """One row per stage and setting, or per stage that was seen alone: stage, asked (dtype), source (of the setting),
    seen (dtypes in the first step; None: not seen), differs (one dtype was requested and another one seen)."""
    noted = run.head.model.get("precision_seen")
    seen = {str(k): str(dtypes) for k, dtypes in noted.items()} if isinstance(noted, Mapping) else {}
    rows: list[tuple[str, str | None, str | None]] = [row for row in _asked(run) if row[0] in STAGES]
    rows += [(stage, None, None) for stage in seen if stage in STAGES and stage not in {row[0] for row in rows}]
    frame = pd.DataFrame(sorted(rows, key=lambda row: STAGES.index(row[0])), columns=["stage", "asked", "source"])
    frame["seen"] = frame["stage"].map(seen).astype(object)  # of no stage that was seen pandas makes floats
    first = frame["seen"].map(lambda dtypes: dtypes.partition(",")[0], na_action="ignore")
    known = frame["asked"].map(lambda dtype: format_of(dtype) is not None).astype(bool) & frame["seen"].notna()
    frame["differs"] = known & (frame["asked"] != first)
    return frame


def precision_disagreements(settings: pd.DataFrame) -> list[str]:
    """One sentence per row of `precision_settings` whose stage was seen in another dtype than requested."""
    wrong = settings[settings["differs"]]
    return [
        f"{row.source} requests {format_labels(row.asked)} {row.stage}; {format_labels(row.seen)} was observed."
        for row in wrong.itertuples()
    ]


def format_labels(dtypes: object) -> str:
    """One or several dtypes as people write formats; an en dash for none."""
    if not isinstance(dtypes, str):
        return formatting.NONE
    return ", ".join(form.label if (form := format_of(name)) else name for name in dtypes.split(", "))


def _asked(run: Run) -> Iterator[tuple[str, str, str]]:
    config = run.head.config
    settings = run.head.model.get("precision_asked")
    for setting in settings if isinstance(settings, list) else ():
        if isinstance(setting, Mapping) and setting.keys() >= {"stage", "dtype", "source"}:
            yield str(setting["stage"]), str(setting["dtype"]), str(setting["source"])
    told = [(key, who) for key, who in _LIGHTNING.items() if config.get(key) is not None]
    for key, who in told:
        precision = str(config[key])
        width, _, kind = precision.partition("-")
        dtype, source = _WIDTHS.get(width, precision), f"{who}(precision={precision!r})"
        yield "compute", dtype, source
        yield "weights", "float32" if kind == "mixed" else dtype, source
    if not told and (requested := format_of(config.get("requested_precision"))) is not None:
        framework = str(config.get("framework") or "the framework")
        arguments = {
            "accelerate": f"Accelerator(mixed_precision={requested.name!r})",
            "transformers": f"TrainingArguments({requested.name}=True)",
        }
        yield "compute", str(requested.dtype), arguments.get(framework.partition(" ")[0], framework)
