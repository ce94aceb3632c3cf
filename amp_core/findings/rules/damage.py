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
    subject = f"The table {next(iter(damage))}" if len(damage) == 1 else f"{len(damage)} tables"
    title = f"{subject} cannot be read: {_in_words(damage)}"
    missing = "; ".join(TABLES[name].shows for name in damage)
    means, change = GUIDE[DAMAGED_TABLE].advice.split(". ")
    advice = Remedy(f"Not known therefore: {missing}. {means}. {change}")
    return [make_finding(DAMAGED_TABLE, title, ", ".join(damage), unit="", remedy=advice)]


def _in_words(damage: dict[str, str]) -> str:
    """The reasons, each once: a disk that was full cuts off several tables."""
    files_by_cause: dict[str, list[str]] = {}
    for reason in damage.values():
        file, _, cause = reason.partition(" is damaged: ")
        files_by_cause.setdefault(cause, []).append(file)
    texts = []
    for cause, files in files_by_cause.items():
        verb = "is" if len(files) == 1 else "are"
        texts += [f"{', '.join(files)} {verb} damaged: {cause}"] if cause else files
    return "; ".join(texts)
