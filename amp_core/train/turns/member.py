"""One of several trainings that are compared.

>>> Member(TrainConfig(precision="bf16"), Path("runs/cmp/bf16"))
"""

from dataclasses import dataclass
from pathlib import Path

from amp_core.settings.training import TrainConfig


@dataclass(frozen=True)
class Member:
    """One training of a comparison."""

    config: TrainConfig
    folder: Path
    level: str = "standard"
    """How much `watch` records."""
