"""Tracing the operators of one step does not change the training, and leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from amp_core import load_run, watch
from amp_core.analysis import precision_map
from amp_core.record.op_trace import op_counter
from amp_core.record.op_trace.call_sites import Modules
from amp_core.record.op_trace.op_counter import OpCounterMode
from amp_core.record.torch_internals.module_calls import listeners
from tests.record import loops
from tests.record.traced import DTYPES, MODELS, Model, calls, loops_model, traced, train


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_the_losses_are_the_same_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    run = traced(MODELS[name], tmp_path / "run", DTYPES[dtype])
    assert train(MODELS[name], None, DTYPES[dtype]) == train(MODELS[name], tmp_path / "again", DTYPES[dtype])
    assert len(run.ops) > 20 and set(run.ops["step"]) == {2}
    assert run.events.query("name == 'not recorded'").empty
    assert run.events.query("kind == 'traced'")["step"].tolist() == [2]


@pytest.mark.parametrize("name", ["gpt-lstm", "convolutions"])
def test_nothing_is_left_behind(name: str, tmp_path: Path) -> None:
    changed = [(autocast, "__exit__"), (torch, "set_autocast_enabled")]
    before, enter = [getattr(owner, name) for owner, name in changed], autocast.__enter__
    states = []

    def collect_state(model: nn.Module, step: int) -> None:
        hooked = [listener for m in model.modules() for listener in listeners(m)]
        ours = [listener for listener in hooked if isinstance(getattr(listener, "__self__", None), Modules)]
        wrapped = [getattr(owner, name) is not was for (owner, name), was in zip(changed, before, strict=True)]
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, OpCounterMode)]
        states.append((len(ours) == 2 * len(list(model.modules())), bool(ours), all(wrapped), any(wrapped), len(modes)))

    train(MODELS[name], tmp_path / "run", torch.bfloat16, between=collect_state, steps=5)
    untouched = (False, False, False, False, 0)
    assert states == [untouched, untouched, (True, True, True, True, 1), untouched, untouched]
    assert [getattr(owner, name) for owner, name in changed] == before and autocast.__enter__ is enter


def test_a_loop_that_fails_within_the_step_leaves_nothing_behind_either(tmp_path: Path) -> None:
    enter = autocast.__enter__

    def fail(model: nn.Module, step: int) -> None:
        if step == 2:
            raise ValueError("the loader broke")

    model = loops.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="broke"), watch(model, optimizer, into=tmp_path / "run", trace_ops=2):
        for step in range(4):
            loss = model(torch.randn(2, 24)).sum()
            fail(model, step)
            loss.backward()
            optimizer.step()
    assert not _get_current_dispatch_mode_stack() and autocast.__enter__ is enter
    assert not any(listeners(m) or m._forward_hooks for m in model.modules())
    run = load_run(tmp_path / "run")
    assert calls(run, op="aten::addmm") == 3 and "so only part of it is recorded" in run.events["detail"].str.cat()


def test_a_compiled_model_is_left_alone_and_the_run_reports_that(tmp_path: Path) -> None:
    run = traced(lambda: torch.compile(loops_model(), backend="eager"), tmp_path / "run")
    assert run.ops.empty
    assert "operators: the model runs as a compiled graph" in run.events["detail"].str.cat(sep="\n")


def test_a_compiled_loss_stays_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(into: Path | None) -> tuple[list[float], int]:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        loss = torch.compile(lambda out: out.float().exp().sum(), backend=counter)
        monkeypatch.setattr(F, "cross_entropy", lambda out, _: loss(out))
        return train(loops_model, into, torch.bfloat16), counter.frame_count

    assert run(tmp_path / "run") == run(None) and run(None)[1] == 1
    traced_run = load_run(tmp_path / "run")
    if hasattr(TorchDispatchMode, "ignore_compile_internals"):
        assert calls(traced_run, op="aten::addmm") == 1
    else:
        assert traced_run.ops.empty and "what the program compiled" in traced_run.events["detail"].str.cat()
    torch._dynamo.reset()


@torch.library.custom_op("ampscope_tests::prod", mutates_args=())
def custom_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A custom operator in Python: the operators it calls run under autocast, below autograd."""
    return (x @ weight).float()


custom_product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].flatten(0, -2).t() @ grad.flatten(0, -2)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Custom(nn.Module):
    """Operators that call other operators: a custom one, and one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.pair, self.fc = nn.Parameter(torch.randn(8, 8)), nn.Bilinear(8, 8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = custom_product(x, self.weight)
        return self.fc(self.pair(x, x))


@pytest.mark.parametrize("trace_ops", [None, 0, 1, 2])
def test_operators_called_by_operators_still_run_under_autocast(trace_ops: int | None, tmp_path: Path) -> None:
    alone = train(Custom, None, torch.bfloat16)
    assert train(Custom, tmp_path / "run", torch.bfloat16, trace_ops=trace_ops) == alone
    if trace_ops:
        run = load_run(tmp_path / "run")
        (policy,) = run.ops.query("op == 'ampscope_tests::prod'")["policy"]
        assert policy == "none" and precision_map(run).stayed.empty


def test_nothing_is_traced_while_another_dispatch_mode_is_active(tmp_path: Path) -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Other():
        run = traced(loops_model, tmp_path / "run")
    assert run.ops.empty and "another TorchDispatchMode" in run.events["detail"].str.cat()


def test_a_dispatch_mode_entered_within_the_step_stays_active(tmp_path: Path) -> None:
    counters = []

    def count(model: nn.Module, step: int) -> None:
        if step == 2:
            counters.append(FlopCounterMode(display=False))
            counters[0].__enter__()
        elif step == 3:
            assert _get_current_dispatch_mode_stack()[-1] is not None
            counters[0].__exit__(None, None, None)

    run = traced(loops_model, tmp_path / "run", between=count, steps=5)
    assert not _get_current_dispatch_mode_stack()
    assert counters[0].get_total_flops() > 0 and calls(run, op="aten::addmm") == 1


def test_an_error_while_counting_does_not_reach_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(op_counter, "call_site", broken)
    losses = train(Model, tmp_path / "run", torch.bfloat16)
    monkeypatch.undo()
    assert losses == train(Model, None, torch.bfloat16)
    assert "counting stopped after 0 operators: KeyError" in load_run(tmp_path / "run").events["detail"].str.cat()
