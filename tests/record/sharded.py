"""A process group of a single process, for models under FSDP2: it works as with many processes, with one shard.

with one_process() as mesh:
    fully_shard(model, mesh=mesh)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def one_process() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, on the CPU; the group is destroyed afterwards."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    if torch.__version__.startswith("2.6."):
        pytest.skip("FSDP2 of torch 2.6 does not run on a CPU")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()
