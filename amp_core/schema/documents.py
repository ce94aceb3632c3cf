"""The documents that `--json` prints: their version and their keys, which docs/reading.md lists.

>>> versioned({"forecast": []})
{'schema': 1, 'forecast': []}
"""

from collections.abc import Mapping
from typing import Any

VERSION = 1
"""Within a version keys are added, and none is renamed or removed."""


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its version, `schema`, as the first key."""
    return {"schema": VERSION, **document}
