"""What happens to gradients between processes: dtypes of reduction and accumulation.

`Communication` writes `communication` into `config`: what FSDP's policy or DDP's hook says, as
`{"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "output_dtype": None, "hook": "", "unsynced": False}`, and the
16-bit dtype in which the program's own code was seen to reduce gradients, `reduced`, and by which collective.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.reductions import Reductions
from amp_core.record.ranks import communication_hook
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

FIRST_STEPS = 3
"""Steps in which it is observed whether FSDP reduces after each backward and what the program reduces itself."""
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
