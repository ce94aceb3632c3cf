"""A diagnosis as one plain document: `ampscope diagnose --json` and assistants give the same."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from amp_core.analysis import precision_settings
from amp_core.findings import Finding, diagnosis, first_sentence
from amp_core.schema.documents import versioned
from amp_core.store.run import Run


def diagnosis_document(run: Run, findings: Sequence[Finding], muted: Collection[str] = ()) -> dict[str, Any]:
    """What `diagnose` found in `run` as values that JSON can hold, without the codes in `muted`.

    Keys: schema, run, status, end_reason, first_sentence, diagnosis (of `Diagnosis`: verdict, cause, where, origin,
    evidence, advice, patch, skips, loss_scale), findings (the fields of `Finding`), precision (the rows of
    `precision_settings`: what was requested and observed in each stage), muted (the codes that were found and left
    out), damaged (by table why it cannot be read). NaN and infinities are text.
    """
    run = run.salvaged()
    shown = [f for f in findings if f.code not in muted]
    return versioned(
        {
            "run": run.name,
            "status": run.status,
            "end_reason": run.end_reason,
            "first_sentence": first_sentence(run),
            "diagnosis": _plain(diagnosis(run, shown).to_dict()),
            "findings": [_plain(f.to_dict()) for f in shown],
            "precision": _precision(run),
            "muted": sorted({f.code for f in findings} & set(muted)),
            "damaged": run.damage(),
        }
    )


def _precision(run: Run) -> list[dict[str, Any]]:
    rows = precision_settings(run).to_dict("records")
    return [{str(key): None if isinstance(v, float) else v for key, v in row.items()} for row in rows]  # NaN: unknown


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {k: _plain(v) if isinstance(v, dict) else _finite(v) for k, v in record.items()}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
