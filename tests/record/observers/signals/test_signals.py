"""The signals for findings: what they report, and that they change neither the training nor torch."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler

from amp_core import Run, load_run
from amp_core.record import watch
from amp_core.record.observers.signals import nonfinite_outputs, risky_ops
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.module_calls import listeners
from tests.conftest import patched_in_torch
from tests.findings.zoo.case import Net, batches, fp16
from tests.findings.zoo.numbers import Loud, Poisoned


def events(folder: Path, kind: str):
    rows = load_run(folder).events
    return rows[rows["kind"] == kind].reset_index(drop=True)


def test_the_order_of_calls_is_recorded_when_it_changes(tmp_path):
    loop = fp16(tmp_path / "run")
    with loop.watched():
        for i, (x, y) in enumerate(batches(6)):
            loop.backward(loop.loss(x, y))
            loop.scaler.unscale_(loop.optimizer)
            if i >= 4:
                nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            loop.step()
    rows = events(tmp_path / "run", "calls")
    assert rows["step"].tolist() == [0, 1, 4]
    assert rows["name"].tolist() == [
        "scale backward unscale_ scaler.step update",
        "zero_grad scale backward unscale_ scaler.step update",
        "zero_grad scale backward unscale_ clip scaler.step update",
    ]


def test_torch_is_restored_once_the_run_is_closed(tmp_path):
    places = [
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (lr_scheduler.LRScheduler, "step"),
        (lr_scheduler.ReduceLROnPlateau, "step"),
        (clip_grad, "_group_tensors_by_device_and_dtype"),
    ]
    before = [vars(owner)[name] for owner, name in places]
    loop = fp16(tmp_path / "run", Net(Poisoned(1.0)))
    untouched = dict(vars(loop.optimizer)), dict(vars(loop.scaler))
    loop.run()
    assert [vars(owner)[name] for owner, name in places] == before
    assert vars(loop.optimizer).keys() == untouched[0].keys()
    assert {k for k, v in vars(loop.scaler).items() if callable(v)} == {
        k for k, v in untouched[1].items() if callable(v)
    }
    for module in loop.model.modules():
        assert not listeners(module) and not module._forward_hooks


@pytest.mark.parametrize("level", ["standard", "full"])
def test_training_is_the_same_bit_for_bit(tmp_path, level):
    weights = []
    for watched in (False, True):
        loop = fp16(tmp_path / "run", Net(Poisoned(1.0)))
        if watched:
            loop.options = {"level": level}
            loop.run()
        else:
            for x, y in batches(loop.steps):
                loop.backward(loop.loss(x, y))
                loop.step()
        weights.append([t.clone() for t in loop.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_first_non_finite_output_is_named_in_its_own_step(tmp_path):
    loop = fp16(tmp_path / "run", Net(Loud(1.0)), dtype=torch.bfloat16)
    with loop.watched():
        for i, (x, y) in enumerate(batches(9)):
            if i == 7:  # neither a sampled step nor the step after one
                with torch.no_grad():
                    loop.model.middle.up.bias[3] = float("inf")
            loop.backward(loop.loss(x, y))
            loop.step()
    first = events(tmp_path / "run", "non-finite output").iloc[0]
    assert (first["step"], first["name"], first["op"], first["detail"]) == (7, "middle.up", "Linear", "weights")
    assert first["dtype"] == "bfloat16" and first["count"] >= 3


def test_of_a_large_model_the_module_is_named_in_the_step_after(tmp_path):
    """Between samples only the model itself has a hook, until something is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Scaled() for _ in range(4 * nonfinite_outputs.MAX_ALL)])
    hooked, found = large(model, tmp_path / "run", lambda step: setattr(model[101], "factor", 1e30 if step > 11 else 1))
    assert hooked[11] == 0 and hooked[13] == len(model)
    assert found.index[0] == 13 and (found.name[13], found.detail[13]) == ("101", "")


def test_of_a_large_model_bad_weights_are_named_at_once(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[Scaled() for _ in range(4 * nonfinite_outputs.MAX_ALL)])

    def spoil(step):
        if step == 12:
            with torch.no_grad():
                model[101].bias[0] = float("inf")

    _, found = large(model, tmp_path / "run", spoil)
    assert (found.name[12], found.detail[12]) == (found.name[13], found.detail[13]) == ("101", "weights")


def test_of_a_large_model_what_fails_in_one_step_alone_is_reported_for_the_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[Scaled() for _ in range(4 * nonfinite_outputs.MAX_ALL)])
    _, found = large(model, tmp_path / "run", lambda s: setattr(model[101], "factor", 1e30 if s == 12 else 1))
    assert list(found.index) == [12] and (found.name[12], found.op[12], found.detail[12]) == ("", "Sequential", "")


class Scaled(nn.Linear):
    """A layer whose output is multiplied by a number, which may overflow."""

    def __init__(self):
        super().__init__(2, 2)
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)
        self.factor = 1

    def forward(self, x):
        return super().forward(x) * self.factor * (1e30 if self.factor > 1 else 1)


def large(model, into, before_step):
    """14 steps that change no weight: how many modules had a hook in each, and the events by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hooked = []
    with watch(model, optimizer, into=into):
        for step in range(14):
            before_step(step)
            model(torch.ones(1, 2)).sum().backward()
            hooked.append(sum(bool(listeners(m)) for m in model))
            optimizer.zero_grad()
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
    return hooked, events(into, "non-finite output").set_index("step")


def test_modules_of_a_large_model_have_hooks_in_turns():
    chosen = [nonfinite_outputs._some_of(1001, turn) for turn in range(67)]
    assert all(len(some) <= nonfinite_outputs.MAX_SPREAD + 1 and 0 in some for some in chosen)
    assert frozenset().union(*chosen) == frozenset(range(1001))
    assert nonfinite_outputs._some_of(20, 3) == frozenset(range(20))


def test_input_range_of_the_module_that_overflows(tmp_path):
    fp16(tmp_path / "run", Net(Loud(1e6)), steps=2).run()
    first = events(tmp_path / "run", "non-finite output").iloc[0]
    assert first["name"] == "middle.up" and first["limit"] == 65504.0 and 0 < first["value"] < 100


def test_the_head_has_the_settings_at_the_start(tmp_path):
    torch.manual_seed(0)
    model = Net(nn.BatchNorm1d(32))
    model.first.half()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    with watch(model, optimizer, into=tmp_path / "run"):
        loss = model.head(model.norm(model.middle(torch.randn(4, 32)))).sum()
        loss.backward()
        with torch.no_grad():
            model.zero_grad()
        model.forward = lambda x: model.head(x)
        model(torch.randn(2, 32)).sum().backward()
        optimizer.step()
    run: Run = load_run(tmp_path / "run")
    assert run.head.model["dtypes"] == {"first.weight": "float16", "first.bias": "float16"}
    assert run.head.model["eps"]["middle"] == 1e-5
    (settings,) = run.head.config["optimizer_settings"]
    assert settings["eps"] == 1e-8 and settings["dtypes"] == ["float16", "float32"]
    assert run.head.config["resumed"] == {"optimizer": False, "scaler": None}
    assert run.head.model["weight_absmax"]["value"] > 0


class Inside(Net):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return super().forward(x)


def test_autocast_inside_forward_is_detected_too(tmp_path):
    fp16(tmp_path / "run", Inside(), dtype=None, steps=2).run()
    config = load_run(tmp_path / "run").head.config
    assert (config["autocast_dtype"], config["precision"]) == ("float16", "fp16-unscaled")


def test_autocast_is_detected_in_loops_that_call_only_submodules(tmp_path):
    parts = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 8)})
    loop = fp16(tmp_path / "run", parts, scaler=None)
    with loop.watched():
        for x, y in batches(3):
            with loop.autocast():
                loss = F.cross_entropy(parts["b"](parts["a"](x)), y)
            loss.backward()
            loop.step()
    config = load_run(tmp_path / "run").head.config
    assert (config["autocast_dtype"], config["precision"]) == ("float16", "fp16-unscaled")


def test_an_observer_that_fails_is_dropped_and_training_continues(tmp_path, monkeypatch):
    from amp_core.record.observers.signals.call_order import CallOrder

    monkeypatch.setattr(CallOrder, "called", lambda *_: 1 / 0)
    fp16(tmp_path / "run", steps=4).run()
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and len(run.steps) == 4
    assert run.events["detail"].str.contains("CallOrder stopped").any()


def test_a_listener_that_fails_is_dropped_and_torch_restored():
    called = []

    def fail(args, kwargs):
        called.append(args)
        raise ZeroDivisionError

    patched_functions.grad.listen(fail)
    x = torch.ones(1, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="no longer listens to grad"):
        torch.autograd.grad(x.exp(), x)
    torch.autograd.grad(x.exp(), x)
    assert len(called) == 1 and patched_in_torch() == []


def test_an_observer_that_fails_in_its_last_step_of_work_restores_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(risky_ops._OpChecker, "write", lambda _: 1 / 0)
    fp16(tmp_path / "run", steps=2).run()
    assert load_run(tmp_path / "run").events["detail"].str.contains("FirstOperators stopped").any()
    assert patched_in_torch() == []


@pytest.mark.filterwarnings("ignore:Initializing zero-element", "error:AMPscope")
def test_matrix_products_without_elements_do_not_count_as_fp32_work(tmp_path):
    loop = fp16(tmp_path / "run", nn.Sequential(nn.Linear(32, 0), nn.Linear(0, 8)), scaler=None)
    with loop.watched():
        for x, y in batches(2):
            with torch.autocast("cpu", enabled=False):
                loss = F.cross_entropy(loop.model(x), y)
            loss.backward()
            loop.step()
    assert not events(tmp_path / "run", "wide product").size
    assert not load_run(tmp_path / "run").events["name"].eq("not recorded").any()


def test_two_recorders_share_the_patched_functions(tmp_path):
    first, second = fp16(tmp_path / "a"), fp16(tmp_path / "b")
    with first.watched():
        with second.watched():
            for x, y in batches(2):
                second.backward(second.loss(x, y))
                second.step()
        for x, y in batches(2):
            first.backward(F.cross_entropy(first.model(x), y))
            first.step()
    assert "backward" in events(tmp_path / "b", "calls")["name"].iloc[0]
    assert not hasattr(torch.autograd.backward, "__wrapped__")


@pytest.mark.parametrize("variance", [60000.0, float("nan"), float("inf")])
def test_large_float16_statistics_count_as_finite_unless_a_value_is_not(tmp_path, variance):
    """The sum of their squares overflows float16. Their names are the user's, also inside wrappers."""
    norm = nn.BatchNorm1d(8)
    norm.running_mean, norm.running_var = norm.running_mean.half(), norm.running_var.half()
    model = nn.Sequential(nn.Linear(4, 8), checkpoint_wrapper(norm), nn.Linear(8, 2))
    norm.eval()
    norm.running_var.fill_(60000.0)
    norm.running_var[3] = variance
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(2):
            model[0](torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert events(tmp_path / "run", "statistics")["name"].tolist() == (["1.running_var"] if variance != 60000 else [])
    assert load_run(tmp_path / "run").head.model["buffer_dtypes"].keys() == {"1.running_mean", "1.running_var"}


class Powers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4) + 0.5)

    def forward(self, x):
        return (x.abs() + 0.5).pow(self.weight).sum()


def train_powers(into: Path) -> None:
    model = Powers().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=into):
        for _ in range(3):
            model(torch.randn(4, 4, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_an_exponent_may_be_a_tensor(tmp_path):
    train_powers(tmp_path / "run")
    assert events(tmp_path / "run", "warning").empty


def test_operators_of_the_model_do_not_count_in_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(risky_ops, "MAX_OPERATORS", 400)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        total = torch.zeros((), dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(70):
                total += model(torch.ones(4, 8)).mean().to(torch.bfloat16)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert events(tmp_path / "run", "narrow sum")["name"].tolist() == ["the loop"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_pictures_of_bytes_and_masks_do_not_end_the_inspection_of_operators(tmp_path, dtype):
    model = torch.nn.Linear(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(2):
            x = torch.randint(0, 255, (32, 64)).to(dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x.to(torch.bfloat16) / 255).float().square().mean()
            loss.backward()
            optimizer.step()
    assert events(tmp_path / "run", "warning").empty


def test_an_inspection_of_operators_that_fails_does_not_reach_the_training(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("an operator that nobody thought of")

    monkeypatch.setattr(risky_ops.NarrowOps, "check", fail)
    train_powers(tmp_path / "run")
    assert len(load_run(tmp_path / "run").steps) == 3
    details = events(tmp_path / "run", "warning")["detail"].tolist()
    assert len(details) == 2, "one of the first step, one of what the loop does between steps"
    assert all("an operator that nobody thought of" in detail for detail in details)
