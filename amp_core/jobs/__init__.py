"""Training jobs: start, queue, list and stop them, and clean up after them. Imports neither torch nor streamlit.

queue (start, stop, list), arrays (start several at once) -> job_file (job.json)
    -> backends: local (launcher, reaper), slurm, ray
"""

from amp_core.jobs.arrays import start_array, submit_array_in
from amp_core.jobs.queue import (
    GRACE_S,
    Job,
    device_of,
    find,
    folder_name,
    listing,
    makes_runs,
    start,
    submit_in,
    under_way,
)

__all__ = [
    "GRACE_S",
    "Job",
    "device_of",
    "find",
    "folder_name",
    "listing",
    "makes_runs",
    "start",
    "start_array",
    "submit_array_in",
    "submit_in",
    "under_way",
]
