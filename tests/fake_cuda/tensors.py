"""Tensors that are CUDA tensors to torch. Their values are in host memory; every operator is launched on a stream.

    >>> x = torch.ones(3, device="cuda:1")
    >>> x.device, x.sum().item()
    (device(type='cuda', index=1), 3.0)

CUDA's rules hold: operands are on one device; a read that is not ordered after the write is a race; a copy to pinned
memory arrives when its stream reaches it, and until then the memory holds 0xFF, which is NaN.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.fake_cuda.machine import launch, library

aten = torch.ops.aten
ACROSS_DEVICES = ("copy_", "_to_copy", "set_", "is_same_size")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2")
"""Operators that return a value or a size to the host, which waits for the stream."""
OF_THE_HOST = ("detach", "alias", "view", "as_strided", "expand", "permute", "transpose", "t", "select", "slice",
               "unsqueeze", "squeeze", "unbind", "split", "empty", "empty_strided", "empty_like", "is_pinned",
               "_unsafe_view", "_reshape_alias", "new_empty", "new_empty_strided", "unfold", "diagonal",
               "split_with_sizes", "_pin_memory", "set_", "resize_", "view_as_real", "lift_fresh")  # fmt: skip
"""Operators that launch nothing."""


class Block:
    """Memory of one storage, until the last tensor on it and the last graph that writes it are freed."""

    def __init__(self, device: int, storage: torch.UntypedStorage) -> None:
        self.device, self.size = device, storage.nbytes()
        self._storage = storage  # a graph keeps its memory: no other tensor takes its address
        self.written: tuple[int, int, int] | None = None  # device, stream and place of the last write
        memory[device].take(self.size)

    def wrote(self, launched: tuple[int, int, int]) -> None:
        """An operator writes it; if it is captured, each replay writes it again."""
        self.written = launched
        for graph in capturing:
            graph.writes.append(self)

    def __del__(self) -> None:
        memory[self.device].give(self.size)


class Memory:
    """The counts of torch's allocator for one device, in bytes."""

    def __init__(self) -> None:
        self.current = self.peak = 0
        self.total = 16 * 2**30

    def take(self, size: int) -> None:
        """Allocate, or raise if memory runs out."""
        if self.current + size > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.current += size
        self.peak = max(self.peak, self.current)

    def give(self, size: int) -> None:
        """Free."""
        self.current -= size


memory: dict[int, Memory] = {index: Memory() for index in range(8)}
races: list[str] = []
"""Operators that read a tensor before another stream is known to have written it."""
launches: Counter[str] = Counter()
"""The number of launches of each operator."""
waits: list[str] = []
"""Calls that made the host wait for a device."""
generators: dict[int, torch.Tensor] = {}
"""States of the devices' random number generators."""
_blocks: "weakref.WeakValueDictionary[int, Block]" = weakref.WeakValueDictionary()
_arriving: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # tick, target and source


class CudaTensor(torch.Tensor):
    """Holds its values in a tensor of the CPU, `raw`, and its memory in `block`."""

    raw: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, raw: torch.Tensor, device: int, block: Block | None = None) -> "CudaTensor":
        storage = raw.untyped_storage()
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=f"cuda:{device}"
        )
        made.raw = raw
        known = block or _blocks.get(storage.data_ptr()) if storage.nbytes() else None
        if known is None or known.device != device:
            known = Block(device, storage)
            if storage.nbytes():
                _blocks[storage.data_ptr()] = known
        made.block = known
        return made

    def __init__(self, *args: Any) -> None: ...

    def __repr__(self) -> str:
        return f"CudaTensor({self.raw}, device='{self.device}')"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Its storage, in host memory."""
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        """Its values; the host waits for them."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Its values, if that is forced."""
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.detach().cpu().numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CudaTensor":
        copy: Any = self.detach().clone().requires_grad_(self.requires_grad)
        copy._is_param = getattr(self, "_is_param", False)
        copy.grad = None if self.grad is None else self.grad.clone()
        memo[id(self)] = copy
        return copy

    def data_ptr(self) -> int:
        """Its address in host memory."""
        return self.raw.data_ptr()

    def record_stream(self, stream: Any) -> None:
        """Does nothing: memory is not reused while a tensor lives."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, *args, **(kwargs or {}))


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the calling thread's current stream of the operands' device."""
    name = op._schema.name.partition("::")[2]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    operands = [t for t in given if isinstance(t, CudaTensor)]
    where = _device_of_result(name, operands, kwargs)
    _check_devices(op, name, given, operands)
    if name == "copy_" or name == "_to_copy":
        return _copied(op, name, args, kwargs, where)
    at = operands[0].device.index if operands else where
    stream: tuple[int, int, int] | None = None
    if name.rstrip("_") not in OF_THE_HOST and at is not None:
        stream = _launched(name, at, operands)
    own = {id(t.raw): t for t in operands}
    raws = tree_map(_raw, (args, kwargs))
    out = _with_generator(op, at, lambda: op(*raws[0], **raws[1]))
    if stream is not None:
        _replayed(lambda: op(*raws[0], **raws[1]), out)
    if name in WAITS and at is not None:
        wait(name, at)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or where is None:
            return value
        if id(value) in own:  # an in-place operator returns the same tensor
            made = own[id(value)]
        else:
            made = CudaTensor(value, where)
        if stream is not None:
            made.block.wrote(stream)
        return made

    if stream is not None and op._schema.is_mutable:
        for mutable, value in zip(op._schema.arguments, args, strict=False):
            if mutable.alias_info is not None and mutable.alias_info.is_write:
                for leaf in tree_leaves(value):
                    if isinstance(leaf, CudaTensor):
                        leaf.block.wrote(stream)
    return tree_map(wrapped, out)


def _replayed(compute: Callable[[], Any], out: Any) -> None:
    """A graph that is being captured computes this again in each replay, into the same memory."""

    def again() -> None:
        for old, new in zip(tree_leaves(out), tree_leaves(compute()), strict=True):
            if isinstance(old, torch.Tensor) and old is not new:
                old.copy_(new)

    for graph in capturing:
        graph.work.append(again)


def kernel(name: str, read: Sequence[CudaTensor], compute: Callable[[], torch.Tensor]) -> CudaTensor:
    """Launch a kernel that is not an operator of torch; `compute` returns its result on the host."""
    devices = {tensor.device.index for tensor in read}
    if len(devices) > 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    (device,) = devices
    with torch._C.DisableTorchFunction():  # it makes tensors of the host
        made = CudaTensor(compute().detach().clone(), device)
    made.block.wrote(_launched(name, device, list(read)))
    return made


def _device_of_result(name: str, operands: list[CudaTensor], kwargs: dict[str, Any]) -> int | None:
    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
        if device.type != "cuda":
            return None
        return library().fake_current_device() if device.index is None else device.index
    if name == "_local_scalar_dense" or not operands:
        return None
    return operands[0].device.index


def _check_devices(op: Any, name: str, given: list[torch.Tensor], operands: list[CudaTensor]) -> None:
    if name in ACROSS_DEVICES or name.startswith(("_foreach", "_fused", "_amp_foreach")) or not operands:
        return
    devices = {t.device for t in given if t.dim() or isinstance(t, CudaTensor)}
    if name.startswith(("index", "_index", "_unsafe_index")):  # an index may be on the host
        devices = {t.device for t in operands}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names}! (in {name})")


def _launched(name: str, device: int, reads: list[CudaTensor]) -> tuple[int, int, int]:
    lib = library()
    here = lib.fake_current_stream(device)
    for tensor in reads:
        written = tensor.block.written
        if written is not None and not lib.fake_ordered(device, here, *written):
            races.append(f"{name} on stream {here} of cuda:{device} reads what stream {written[1]} of "
                         f"cuda:{written[0]} writes")  # fmt: skip
    launches[name] += 1
    stream, place, _ = launch(device)
    arrive()
    return device, stream, place


def _copied(op: Any, name: str, args: Any, kwargs: Any, where: int | None) -> Any:
    """Copies between devices, and to and from the host."""
    into, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
    waits_not = kwargs.pop("non_blocking", False) or (name == "copy_" and len(args) > 2 and bool(args[2]))
    if isinstance(source, CudaTensor):
        at = source.device.index
        _launched(name, at, [source])
    elif where is not None:
        at = where
    else:
        at = into.device.index
    raw = source.raw if isinstance(source, CudaTensor) else source
    if name == "_to_copy":
        to_host = where is None and kwargs.get("device") is not None
        made = aten._to_copy.default(raw, **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")})
        if to_host:
            wait(name, at)
            return made
        result = CudaTensor(made, at if where is None else where)
        _replayed(lambda: raw, made)
    elif isinstance(into, CudaTensor):
        into.raw.copy_(raw)
        _replayed(lambda: raw, into.raw)
        result = into
    else:
        pinned = into.is_pinned()
        if not (waits_not and pinned):
            wait(name, at)
            into.copy_(raw)
            return into
        values = raw.to(into.dtype).clone()
        _fill_with_poison(into)
        _, place, done = launch(at)
        _arriving.append((done, into, values))
        return into
    other = result.device.index
    if other != at and isinstance(source, CudaTensor):  # torch makes each stream wait for the other
        _synchronize_streams(at, other)
    here, place, _ = launch(other)
    result.block.wrote((other, here, place))
    launches[name] += not isinstance(source, CudaTensor)
    return result


def _synchronize_streams(one: int, other: int) -> None:
    lib = library()
    event = lib.fake_new_event()
    lib.fake_record(event, one, lib.fake_current_stream(one))
    lib.fake_block(event, other, lib.fake_current_stream(other))
    lib.fake_free_event(event)


def _fill_with_poison(into: torch.Tensor) -> None:
    flat = into.view(-1) if into.is_contiguous() else into.contiguous().view(-1)
    flat.view(torch.uint8).fill_(0xFF)


capturing: list[Any] = []
"""Graphs that are being captured."""


def not_while_capturing() -> None:
    """Raise as CUDA does if the host queries a stream that is being captured."""
    if capturing:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def arrive() -> None:
    """Perform the copies to pinned memory that are due."""
    now = library().fake_now()
    for copy in [copy for copy in _arriving if copy[0] <= now]:
        _arriving.remove(copy)
        _, into, values = copy
        into.copy_(values)


def wait(what: str, device: int) -> None:
    """The host waits for this thread's current stream of a device."""
    not_while_capturing()
    waits.append(what)
    lib = library()
    lib.fake_synchronize(device, lib.fake_current_stream(device))
    arrive()


def _with_generator(op: Any, device: int | None, call: Callable[[], Any]) -> Any:
    if device is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return call()
    before = torch.get_rng_state()
    torch.set_rng_state(generators[device])
    try:
        return call()
    finally:
        generators[device] = torch.get_rng_state()
        torch.set_rng_state(before)


def _raw(value: Any) -> Any:
    if isinstance(value, CudaTensor):
        return value.raw
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value
