"""Runs of a Slurm array: on which nodes they trained, since their times compare the nodes too.

>>> array_note([run_fp32, run_bf16], ["fp32", "bf16"])
'fp32 and bf16 were tasks of Slurm array 123 on n1 and n2, not interleaved, so their times compare nodes too; …'
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from amp_core.store.run import Run
from amp_core.text.formatting import join_words


def array_note(runs: Sequence[Run], labels: Sequence[str]) -> str | None:
    """What is to be said of the times of runs that were tasks of one array; None if no two of them were."""
    jobs = [_slurm_job(run) for run in runs]
    counts = Counter(job["array"] for job in jobs if isinstance(job.get("array"), str))
    arrays = [array for array, count in counts.items() if count > 1]
    if not arrays:
        return None
    tasks = [(label, job) for label, job in zip(labels, jobs, strict=True) if job.get("array") in arrays]
    nodes = sorted({str(node) for _, job in tasks for node in _listed(job)})
    several = len(nodes) != 1
    return (
        f"{join_words([label for label, _ in tasks])} were tasks of Slurm array {join_words(arrays)} on "
        f"{join_words(nodes) if nodes else 'nodes that are not recorded'}, not interleaved, so their times compare "
        f"{'nodes' if several else 'background load'} too; `ampscope compare` without --array runs them interleaved."
    )


def _slurm_job(run: Run) -> Mapping[str, Any]:
    job = run.head.environment.get("slurm")
    return job if isinstance(job, Mapping) else {}


def _listed(job: Mapping[str, Any]) -> list[Any]:
    nodes = job.get("nodes")
    return nodes if isinstance(nodes, list) else []
