"""bitsandbytes' optimizers, as optimizers of torch with the same step: their own writes through an object they hold.

    >>> is_known(bitsandbytes.optim.AdamW8bit(model.parameters()))
    True
    >>> state_of(optimizer, weight)          # dequantized, under torch's names
    {'step': tensor(3.), 'exp_avg': tensor(…), 'exp_avg_sq': tensor(…)}

States in 8 bits are indices into a table of 256 values (`qmap1`), times the largest magnitude of their block of 256
(`absmax1`): bitsandbytes/functional.py, `dequantize_blockwise`. All steps are computed in FP32 and rounded once.
"""

from collections.abc import Iterable
from typing import Any

import torch

BLOCK = 256
_STATES = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "momentum": ("momentum_buffer",),
    "rmsprop": ("square_avg",),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
}
"""Names that torch gives to `state1` and `state2`, by `optimizer_name`. LAMB, LARS and AdEMAMix are not among them."""


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, decoupled weight decay (Chen et al., 2023, algorithm 2); torch has none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        """One step; the gradients are there."""
        for group in self.param_groups:
            first, second = group["betas"][:2]
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.add_((momentum * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is an optimizer of bitsandbytes whose step torch has too, with the same settings for all weights."""
    if type(optimizer).__module__.partition(".")[0] != "bitsandbytes":
        return False
    settings, overridden = getattr(optimizer, "args", None), getattr(optimizer, "mng", None)
    plain = not getattr(settings, "max_unorm", 0.0) and not getattr(settings, "skip_zeros", False)
    percentile = getattr(settings, "percentile_clipping", 100)  # of versions before 0.49
    alike = not getattr(overridden, "index2config", None)
    return plain and percentile >= 100 and alike and getattr(optimizer, "optimizer_name", "") in _STATES


def state_of(optimizer: Any, parameter: torch.Tensor) -> dict[str, Any]:
    """The state of one parameter, dequantized, as torch's optimizer has it; empty before the first step."""
    held = optimizer.state.get(parameter, {})
    if "state1" not in held:
        empty = optimizer.optimizer_name == "adagrad"  # torch's has its state from the start
        return (
            {"step": torch.zeros((), device="cpu"), "sum": torch.zeros_like(parameter, dtype=torch.float32)}
            if empty
            else {}
        )
    names = _STATES[optimizer.optimizer_name]
    states = {name: _dequantized(held, number) for number, name in enumerate(names, start=1)}
    return {"step": torch.tensor(float(held["step"]), device="cpu")} | states


def torch_optimizer(optimizer: Any, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's optimizer with the same step, for `groups` of the same settings."""
    kind = optimizer.optimizer_name
    made = [_group(kind, group) for group in groups if group["params"]]
    if kind == "lion":
        return Lion(made, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    kinds: dict[str, Any] = {
        "adam": torch.optim.AdamW,
        "momentum": torch.optim.SGD,
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
    }
    stepped: torch.optim.Optimizer = kinds[kind](made)
    return stepped


def _group(kind: str, group: dict[str, Any]) -> dict[str, Any]:
    made = {name: group[name] for name in ("params", "weight_decay")} | {"lr": float(group["lr"])}
    if kind in ("adam", "lion"):
        made["betas"] = tuple(group["betas"][:2])
    elif kind == "momentum":
        made["momentum"] = group["betas"][0]
    elif kind == "rmsprop":
        made["alpha"] = group["betas"][0]
    return made | ({"eps": group["eps"]} if kind in ("adam", "rmsprop", "adagrad") else {})


def _dequantized(held: dict[str, Any], number: int) -> torch.Tensor:
    state: torch.Tensor = held[f"state{number}"]
    if state.dtype is not torch.uint8:
        return state
    values = held[f"qmap{number}"][state.reshape(-1).long()]
    scales = held[f"absmax{number}"].repeat_interleave(BLOCK)[: values.numel()]
    dequantized: torch.Tensor = (values * scales).reshape(state.shape)
    return dequantized
