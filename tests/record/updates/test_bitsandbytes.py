"""Steps of bitsandbytes' optimizers, whose CPU kernels run from version 0.49 on, against the step in float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.updates import bitsandbytes_steps
from tests.record.updates.test_ledger import backward

STEPS = 3
OPTIMIZERS = {
    "AdamW8bit": {"weight_decay": 0.1},
    "Adam8bit": {},
    "PagedAdamW8bit": {},
    "AdamW": {},
    "Lion8bit": {"weight_decay": 0.1},
    "SGD8bit": {"momentum": 0.9, "weight_decay": 0.01},
    "RMSprop8bit": {},
    "Adagrad8bit": {},
}


def network() -> torch.nn.Sequential:
    """Matrices of 8,192 elements have 8-bit states, biases FP32 ones."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


def in_float64(optimizer: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight after the coming step, by the formulas of the optimizers' papers."""
    group, held = optimizer.param_groups[0], optimizer.state.get(weight, {})
    w, g, lr, decay = weight.detach().double(), weight.grad.double(), group["lr"], group["weight_decay"]
    first, second = (*group.get("betas", ()), 0.0)[:2]
    step = held.get("step", 0) + 1

    def state(number: int) -> torch.Tensor:
        if f"state{number}" not in held:
            return torch.zeros_like(w)
        if held[f"state{number}"].dtype is not torch.uint8:
            return held[f"state{number}"].double()
        from bitsandbytes.functional import dequantize_blockwise

        given = {"absmax": held[f"absmax{number}"], "code": held[f"qmap{number}"], "blocksize": 256}
        return dequantize_blockwise(held[f"state{number}"], **given).double()

    kind = optimizer.optimizer_name
    if kind == "adam":
        m, v = first * state(1) + (1 - first) * g, second * state(2) + (1 - second) * g * g
        return w * (1 - lr * decay) - lr * (m / (1 - first**step)) / ((v / (1 - second**step)).sqrt() + group["eps"])
    if kind == "lion":
        return w * (1 - lr * decay) - lr * (first * state(1) + (1 - first) * g).sign()
    g = g + decay * w
    if kind == "momentum":
        return w - lr * (g if step == 1 else first * state(1) + g)
    v = first * state(1) + (1 - first) * g * g if kind == "rmsprop" else state(1) + g * g
    return w - lr * g / (v.sqrt() + group["eps"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lost_shares_are_those_of_the_step_in_float64(name: str, tmp_path: Path) -> None:
    optimizers = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    model = network()
    optimizer = getattr(optimizers, name)(model.parameters(), lr=1e-4, **OPTIMIZERS[name])
    right = {}
    with watch(model, optimizer, into=tmp_path / "run", every=1, updates=True):
        for seed in range(STEPS):
            backward(model, seed)
            before = {n: (p.detach().double(), in_float64(optimizer, p)) for n, p in model.named_parameters()}
            optimizer.step()
            for n, p in model.named_parameters():
                held, exact = before[n]
                lost = (p.detach().double() - exact).abs().sum() / (exact - held).abs().sum()
                right[seed, n] = min(1.0, lost.item())
            optimizer.zero_grad()
    rows = load_run(tmp_path / "run").updates.set_index(["step", "name"])["lost_mass_frac"]
    assert rows.to_dict() == pytest.approx(right, abs=1e-3)


def stand_in(**args: Any) -> torch.optim.Optimizer:
    """An optimizer with bitsandbytes' attributes and an 8-bit state of two blocks."""
    kind = type("AdamW8bit", (torch.optim.Optimizer,), {"__module__": "bitsandbytes.optim.adamw"})
    weight = torch.nn.Parameter(torch.zeros(2, 256))
    optimizer: Any = kind([weight], {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})
    optimizer.optimizer_name, optimizer.args = "adam", SimpleNamespace(**args)
    table = torch.linspace(-1, 1, 256)
    held = {"qmap1": table, "qmap2": table, "absmax1": torch.tensor([1.0, 10.0]), "absmax2": torch.tensor([2.0, 20.0])}
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    optimizer.state[weight] = {"step": 3, "state1": codes, "state2": codes} | held
    return optimizer  # type: ignore[no-any-return]


def test_states_are_dequantized_by_block() -> None:
    optimizer = stand_in()
    state = bitsandbytes_steps.state_of(optimizer, optimizer.param_groups[0]["params"][0])
    table = torch.linspace(-1, 1, 256)
    assert torch.equal(state["exp_avg"], torch.stack([table, 10 * table]))
    assert torch.equal(state["exp_avg_sq"], torch.stack([2 * table, 20 * table]))
    assert state["step"] == 3


@pytest.mark.parametrize("args", [{"max_unorm": 1.0}, {"skip_zeros": True}, {"percentile_clipping": 5}])
def test_settings_that_torch_lacks_are_not_repeated(args: dict[str, Any]) -> None:
    assert bitsandbytes_steps.is_known(stand_in())
    assert not bitsandbytes_steps.is_known(stand_in(**args))
