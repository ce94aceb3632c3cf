"""Compiled parts of a loop other than its model: watching leaves them compiled, and records as much as possible."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.loop.unrecorded import NO_FORWARD
from amp_core.record.torch_internals.compiling import untraced, within_compiled

STEPS = 6


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """Like `torch.compile`, but only with dynamo; counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, function, **options):
        def counted(graph, inputs):
            self.graphs += 1
            return graph.forward

        return torch.compile(function, backend=counted, **options)


class Loop:
    def __init__(self, scaled=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None

    def loss(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.scaler is not None):
            return F.mse_loss(self.model(x).float(), y)

    def clip(self, most=0.1):
        nn.utils.clip_grad_norm_(self.model.parameters(), most)


def compiled_step_method(loop, compiled):
    step = compiled(loop.optimizer.step)
    return lambda x, y: eager(loop, x, y, step=step)


def compiled_function_that_steps(loop, compiled):
    step = compiled(lambda: loop.optimizer.step())
    return lambda x, y: eager(loop, x, y, step=step)


def compiled_clipping(loop, compiled):
    clip = compiled(loop.clip)
    return lambda x, y: eager(loop, x, y, clip=clip)


def compiled_loss(loop, compiled, **options):
    loss = compiled(loop.loss, **options)
    return lambda x, y: eager(loop, x, y, loss=loss)


def compiled_loss_in_one_graph(loop, compiled):
    return compiled_loss(loop, compiled, fullgraph=True)


def compiled_whole_step(loop, compiled):
    def step(x, y):
        loss = loop.loss(x, y)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    return compiled(step)


def compiled_whole_step_with_scaler(loop, compiled):
    def step(x, y):
        loss = loop.loss(x, y)
        loop.scaler.scale(loss).backward()
        loop.scaler.unscale_(loop.optimizer)
        loop.clip()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad()
        return loss

    return compiled(step)


def eager(loop, x, y, loss=None, clip=None, step=None):
    value = (loss or loop.loss)(x, y)
    value.backward()
    if clip:
        clip()
    (step or loop.optimizer.step)()
    loop.optimizer.zero_grad()
    return value


def train(program, into=None):
    """The losses, the number of graphs, and the run in `into`."""
    loop, compiled = Loop(scaled="scaler" in program.__name__), Compiled()
    recorder = watch(loop.model, loop.optimizer, scaler=loop.scaler, into=into, every=2) if into is not None else None
    step = program(loop, compiled)
    random = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 16, generator=random)
        losses.append(step(x, x[:, :1]).item())
    if recorder is not None:
        recorder.close()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return losses, compiled.graphs


PROGRAMS = {
    compiled_step_method: True,
    compiled_function_that_steps: True,
    compiled_clipping: True,
    compiled_loss: False,
    compiled_loss_in_one_graph: False,
    compiled_whole_step: False,
    compiled_whole_step_with_scaler: True,
}
"""And whether the loss is seen: what is computed and differentiated within compiled code goes by unseen."""


@pytest.mark.parametrize(("program", "sees_loss"), PROGRAMS.items(), ids=lambda p: getattr(p, "__name__", None))
def test_compiled_parts_stay_compiled_and_steps_are_recorded(program, sees_loss, tmp_path):
    unwatched, graphs = train(program)
    torch._dynamo.reset()
    watched, graphs_watched = train(program, tmp_path / "run")
    assert watched == unwatched
    # Clipping runs as Python, so it has no graph: in a graph, gradients would be measured after they are clipped.
    clips = program in (compiled_clipping, compiled_whole_step_with_scaler)
    assert graphs > 0 and graphs_watched >= graphs - clips
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and run.steps["step"].tolist() == list(range(STEPS))
    if sees_loss:
        assert run.steps["loss"].tolist() == pytest.approx(unwatched, rel=1e-6)
    assert len(run.tensors(kind="weight_grad")) == 4 * STEPS // 2
    assert run.steps["grad_norm"].gt(0).all()
    inside = program in (compiled_loss, compiled_loss_in_one_graph, compiled_whole_step)
    assert warnings_of(run) == ([NO_FORWARD] if inside or program is compiled_whole_step_with_scaler else [])


def warnings_of(run):
    return run.events.loc[run.events["kind"] == "warning", "detail"].tolist()


def test_gradients_are_measured_before_compiled_clipping(tmp_path):
    train(compiled_clipping, tmp_path / "run")
    assert load_run(tmp_path / "run").steps["grad_norm"].max() > 0.11


def test_our_code_is_not_traced_but_called_between_two_graphs():
    called = []

    @untraced
    def inspect_value(value):
        called.append((within_compiled(), type(value)))
        return math.pi

    def program(x):
        return (x + 1) * inspect_value(x)

    compiled = Compiled()
    double = compiled(program)
    assert double(torch.ones(2)).tolist() == pytest.approx([2 * math.pi] * 2)
    assert called == [(True, torch.Tensor)] and compiled.graphs == 2
    assert inspect_value(0) == math.pi and called[-1] == (False, int) and not within_compiled()


def test_our_code_is_omitted_if_a_graph_may_not_break():
    called = []
    inspect_value = untraced(called.append)

    def program(x):
        inspect_value(x)
        return x + 1

    compiled = Compiled()
    assert compiled(program, fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert called == [] and compiled.graphs == 1


def test_under_torch_func_modules_have_no_hooks_and_steps_are_detected(tmp_path):
    """Per-sample gradients, as for differential privacy."""
    losses = {}
    for into in (None, tmp_path / "run"):
        loop = Loop()
        recorder = watch(loop.model, loop.optimizer, into=into, every=2) if into is not None else None

        def loss_of(parameters, x, y, model=loop.model):
            return F.mse_loss(torch.func.functional_call(model, parameters, (x[None],)), y[None])

        of_samples = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0, 0))
        random = torch.Generator().manual_seed(1)
        losses[into] = []
        for _ in range(STEPS):
            x = torch.randn(8, 16, generator=random)
            parameters = {name: p.detach() for name, p in loop.model.named_parameters()}
            grads, values = of_samples(parameters, x, x[:, :1])
            for name, parameter in loop.model.named_parameters():
                parameter.grad = grads[name].mean(0)
            loop.optimizer.step()
            losses[into].append(values.mean().item())
        if recorder is not None:
            recorder.close()
    assert losses[None] == losses[tmp_path / "run"]
    run = load_run(tmp_path / "run")
    assert len(run.steps) == STEPS and len(run.tensors(kind="weight_grad")) == 4 * STEPS // 2
    no_loss, no_forward = warnings_of(run)
    assert no_loss.startswith("loss: none") and "rec.log(loss=loss)" in no_loss and no_forward == NO_FORWARD


def test_a_copy_of_a_watched_model_compiles_too(tmp_path):
    loop, compiled = Loop(), Compiled()
    with watch(loop.model, loop.optimizer, into=tmp_path / "run"):
        smooth = compiled(copy.deepcopy(loop.model))
        assert smooth(torch.ones(1, 16)).shape == (1, 1)  # versions of torch before about 2.9 make no graph of it


def test_a_model_compiled_after_watch_is_reported(tmp_path):
    loop = Loop()
    with watch(loop.model, loop.optimizer, into=tmp_path / "run", every=2):
        loop.model = Compiled()(loop.model)
        for _ in range(8):
            x = torch.randn(8, 16)
            eager(loop, x, x[:, :1])
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 8 and warnings_of(run) == [NO_FORWARD]
