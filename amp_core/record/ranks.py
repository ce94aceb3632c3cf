"""The rank of this process among those that train together, and how they share the model.

    >>> place()                     # rank and number of processes
    (1, 4)
    >>> sharing(model)              # for the head of the run
    {'parallel': 'fsdp', 'shards': 4}

Nothing here communicates with other processes: each writes its own segments, and readers merge them.
"""

import datetime
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from amp_core.record.model import own
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observer import Observer
from amp_core.schema import RunError
from amp_core.store.atomic import replace_file
from amp_core.store.run import load_run
from amp_core.store.writer import RunWriter


def place() -> tuple[int, int]:
    """Rank and number of processes, from torch.distributed or else from the environment that torchrun sets.

    Raises `RunError` for an environment with an invalid rank or world size.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    given = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not all(text.isdecimal() for text in given) or int(given[0]) >= int(given[1]):
        raise RunError(
            f"RANK={given[0]!r} of WORLD_SIZE={given[1]!r} in the environment is not a valid rank; start the "
            "processes with torchrun, or unset both"
        )
    return int(given[0]), int(given[1])


def sharing(model: torch.nn.Module) -> dict[str, Any]:
    """How the processes share `model`: `parallel` (`ddp`, `fsdp`, `sharded`), and `shards`, the number of shards of its
    parameters. Empty if it shows no sharing."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return {"parallel": "ddp", "shards": 1}
    fsdp1 = own.child(model, "_fsdp_wrapped_module") is not None
    if fsdp1 and torch.distributed.is_initialized():
        return {"parallel": "fsdp", "shards": torch.distributed.get_world_size()}
    cut = max((_shards(p) for p in own.parameters(model)), default=0)
    if not cut:
        return {}
    fsdp2 = any(c.__name__ == "FSDPModule" for c in type(model).__mro__)
    return {"parallel": "fsdp" if fsdp2 else "sharded", "shards": cut}


def computed_in(model: torch.nn.Module) -> str | None:
    """The 16-bit dtype that FSDP casts parameters to for forward and backward; None if it casts to no such dtype."""
    for module in own.modules(model):
        state: Any = getattr(type(module), "_get_fsdp_state", None)  # FSDP2; FSDP1 keeps its settings on the module
        policy = state(module)._mp_policy if state is not None else own.held(module, "mixed_precision")
        dtype = getattr(policy, "param_dtype", None)
        if dtype in NARROW:
            return str(dtype).removeprefix("torch.")
    return None


def communication_hook(model: torch.nn.Module) -> str | None:
    """The name of the hook by which DDP reduces gradients, one of Python or one of torch's own; None without one."""
    for hook, _ in own.held(model, "_comm_hooks") or ():
        name = str(getattr(hook, "__name__", type(hook).__name__))
        if name != "_reducer_allreduce_and_upcast_hook":  # DDP's own, for its `mixed_precision`
            return name
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        name = model._get_ddp_logging_data().get("comm_hook", "")
        return name.rpartition(".")[2] if name.startswith("BuiltinCommHookType") else None
    return None


def _shards(parameter: torch.Tensor) -> int:
    """The number of shards of a DTensor; 0 for any other tensor."""
    if not hasattr(parameter, "placements"):
        return 0
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    count = 1
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            count *= mesh.size(dim)
    return count


def refuse_foreign(folder: Path) -> None:
    """For ranks other than 0, which expect the `run.json` of their own run: raise `RunError` if it is that of an
    earlier run."""
    if not (folder / "run.json").exists():
        return
    created = load_run(folder).head.created_at
    try:
        earlier = datetime.datetime.fromisoformat(created).timestamp() < psutil.Process().create_time()
    except ValueError:  # not a run
        earlier = True
    if earlier:
        raise RunError(f"into={str(folder)!r} already holds a run; give a folder that does not exist yet")


class HeadIfAlone(Observer):
    """Observer on a rank other than 0: writes a head if rank 0 never wrote one, so that the folder can be read.

    That happens if rank 0 died before it began to watch, and on nodes that do not share the folder's disk.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer

    def close(self) -> None:
        file = self._writer.folder / "run.json"
        if not file.exists():
            replace_file(file, self._writer.head.to_json().encode())
