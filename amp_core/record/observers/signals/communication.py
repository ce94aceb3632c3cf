"""What happens to gradients between processes and in optimizer states: dtypes of reduction, accumulation and moments.

`Communication` writes `communication` into `config`: what FSDP's policy or DDP's hook says, as
`{"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "output_dtype": None, "hook": "", "unsynced": False}`, and the
16-bit dtype in which the program's own code was seen to reduce gradients, `reduced`, and by which collective.
`SecondMoments` writes an event for each optimizer whose second moments have 16 bits.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import has_values, local_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.reductions import Reductions
from amp_core.record.ranks import communication_hook
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

FIRST_STEPS = 3
"""Steps in which it is observed whether FSDP reduces after each backward and what the program reduces itself, and after
which moments are inspected."""
MAX_TENSORS, MAX_ELEMENTS = 32, 4096
"""Second moments of an optimizer that are inspected, and elements of each."""
MIN_FIRST_MOMENT = 1e-15
"""Its square, times 1 - beta2, is in the range of float32's normal numbers."""
DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


class Communication(Observer):
    """Reads the settings from the objects when the first step begins."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        self._model = model
        self._states: list[Any] = []  # of FSDP2's modules
        self._facts: dict[str, Any] = {}
        self._reductions = Reductions(model, self._on_reduce)

    def step_began(self, step: int) -> None:
        if not self._facts:
            self._states = [s for m in own.modules(self._model) if (s := _fsdp2_state(m)) is not None]
            self._facts = _settings(self._model, self._states)
            if any(self._facts.values()):
                self._write()
        reduces = self._reductions.possible or (bool(self._states) and not self._facts["unsynced"])
        self.awake = step < FIRST_STEPS and reduces

    def backward_began(self) -> None:
        self._reductions.listen()
        groups = [g for state in self._states if (g := getattr(state, "_fsdp_param_group", None)) is not None]
        if any(getattr(group, "reduce_grads", True) is False for group in groups):
            self._facts["unsynced"] = True
            self._write()

    def step_ended(self, step: int) -> None:
        if step >= FIRST_STEPS - 1:
            self._reductions.close()

    def close(self) -> None:
        self._reductions.close()

    def _on_reduce(self, tensor: torch.Tensor, call: str) -> None:
        if tensor.dtype in NARROW:
            self._facts |= {"reduced": dtype_name(tensor.dtype), "reduced_by": call}
            self._reductions.close()
            self._write()

    def _write(self) -> None:
        self._writer.update_head(config=dict(self._writer.head.config) | {"communication": dict(self._facts)})


def _fsdp2_state(module: torch.nn.Module) -> Any:
    read: Any = getattr(type(module), "_get_fsdp_state", None)
    return read(module) if read is not None else None


def _settings(model: torch.nn.Module, states: Sequence[Any]) -> dict[str, Any]:
    """The settings of the outermost module that has some, but `reduce_dtype` of the first that reduces in 16 bits; None
    and empty where there are none."""
    # FSDP1 keeps its settings on the module.
    policies = [s._mp_policy for s in states] or [own.held(m, "mixed_precision") for m in own.modules(model)]
    facts: dict[str, Any] = {}
    for field in DTYPES:
        given = [dtype for p in policies if isinstance(dtype := getattr(p, field, None), torch.dtype)]
        narrow = [dtype for dtype in given if dtype in NARROW and field == "reduce_dtype"]
        facts[field] = dtype_name((narrow or given)[0]) if given else None
    main = (own.held(p, "main_grad") for p in own.parameters(unwrapped(model)))
    narrow_main = next((g.dtype for g in main if isinstance(g, torch.Tensor) and g.dtype in NARROW), None)
    return facts | {
        "hook": communication_hook(model) or "",
        "main_grad": dtype_name(narrow_main) if narrow_main is not None else None,
        "unsynced": False,
    }


class SecondMoments(Observer):
    """Reports once, after the first steps, optimizers whose second moments are stored in 16 bits."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._optimizers = optimizers
        self._sent: list[tuple[int, str, torch.dtype, float | None, HostTransfer]] = []

    def step_ended(self, step: int) -> None:
        if step == FIRST_STEPS - 1:
            for index, optimizer in enumerate(self._optimizers):
                self._inspect(index, optimizer)
        if step >= FIRST_STEPS - 1:
            self._write(wait=False)
            self.awake = bool(self._sent)

    def close(self) -> None:
        self._write(wait=True)

    def _inspect(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        second_moments: list[tuple[torch.Tensor, torch.Tensor, Any, dict[str, Any]]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not isinstance(state, dict) or len(second_moments) >= MAX_TENSORS:
                    continue
                second = second_moment(state)
                if second is not None and second.dtype in NARROW and has_values(second):
                    second_moments.append((parameter, local_values(second), state.get("exp_avg"), group))
        if not second_moments:
            return
        parameter, second, _, group = second_moments[0]
        betas = group.get("betas")
        decay = betas[1] if isinstance(betas, tuple | list) and len(betas) > 1 else group.get("alpha")
        transfer = HostTransfer()
        counts = [vanished(v, m) for _, v, m, _ in second_moments]
        transfer.put("counts", torch.stack([count.to(counts[0].device) for count in counts]))
        transfer.send()
        limit = 1.0 - decay if isinstance(decay, float) else None
        self._sent.append((index, self._names.get(id(parameter), ""), second.dtype, limit, transfer))

    def _write(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][-1].ready(wait):
            index, name, dtype, limit, transfer = self._sent.pop(0)
            vanished, known = transfer.values("counts").reshape(-1, 2).sum(axis=0)
            share = float(vanished / known) if known else 0.0
            more: dict[str, Any] = {"value": share, "limit": limit, "optimizer": index, "dtype": dtype_name(dtype)}
            self._writer.event("second moments", name, step=FIRST_STEPS - 1, **more)


def second_moment(state: dict[str, Any]) -> torch.Tensor | None:
    """The second moment in an optimizer's state of one parameter, as torch and others call it."""
    keys = (key for key in state if isinstance(key, str) and ("sq" in key or key in ("v", "nu")))
    values = (state[key] for key in keys)
    return next((v for v in values if isinstance(v, torch.Tensor) and v.dim() and v.is_floating_point()), None)


def vanished(second: torch.Tensor, first: Any) -> torch.Tensor:
    """How many second moments are zero beside a first moment that is not, and how many such first moments there are:
    two integers. First moments whose squares underflow float32 too are left out."""
    v = second.detach().reshape(-1)[:MAX_ELEMENTS]
    m = local_values(first).detach().reshape(-1)[:MAX_ELEMENTS] if isinstance(first, torch.Tensor) else v
    known = m.abs() > MIN_FIRST_MOMENT
    return torch.stack([((v == 0) & known).sum(), known.sum()]) if len(m) == len(v) else v.new_zeros(2).long()
