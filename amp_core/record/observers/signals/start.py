"""Facts at the start of a run that findings need: dtypes, eps values, the origin of the weights, resuming.

They go into the head of the run: `model` gains `dtypes` (parameters that train and are not FP32), `frozen_dtypes`,
`buffer_dtypes`, `eps` (of modules), `bfloat16_exact_frac` (share of nonzero FP32 weights that BF16 holds exactly) and
`weight_absmax`; `config` gains `optimizer_settings` and `resumed`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from amp_core.record.environment import model_summary
from amp_core.record.model import own
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import (
    has_values,
    local_values,
    named_buffers,
    named_modules,
    named_parameters,
    optimizer_tensors,
    unwrapped,
)
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.stats.norms import largest
from amp_core.record.torch_internals.compiling import emulates_casts
from amp_core.store.writer import RunWriter

EPS_NAMES = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
"""Attribute names of the constant that keeps a module from dividing by zero."""
MAX_ELEMENTS = 4096
"""Elements of a weight that are inspected to determine its origin."""
MAX_TENSORS = 32
MAX_NAMED = 10_000
MAX_WITHOUT = 16
"""Parameters without an optimizer that are named."""


class StartFacts(Observer):
    """Collects them once: before the first forward, or after it if lazy modules get their parameters in it."""

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any,
    ) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._optimizers = list(optimizers)
        self._scaler = scaler
        self._given = dict(named_parameters(self._model))
        self._transfer: HostTransfer | None = None
        self._names: list[str] = []
        self._keys: dict[str, list[str]] = {"absmax": [], "exact": []}  # in the transfer, one for each device
        self._step = 0
        self._done = False

    def step_began(self, step: int) -> None:
        self.awake = not self._done or self._transfer is not None
        self._step = step
        if not self._done and not self._has_lazy():
            self._collect()

    def forward_ended(self, output: Any) -> None:
        """Lazy modules have their parameters now."""
        if not self._done and not self._has_lazy():
            self._collect()

    def called(self, what: str, optimizer: int | None) -> None:
        if not self._done and what in ("unscale_", "scaler.step", "optimizer.step"):  # some modules were never called
            self._collect()

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters. Within `torch.func.functional_call` the model holds other tensors in their place."""
        for name, parameter in named_parameters(self._model):
            swapped = not issubclass(type(parameter), torch.nn.Parameter) and not hasattr(parameter, "_is_param")
            yield name, self._given.get(name, parameter) if swapped else parameter

    def _has_lazy(self) -> bool:
        return any(is_lazy(p) for p in own.parameters(self._model))

    def _collect(self) -> None:
        self._done = True
        if "lazy" in self._writer.head.model:
            known = {k: v for k, v in self._writer.head.model.items() if k != "lazy"}
            self._writer.update_head(model=known | model_summary(self._model))
        head = self._writer.head
        names = {id(p): n for n, p in self._parameters()}
        config = {
            "optimizer_settings": [_settings(o, names, alone=len(self._optimizers) == 1) for o in self._optimizers],
            "resumed": _resumed(self._optimizers, self._scaler),
            "without_optimizer": self._without_optimizer(),
        }
        facts = _model_facts(self._model, self._parameters())
        self._writer.update_head(model=dict(head.model) | facts, config=dict(head.config) | config)
        if self._writer.earlier is not None:
            self._write_resumed(self._step)
        self._send()

    def _without_optimizer(self) -> list[str]:
        """The first parameters that require a gradient and are in no optimizer."""
        held = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
        return [n for n, p in self._parameters() if p.requires_grad and id(p) not in held][:MAX_WITHOUT]

    def scaler_found(self, scaler: Any) -> None:
        self._scaler = scaler
        if self._done:
            config = dict(self._writer.head.config)
            before = config["resumed"]["optimizer"]  # by now it may have stepped itself
            self._writer.update_head(config=config | {"resumed": _resumed((), scaler) | {"optimizer": before}})

    def _write_resumed(self, step: int) -> None:
        steps = max((steps_made(o) for o in self._optimizers), default=0)
        if not any(_has_stepped(o) for o in self._optimizers):
            detail = "the optimizer has no state of earlier steps: was a checkpoint loaded before the first step?"
        elif not steps:
            detail = f"the run holds {step} steps, the optimizer does not count its own"
        else:
            detail = f"the run holds {step} steps, the optimizer has made {steps}"
        self._writer.event("resumed", detail=detail, step=step, value=float(steps) if steps else None)

    def step_ended(self, step: int) -> None:
        if self._transfer is not None and self._transfer.ready():
            self._write()

    def close(self) -> None:
        if self._transfer is not None and self._transfer.ready(wait=True):
            self._write()
        emulates = emulates_casts()
        if emulates is not None:
            self._writer.update_head(config=dict(self._writer.head.config) | {"inductor_emulates_casts": emulates})

    def _send(self) -> None:
        floating = ((n, p) for n, p in self._parameters() if p.is_floating_point() and has_values(p))
        weights = [(n, local_values(p)) for n, p in floating]
        weights = [(n, w) for n, w in weights if w.numel() and w.element_size() > 1]  # FP8 has no arithmetic
        if not weights:
            return
        self._transfer = HostTransfer()
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, weight in weights:
            by_device.setdefault(weight.device, []).append((name, weight))
        self._names = [name for named in by_device.values() for name, _ in named]
        for named in by_device.values():  # a few launches for all of a device, not some for each
            self._put("absmax", largest([weight for _, weight in named]))
        wide = [w for _, w in weights if w.dtype == torch.float32 and w.dim() > 1][:MAX_TENSORS]
        for device in dict.fromkeys(w.device for w in wide):
            self._put("exact", _exact([w for w in wide if w.device == device]))
        self._transfer.send()

    def _put(self, what: str, values: torch.Tensor) -> None:
        """Values of one more device."""
        assert self._transfer is not None
        self._keys[what].append(f"{what}:{len(self._keys[what])}")
        self._transfer.put(self._keys[what][-1], values)

    def _write(self) -> None:
        assert self._transfer is not None
        sizes = self._transfer.joined(self._keys["absmax"])
        place = int(sizes.argmax())
        facts: dict[str, Any] = {"weight_absmax": {"name": self._names[place], "value": float(sizes[place])}}
        if self._keys["exact"]:
            exact, nonzero = self._transfer.joined(self._keys["exact"]).reshape(-1, 2).sum(0)
            facts["bfloat16_exact_frac"] = float(exact / nonzero) if nonzero else None
        self._transfer = None
        self._writer.update_head(model=dict(self._writer.head.model) | facts)


def _exact(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """How many of the first nonzero values of each are exact in BF16 (their last 16 bits are 0), and their number.

    Powers of two are left out: constants such as ones do not indicate the origin of a weight.
    """
    bits = torch.cat([weight.detach().reshape(-1)[:MAX_ELEMENTS] for weight in weights]).view(torch.int32)
    informative = (bits & 0x007FFFFF) != 0
    return torch.stack([(informative & ((bits & 0xFFFF) == 0)).sum(), informative.sum()])


def _model_facts(model: torch.nn.Module, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    train: dict[str, str] = {}
    frozen: dict[str, str] = {}
    for name, parameter in parameters:
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            (train if parameter.requires_grad else frozen)[name] = dtype_name(parameter.dtype)
    buffers = {n: dtype_name(b.dtype) for n, b in named_buffers(model) if b.dtype in NARROW}
    eps = {}
    for name, module in named_modules(model):
        value = next((v for n in EPS_NAMES if isinstance(v := vars(module).get(n), float)), None)
        if value is not None:
            eps[name] = value
    return {
        "dtypes": _few(train),
        "frozen_dtypes": _few(frozen),
        "buffer_dtypes": _few(buffers),
        "eps": _few(eps),
    }


def _few(by_name: dict[str, Any]) -> dict[str, Any]:
    return dict(list(by_name.items())[:MAX_NAMED])


def _settings(optimizer: torch.optim.Optimizer, names: dict[int, str], *, alone: bool) -> dict[str, Any]:
    """`alone`: there is no other optimizer, so it need not be told whose parameters are in which."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    states = {
        dtype_name(value.dtype) for value in optimizer_tensors([optimizer]) if value.is_floating_point() and value.dim()
    }
    return {
        "class": type(optimizer).__name__,
        "module": type(optimizer).__module__.partition(".")[0],
        "eps": next((g["eps"] for g in optimizer.param_groups if isinstance(g.get("eps"), float)), None),
        "fused": bool(optimizer.param_groups[0].get("fused")),
        "parameters": len(given),
        "outside_model": sum(id(p) not in names for p in given),
        "dtypes": sorted({dtype_name(p.dtype) for p in given if p.requires_grad}),
        "first": {dtype_name(p.dtype): names.get(id(p), "") for p in reversed(given) if p.requires_grad},
        "state_dtypes": sorted(states),
        **({} if alone else {"names": [names[id(p)] for p in given if id(p) in names][:MAX_NAMED]}),
    }


def _resumed(optimizers: Iterable[torch.optim.Optimizer], scaler: Any) -> dict[str, Any]:
    """Whether the optimizer has state of earlier steps, and whether the scaler does.

    The growth tracker of a scaler that was never used or loaded is 0; `load_state_dict` sets it.
    """
    optimizer = any(_has_stepped(o) for o in optimizers)
    if not scaling.is_active(scaler):
        return {"optimizer": optimizer, "scaler": None}
    used = scaler._scale is not None  # used before watching began
    loaded = bool(getattr(scaler, "_init_growth_tracker", 0))
    return {"optimizer": optimizer, "scaler": used or loaded, "first_scale": None if used else scaler._init_scale}


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """The steps that an optimizer counts in its state; 0 if it does not count them, as plain SGD."""
    counts = (state.get("step") for state in optimizer.state.values() if isinstance(state, dict))
    return max((int(float(count)) for count in counts if count is not None), default=0)


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    for state in optimizer.state.values():
        if not isinstance(state, dict):
            continue
        step = state.get("step")
        if step is not None:
            return float(step) > 0
        momentum = state.get("momentum_buffer")
        if isinstance(momentum, torch.Tensor):
            return bool(momentum.any())  # momentum starts at zero
    return False
