"""The rule on jobs that a scheduler such as Slurm ended before the training had."""

from amp_core.analysis.steps import whole_number
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy, Severity
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import last_step
from amp_core.settings.resources import PLACES
from amp_core.store.run import Run

_SAVE = """\
import signal

stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))  # Slurm sends it some seconds before it kills
for step, batch in enumerate(loader):
    train_step(batch)
    if stopping or step % 500 == 0:
        states = {"model": model, "optimizer": optimizer, "scaler": scaler}
        torch.save({name: part.state_dict() for name, part in states.items()}, "checkpoint.pt")
    if stopping:
        break"""
_FEWER = """\
loader = DataLoader(dataset, batch_size=32, num_workers=2, persistent_workers=True)  # each worker is a process
state = torch.load("checkpoint.pt", map_location="cpu", mmap=True)  # not a second copy in memory"""
_HOW = "`ampscope train --resume --on {on} --time 8:00:00`"
_CAUSES: dict[str, tuple[str, Severity, Remedy]] = {
    "time limit": (
        "at its time limit",
        "warning",
        Remedy(
            "The training needs more time than the job had, and what came after its last checkpoint is lost. Resume "
            f"it with a higher limit ({_HOW}); Slurm can also queue it again: `--requeue --checkpoint-every N`.",
            _SAVE,
        ),
    ),
    "memory": (
        "because it exceeded its memory limit",
        "error",
        Remedy(
            "The limit is on the memory of the host, not of the GPU: data, worker processes and copies of checkpoints "
            "count. Request more (`SBATCH_MEM_PER_NODE=64G`), or use fewer workers and smaller copies.",
            _FEWER,
        ),
    ),
    "preemption": (
        "for one of higher priority",
        "warning",
        Remedy(
            "A job that may be preempted has to be able to resume. Submit it with `--requeue --checkpoint-every N`, "
            f"or resume this one ({_HOW}).",
            _SAVE,
        ),
    ),
    "node failure": (
        "because its node failed",
        "error",
        Remedy(
            "The fault is the node's, so the same training may succeed on another. Resume it from its last checkpoint "
            f"({_HOW}), and report the node if it fails again.",
            _SAVE,
        ),
    ),
}


@rule(
    Entry(
        code="killed-by-scheduler",
        severity="warning",
        family=TRAINING_LOOP,
        order=12,
        what="A scheduler ended the job before the training had ended.",
        signal="The state in which Slurm reports the job: TIMEOUT, OUT_OF_MEMORY, PREEMPTED, NODE_FAIL. With Ray, the "
        "message of a failed job, and its exit at its time limit.",
        threshold="One of them. An error if memory ran out or the node failed, as it may happen again.",
        advice="Everything after the last checkpoint is lost, and conclusions about the final loss do not hold. Save "
        "checkpoints, resume with more time or memory, or let the job queue itself again with `--requeue`.",
        snippet=_SAVE,
        page="",
    )
)
def killed_by_scheduler(run: Run) -> list[Finding]:
    """`killed-by-scheduler`: the scheduler ended the job."""
    job = run.head.job
    cause = job.get("cause")
    if run.is_live or run.status == "finished" or not isinstance(cause, str) or cause not in _CAUSES:
        return []
    how, severity, remedy = _CAUSES[cause]
    place = job.get("backend")
    advice = remedy.advice.format(on=place if place in PLACES else "slurm")  # anybody may have written the run
    last = last_step(run)
    node = f" on {str(job['node'])[:60]}" if job.get("node") else ""
    return [
        make_finding(
            "killed-by-scheduler",
            f"The job was ended {how} ({str(job.get('state') or cause)[:40]})",
            f"{str(job.get('backend'))[:20]} job {str(job.get('id'))[:40]}{node}",
            severity=severity,
            steps=(last, last) if last is not None else None,
            value=float(last + 1) if last is not None else 0.0,
            limit=float(planned) if (planned := whole_number(run.head.config.get("steps"))) is not None else None,
            unit="steps",
            remedy=Remedy(advice, remedy.snippet),
        )
    ]
