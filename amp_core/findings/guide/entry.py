"""`Entry`: what the guide says of one code."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_core.findings.model import Severity


@dataclass(frozen=True)
class Entry:
    """One way in which mixed precision goes wrong: what it is, what shows it, and what repairs it."""

    code: str
    severity: Severity
    """The usual one; a finding may be graver or milder, as its evidence is."""
    what: str
    """What happens."""
    signal: str
    """What is looked at."""
    threshold: str
    """From where on it is called so, and why from there: the definition or the source."""
    advice: str
    """What it means and what to try, in two sentences."""
    snippet: str = ""
    """Plain PyTorch that does so."""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The same where a framework does it otherwise: `Accelerate`, `Transformers Trainer`, `Lightning`."""
    page: str = "loss-scale"
    """Address of the page that proves it."""
