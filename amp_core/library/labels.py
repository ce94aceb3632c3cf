"""Labels: the name, tags and note given to a run afterwards.

    >>> write_label("runs/a", Label(name="final", tags=("lstm", "paper"), note="as in table 2"))
    >>> label_of("runs/a").tags
    ('lstm', 'paper')

Kept beside the run, `.a.label.json` beside `a` (see `sidecar`).
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from amp_core.library.permissions import current
from amp_core.library.sidecar import file_beside, read_beside, write_beside
from amp_core.schema import RunError
from amp_core.store.urls import is_address

MAX_NAME, MAX_TAGS, MAX_NOTE = 120, 20, 2000
"""Limits: characters of a name or tag, number of tags, characters of a note; longer values are cut."""


@dataclass(frozen=True)
class Label:
    """A run's label; empty by default."""

    name: str = ""
    """Replaces the recorded name."""
    tags: tuple[str, ...] = ()
    note: str = ""


def label_of(path: str | os.PathLike[str]) -> Label:
    """The label of the run at `path`; an empty one if the file is missing or cannot be read."""
    content = read_beside(label_file(path))
    if not isinstance(content, dict):
        return Label()
    tags = content.get("tags")
    words = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return tidied(Label(_text(content.get("name")), tuple(words), _text(content.get("note"))))


def write_label(path: str | os.PathLike[str], label: Label) -> None:
    """Set the label of the run at `path`.

    Raises `RunError` if the file beside the run cannot be written, or on a read-only server.
    """
    current().check_change("label a run")
    if is_address(path):
        raise RunError(f"path={str(path)!r} cannot be labelled: labels are stored beside a run on this machine's disks")
    label, file = tidied(label), label_file(path)
    try:
        write_beside(file, dataclasses.asdict(label) if label != Label() else None)
    except OSError as error:
        raise RunError(f"path={str(path)!r} cannot be labelled: {file} ({error.strerror or error})") from error


def tidied(label: Label) -> Label:
    """The label without surrounding whitespace and empty or duplicate tags, cut to the limits."""
    tags = dict.fromkeys(" ".join(tag.split())[:MAX_NAME] for tag in label.tags)
    name = " ".join(label.name.split())[:MAX_NAME]
    return Label(name, tuple(tag for tag in tags if tag)[:MAX_TAGS], label.note.strip()[:MAX_NOTE])


def label_file(path: str | os.PathLike[str]) -> Path:
    """The file of the label of the run at `path`."""
    return file_beside(path, "label")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
