"""`watch` sees every step as it was, and changes nothing."""

import itertools
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

from amp_core import RunError, load_run
from amp_core.record import steps, watch
from amp_core.record.gradients import unwrapped
from tests.record.loops import small_model, train

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WAYS = {
    "plain": {},
    "accumulate-clip": {"accumulate": 3, "clip": 0.5},
    "fused": {"fused": True},
    "overflowing": {"init_scale": 2.0**40},
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_the_same_bit_for_bit(tmp_path, precision, way):
    plain = train(None, DTYPES[precision], **WAYS[way])
    watched = train(tmp_path / "run", DTYPES[precision], every=1, **WAYS[way])
    assert plain.losses == watched.losses
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_rows_tell_what_the_loop_did(tmp_path, precision, way):
    done = train(tmp_path / "run", DTYPES[precision], **WAYS[way])
    run = load_run(tmp_path / "run")
    steps = run.steps
    assert steps.step.tolist() == list(range(12))
    assert np.allclose(steps.loss, done.losses, rtol=1e-6)
    assert run.head.config["precision"] == precision
    assert run.status == "finished"
    micro = WAYS[way].get("accumulate", 1)
    assert (steps.samples == 16 * micro).all()
    assert (steps.lr == 1e-3).all()
    if precision == "fp16":
        assert steps.loss_scale.tolist() == done.scales
        halved = [b < a for a, b in itertools.pairwise(done.scales)]
        assert steps.skipped.tolist()[:-1] == halved
    else:
        assert (steps.loss_scale == 1).all() and not steps.skipped.any()
        assert run.table("steps").column("growth_tracker").null_count == 12
    if done.norms:
        assert np.allclose(steps.grad_norm, done.norms, rtol=1e-5), "the norm is the one before clipping"


def test_phases_add_up_to_the_step(tmp_path):
    train(tmp_path / "run", torch.float16, accumulate=2, clip=1.0)
    steps = load_run(tmp_path / "run").steps
    phases = steps[["data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"]]
    assert (phases > 0).all(axis=None)
    assert np.allclose(phases.sum(axis=1), steps.step_ms, rtol=1e-9)
    assert (steps.time_s.diff().dropna() * 1e3 >= 0).all()


def test_memory_of_a_cpu_run_is_the_resident_set(tmp_path):
    train(tmp_path / "run")
    steps = load_run(tmp_path / "run").steps
    assert (steps.memory_allocated_bytes > 10 * 2**20).all()
    assert (steps.memory_peak_bytes >= steps.memory_allocated_bytes).all()


@pytest.mark.parametrize("unscale", [True, False])
def test_gradients_are_measured_as_they_come_out_of_backward(tmp_path, unscale):
    """Scaled, before unscale_ and clipping touch them, with the scale by which they were multiplied."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(8, 24)).square().mean()
        scaler.scale(loss).backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters()}
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    rows = load_run(tmp_path / "run").tensors(kind="weight_grad").set_index("name")
    assert set(rows.index) == set(expected)
    for name, grad in expected.items():
        row = rows.loc[name]
        assert row[["zero", "subnormal", "normal", "inf", "nan"]].sum() == row.numel == grad.numel()
        assert row.loss_scale == 1024.0 and row["dtype"] == "float32"
        assert row.absmax == grad.abs().max().item()
        assert row.rms == pytest.approx(grad.double().square().mean().sqrt().item(), rel=1e-9)
        exponents = torch.frexp(grad[grad != 0]).exponent - 1
        assert row.exp_min == exponents.min().item()
        assert row.exp_counts.tolist() == torch.bincount((exponents - exponents.min()).long()).tolist()


def test_sampled_steps_are_every_nth(tmp_path):
    train(tmp_path / "run", every=5)
    assert sorted(load_run(tmp_path / "run").tensors().step.unique()) == [0, 5, 10]


def test_level_full_measures_every_kind(tmp_path):
    train(tmp_path / "run", torch.bfloat16, every=5, level="full")
    assert set(load_run(tmp_path / "run").tensors().kind) == {"weight_grad", "output_grad", "activation", "weight"}


def test_a_budget_stretches_the_interval_and_the_run_says_so(tmp_path):
    """A step of this model takes less than watching it: sampling becomes rare at once."""
    train(tmp_path / "run", torch.bfloat16, every=1, steps=40, budget=0.01)
    run = load_run(tmp_path / "run")
    changes = run.events[run.events.name == "sampling interval"]
    assert len(changes) and changes.detail.iloc[0].startswith("every 1 → every ")
    assert run.tensors().step.nunique() < 10 and len(run.steps) == 40
    assert run.head.config["budget"] == 0.01


def test_include_and_exclude_choose_tensors(tmp_path):
    train(tmp_path / "run", include=["*.weight"], exclude="3.*")
    assert set(load_run(tmp_path / "run").tensors().name) == {"0.weight", "2.weight", "5.weight"}


def test_a_skip_names_the_gradients_that_caused_it(tmp_path):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    rec = watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=100)
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.randn(8, 24)).square().mean()).backward()
        if step == 2:
            model[2].weight.grad[3, 4] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step != 2)
    rec.close()
    run = load_run(tmp_path / "run")
    assert run.steps.skipped.tolist() == [False, False, True, False]
    skips = run.events[run.events.kind == "skipped"]
    assert skips.step.tolist() == [2] and skips.name.tolist() == ["2.weight"]
    assert "1 of 8" in skips.detail.iloc[0]


def test_gradients_of_several_dtypes_keep_their_names(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        model[1].bias.grad[0] = float("nan")
        model[2].weight.grad[0] = float("inf")
        optimizer.step()
    run = load_run(tmp_path / "run")
    event = run.events[run.events.kind == "non-finite"].iloc[0]
    assert event["name"] == "2.weight" and event.detail == "2 of 6 gradients non-finite: 2.weight, 1.bias"


def test_two_optimizers_under_one_scaler(tmp_path):
    """A GAN's iteration: two attempts under one number, each with its own skip flag although update() adds them up."""
    torch.manual_seed(0)
    gen, dis = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleList([gen, dis])
    opt_d, opt_g = torch.optim.SGD(dis.parameters(), lr=0.1), torch.optim.SGD(gen.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    with watch(model, [opt_d, opt_g], scaler=scaler, into=tmp_path / "run", every=1):
        for step in range(5):
            opt_d.zero_grad()
            loss_d = dis(gen(torch.randn(3, 4)).detach()).square().mean()
            scaler.scale(loss_d).backward()
            scaler.step(opt_d)
            opt_g.zero_grad()
            loss_g = -dis(gen(torch.randn(3, 4))).mean()
            scaler.scale(loss_g).backward()
            if step == 3:
                gen.bias.grad[0] = float("inf")
            scaler.step(opt_g)
            scaler.update()
            losses += [loss_d.item(), loss_g.item()]
    steps = load_run(tmp_path / "run").steps
    assert steps.step.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert steps.optimizer.tolist() == [0, 1] * 5
    assert np.allclose(steps.loss, losses, rtol=1e-6)
    assert steps[steps.skipped][["step", "optimizer"]].values.tolist() == [[3, 1]]
    names = load_run(tmp_path / "run").tensors(steps=(0, 0))
    assert names[names.step == 0].name.tolist().count("1.weight") >= 1


def test_log_belongs_to_the_step_just_made_or_to_the_coming_one(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        for step in range(6):
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            if step % 2:
                rec.log(loss=float(step), samples=7, lr=0.5)
            optimizer.step()
            if not step % 2:
                rec.log(loss=torch.tensor(float(step)), samples=7, lr=0.5)
    steps = load_run(tmp_path / "run").steps
    assert steps.loss.tolist() == [0, 1, 2, 3, 4, 5]
    assert (steps.samples == 7).all() and (steps.lr == 0.5).all()


def test_a_loss_that_nobody_gave_is_null_and_a_nan_is_nan(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        for value in (None, float("nan")):
            model(torch.ones(2, 3)).backward(torch.ones(2, 1))  # from no single number
            optimizer.step()
            if value is not None:
                rec.log(loss=value)
    loss = load_run(tmp_path / "run").table("steps").column("loss")
    assert loss.null_count == 1 and loss[0].as_py() is None
    assert np.isnan(loss[1].as_py())


def test_without_a_scaler_the_loss_is_what_backward_starts_from(tmp_path):
    done = train(tmp_path / "run", torch.bfloat16, accumulate=3, log=False)
    assert np.allclose(load_run(tmp_path / "run").steps.loss, done.losses, rtol=1e-6)


def test_evaluation_between_steps_is_not_a_step(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(50, 3))
    steps = load_run(tmp_path / "run").steps
    assert len(steps) == 3 and (steps.samples == 2).all()


def test_nonfinite_gradients_without_a_scaler_are_an_event(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer, into=tmp_path / "run"):
        for step in range(3):
            model(torch.randn(2, 24)).sum().backward()
            if step == 2:
                model[0].bias.grad.fill_(float("inf"))
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    events = run.events[run.events.kind == "non-finite"]
    assert events.step.tolist() == [2] and events.name.tolist() == ["0.bias"]
    assert not run.steps.skipped.any()


def test_close_leaves_no_trace(tmp_path):
    hook, handler, inner = sys.excepthook, signal.getsignal(signal.SIGTERM), clip_grad._clip_grads_with_norm_
    done = train(tmp_path / "run", torch.float16, clip=1.0)
    model = done.model
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    assert repr(done.recorder).endswith("hooks=0)")
    assert sys.excepthook is hook
    assert signal.getsignal(signal.SIGTERM) is handler
    assert clip_grad._clip_grads_with_norm_ is inner


def test_close_restores_scaler_and_optimizer(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = dict(vars(scaler)), dict(vars(optimizer))
    rec = watch(model, optimizer, scaler=scaler, into=tmp_path / "run")
    assert "step" in vars(scaler)
    rec.close()
    rec.close()
    assert vars(scaler) == before[0]
    assert vars(optimizer).keys() == before[1].keys()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_somebody_elses_wrapper_on_the_scaler_survives(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    theirs = scaler.update
    scaler.update = lambda *a, **k: theirs(*a, **k)
    mine = scaler.update
    watch(model, optimizer, scaler=scaler, into=tmp_path / "run").close()
    assert scaler.update is mine


def test_an_exception_ends_the_run_as_failed_with_what_was_recorded(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ZeroDivisionError),
        watch(model, optimizer, into=tmp_path / "run") as rec,
    ):
        for step in range(5):
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            rec.log(loss=1 / (3 - step))
            optimizer.step()
    run = load_run(tmp_path / "run")
    assert run.status == "failed" and run.end_reason == "ZeroDivisionError: division by zero"
    assert len(run.steps) == 3
    assert not model._forward_hooks


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_watched_under_its_own_names(tmp_path, backend):
    compiled = lambda m: torch.compile(m, backend=backend)  # noqa: E731
    plain = train(None, torch.bfloat16, wrap=compiled)
    watched = train(tmp_path / "run", torch.bfloat16, wrap=compiled)
    assert plain.losses == watched.losses
    run = load_run(tmp_path / "run")
    assert set(run.tensors().name) == {n for n, _ in small_model().named_parameters()}
    assert run.steps.forward_ms.notna().all() and run.steps.backward_ms.notna().all()


def test_numbers_that_are_still_on_the_device_are_waited_for_only_at_the_end(tmp_path, monkeypatch):
    """As on CUDA: a copy under way does not hold the loop up, and close() brings every row in."""
    from amp_core.record.parcel import Parcel

    asked = []
    monkeypatch.setattr(Parcel, "ready", lambda self, wait=False: asked.append(wait) or wait)
    done = train(tmp_path / "run", torch.float16)
    assert asked.count(True) == 12 + 1 and False in asked  # the steps, and what notices ask of the start
    steps = load_run(tmp_path / "run").steps
    assert np.allclose(steps.loss, done.losses, rtol=1e-6)


def test_lbfgs_with_a_closure(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(2):
            optimizer.step(closure)
    assert load_run(tmp_path / "run").steps.step.tolist() == [0, 1]


def test_the_head_tells_settings_and_model(tmp_path):
    train(tmp_path / "run", torch.float16, growth_interval=7)
    head = load_run(tmp_path / "run").head
    assert head.config["scaler"] == {
        "enabled": True, "init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7,
    }  # fmt: skip
    assert head.config["autocast_dtype"] == "float16" and head.config["device"] == "cpu"
    assert head.model["class"] == "Sequential"
    assert head.model["parameters"] == sum(p.numel() for p in small_model().parameters())
    assert head.environment["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every": 0}, "every=0 is not a whole number from 1"),
        ({"every": 2.5}, "every=2.5 is not a whole number from 1"),
        ({"kinds": ("gradients",)}, "kinds='gradients' cannot be recorded; choose from weight_grad"),
        ({"level": "fullest"}, "level='fullest' is unknown; choose one of standard, full"),
        ({"budget": 3}, "budget=3 is not a share between 0 and 1"),
        ({"profile": (3, 3)}, "profile=(3, 3) is no window of steps; profile=(50, 53) profiles steps 50, 51 and 52"),
        ({"profile": 50}, "profile=50 is no window of steps"),
        ({"trace_ops": -2}, "trace_ops=-2 is not the number of a step"),
        ({"model": "net"}, "model=str is not a torch.nn.Module"),
        ({"optimizer": []}, "optimizer=[] names none"),
        ({"optimizer": [3]}, "optimizer=int is not a torch.optim.Optimizer"),
        ({"scaler": 65536}, "scaler=int is not a GradScaler"),
    ],
)
def test_bad_arguments_are_one_sentence_and_leave_nothing(tmp_path, arguments, sentence):
    model = small_model()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "into": tmp_path / "run"}
    given |= arguments
    with pytest.raises(RunError) as caught:
        watch(given.pop("model"), given.pop("optimizer"), **given)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused_and_kept(tmp_path):
    train(tmp_path / "run", steps=2)
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(RunError, match="already holds a run"):
        train(tmp_path / "run", steps=2)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert clip_grad._clip_grads_with_norm_.__name__ == "_clip_grads_with_norm_"


def test_log_refuses_what_it_does_not_know(tmp_path):
    model = small_model()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run") as rec:
        with pytest.raises(RunError, match="perplexity=3 cannot be logged; choose from loss, lr, samples, grad_norm"):
            rec.log(perplexity=3)
        with pytest.raises(RunError, match="loss is a tensor of shape"):
            rec.log(loss=torch.ones(3))


def test_unwrapped_finds_the_users_module():
    model = small_model()
    assert unwrapped(torch.compile(nn.DataParallel(model), backend="eager")) is model


def test_an_optimizer_that_never_steps_is_told(tmp_path):
    model = small_model()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run"):
        for _ in range(steps.MANY):
            model(torch.randn(4, 24)).square().mean().backward()
            other.step()
            other.zero_grad()
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 0 and steps.NO_STEP in run.events["detail"].tolist()
