"""Faults and healthy trainings in other forms than the zoo's: other architectures, spellings and loops."""

from tests.findings.other_forms import architectures, healthy, operators, scaling, state
from tests.findings.other_forms.models import FAULTS, HEALTHY, Form

__all__ = ["FAULTS", "HEALTHY", "Form", "architectures", "healthy", "operators", "scaling", "state"]
