"""The rule on damaged tables: which cannot be read, why, and what is not known therefore.

>>> diagnose(load_run("runs/a"))[0].title
'The table tensors cannot be read: tensors/00000.parquet is damaged: ...'
"""

from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.schema import TABLES
from amp_core.store.run import Run

DAMAGED_TABLE = "damaged-table"


@rule(
    Entry(
        code=DAMAGED_TABLE,
        severity="error",
        family=TRAINING_LOOP,
        order=600,  # what the sound tables show comes first
        what="A table of the run is damaged, so neither findings nor charts know what it held.",
        signal="Each file of the run, read with the schema of its table.",
        threshold="One file that cannot be decoded, lacks a required column or holds impossible values. If it is one "
        "of `steps`, the run cannot be opened at all.",
        advice="All other tables are shown, and the absence of findings about the missing part means nothing. Copy the "
        "run again from where it was recorded, or repeat the training.",
        snippet='from amp_core import load_run\n\nprint(load_run("runs/a").salvaged().damage())',
        page="",
    )
)
def damaged_table(run: Run) -> list[Finding]:
    """`damaged-table`: tables that cannot be read, all in one finding."""
    damage = run.damage()
    if not damage:
        return []
    first, *others = damage
    title = f"The table {first} cannot be read: {damage[first]}"
    if others:
        title = f"{len(damage)} tables cannot be read: {'; '.join(damage.values())}"
    missing = "; ".join(TABLES[name].shows for name in damage)
    means, change = GUIDE[DAMAGED_TABLE].advice.split(". ")
    advice = Remedy(f"Not known therefore: {missing}. {means}. {change}")
    return [make_finding(DAMAGED_TABLE, title, ", ".join(damage), unit="", remedy=advice)]
