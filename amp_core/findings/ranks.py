"""Rules on the processes of one training as wholes."""

from amp_core.analysis.ranks import rank_cause, rank_ends
from amp_core.findings._found import found
from amp_core.findings.model import Finding
from amp_core.run import Run


def rank_ended(run: Run) -> list[Finding]:
    """`rank-ended`: of several processes one failed or died, which ended the training."""
    cause = rank_cause(run)
    if cause is None:
        return []
    others = sum(end.rank != cause.rank for end in rank_ends(run))
    return [
        found(
            "rank-ended",
            cause.in_words()[0].upper() + cause.in_words()[1:],
            f"rank {cause.rank}",
            steps=(cause.last_step, cause.last_step) if cause.last_step is not None else None,
            value=float(others),
            limit=0.0,
            unit="other ranks that ended with it",
        )
    ]
