"""Training processes: start, queue, list and stop them, and clean up after them. Imports neither torch nor streamlit.

queue (start, stop, list) -> job_file (job.json) -> launcher (waits for the device, becomes the training) -> reaper
"""

from amp_core.jobs.queue import GRACE_S, Job, device_of, find, folder_name, listing, makes_runs, start

__all__ = ["GRACE_S", "Job", "device_of", "find", "folder_name", "listing", "makes_runs", "start"]
