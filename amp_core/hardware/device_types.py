"""Device types by torch's names for them, without torch: those that can be trained on, and how a run names a device.

>>> is_accelerator("cuda:1"), is_accelerator("cpu"), is_accelerator(None)
(True, False, False)
"""

from amp_core.hardware.autocast_ops import LISTS

ACCELERATORS = tuple(kind for kind in LISTS if kind != "cpu")
"""Types of GPUs and the like that a training can be sent to; `record.backends` has a class for each."""


def is_accelerator(device: object) -> bool:
    """Whether what a run records as its device (`cuda:0`, `cpu`, null) is another than the CPU."""
    return isinstance(device, str) and device != "" and type_of(device) != "cpu"


def type_of(device: str) -> str:
    """`cuda` of `cuda:0`."""
    return device.partition(":")[0]
