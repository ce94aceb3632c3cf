"""Faults and healthy trainings in other forms than the zoo's: other architectures, spellings and loops."""

from tests.findings.other_forms import (
    architectures,
    autocast,
    averages,
    between,
    healthy,
    kernels,
    losses,
    masks,
    operators,
    quantized,
    rates,
    scaling,
    sharded,
    silent,
    state,
    unscaling,
)
from tests.findings.other_forms.form import FAULTS, HEALTHY, Form

__all__ = [
    "FAULTS",
    "HEALTHY",
    "Form",
    "architectures",
    "autocast",
    "averages",
    "between",
    "healthy",
    "kernels",
    "losses",
    "masks",
    "operators",
    "quantized",
    "rates",
    "scaling",
    "sharded",
    "silent",
    "state",
    "unscaling",
]
