"""Reads a model's parameters and gradients (names, devices, and the values that this process holds) and optimizers."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

from amp_core.record.model import own

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"})
"""Name parts that FSDP, activation checkpointing, `torch.compile` and Lightning's Fabric add to what they wrap."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module that the user wrote, with the names the user knows, out of `torch.compile`, DDP, FSDP, Fabric and
    DeepSpeed."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel) or is_deepspeed(model):
            names: tuple[str, ...] = ("module",)
        else:
            names = ("_orig_mod", "_fsdp_wrapped_module", "_forward_module")
        inner = next((m for name in names if (m := own.child(model, name)) is not None), None)
        if inner is None:
            return model
        model = inner


def is_deepspeed(model: torch.nn.Module) -> bool:
    """Whether a module is an engine of DeepSpeed."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def written_class(module: torch.nn.Module) -> type:
    """The class that the user wrote, of which FSDP2's `fully_shard` makes a new one."""
    kind = type(module)
    return kind.__mro__[2] if len(kind.__bases__) == 2 and kind.__bases__[0].__name__ == "FSDPModule" else kind


def named_parameters(model: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """`model.named_parameters()` under the names that the user knows, whatever wraps parts of the model."""
    for name, parameter in own.named_parameters(model, remove_duplicate=remove_duplicate):
        yield plain_name(name), parameter


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """`model.named_buffers()` likewise."""
    for name, buffer in own.named_buffers(model):
        yield plain_name(name), buffer


def named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """`model.named_modules()` likewise."""
    for name, module in own.named_modules(model):
        yield plain_name(name), module


def plain_name(name: str) -> str:
    """`name` without the parts that wrappers added."""
    if "_module" not in name and "_orig_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def in_backward() -> bool:
    """Whether this thread runs backward: modules that are called then are recomputed by checkpointing."""
    return torch._C._current_graph_task_id() != -1


def backward_reaches(model: torch.nn.Module) -> bool:
    """Whether the present backward will reach a trained parameter of the model. True where that is unknown, as of a
    model whose parameters are sharded, and within `autograd.grad`, of which torch does not tell that."""
    known = False
    for p in own.parameters(model):
        if type(p) is torch.nn.Parameter and p.requires_grad and p.is_leaf:
            known = True
            try:
                if torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(p).node):
                    return True  # mostly the first one: this runs in each backward of a scaled loss
            except RuntimeError:  # raised for leaves within `autograd.grad`
                return True
    return not known


def local_values(grad: torch.Tensor) -> torch.Tensor:
    """The values of a gradient that this process holds: of a sharded one its shard, of a sparse one its entries, of a
    complex one its real and imaginary parts."""
    if (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and not grad.requires_grad
        and not grad.is_complex()
        and not grad._is_zerotensor()
    ):
        return grad  # nearly all gradients
    grad = grad.detach()
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    return real_values(_entry_points(grad))


def _entry_points(grad: torch.Tensor) -> torch.Tensor:
    """The stored entries of a tensor of any layout, as a strided tensor."""
    if grad.layout is torch.strided:
        return grad
    if grad.layout is torch.sparse_coo:
        return grad.coalesce().values()
    if grad.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return grad.values()
    return grad.to_dense()


def real_values(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real and imaginary parts, twice as many real values; any other as it is.

    Zeros for which autograd takes no memory, such as the gradient of `torch.sgn`, get some: kernels read addresses.
    """
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds values: those on the meta device and those of lazy modules do not."""
    return not is_lazy(tensor) and not tensor.is_meta


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the first parameter that holds values; the CPU where none does."""
    return next((p.device for p in own.parameters(model) if not p.is_meta), torch.device("cpu"))


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate of the first parameter group; None without one, or if reading it would wait for a GPU."""
    rate = optimizer.param_groups[0].get("lr")
    if isinstance(rate, torch.Tensor):  # a capturable optimizer's
        return float(rate) if rate.device.type == "cpu" else None
    return float(rate) if rate is not None else None


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Every tensor in the state of the optimizers: of each parameter, and what some keep beside it, as MADGRAD does a
    step count."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            held = state.values() if isinstance(state, Mapping) else [state]
            yield from (v for v in held if isinstance(v, torch.Tensor))
