"""What each finding means: one `Entry` per code, in the order in which they are told.

>>> GUIDE["clip-before-unscale"].advice
"""

from amp_core.findings.guide import loops, numerics, scaling, speed
from amp_core.findings.guide.entry import Entry

__all__ = ["FAMILIES", "GUIDE", "Entry"]

FAMILIES: dict[str, tuple[Entry, ...]] = {
    "Loss scaling": scaling.ENTRIES,
    "Training loop": loops.ENTRIES,
    "Range and precision": numerics.ENTRIES,
    "Speed and memory": speed.ENTRIES,
}
"""The entries by what they are about."""

GUIDE: dict[str, Entry] = {entry.code: entry for entries in FAMILIES.values() for entry in entries}
"""All entries by code."""
