"""An audit measures what a recipe loses, and leaves no trace in the training."""

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import RunError, diagnose, load_run
from amp_core.record import watch
from amp_core.record.audit import COLUMNS, compare_gradients


class Noisy(nn.Module):
    """Has dropout, BatchNorm and an autocast region: all that an audit could disturb."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.Dropout(0.3),
            nn.Linear(12, 3),
        )

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = self.drop(self.norm(self.first(x)))
        return self.last(hidden.float())


def train(into, dtype, audit_at=(), scales=None, steps=6):
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)
    losses = []
    with watch(model, optimizer, scaler=scaler, into=into, every=2) as rec:
        for step in range(steps):
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

            def loss_of(x=x, y=y):
                return nn.functional.cross_entropy(model(x), y)

            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of()
            scaler.scale(loss).backward()
            if step in audit_at:
                rec.audit(loss_of, loss_scales=scales)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return losses, state


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_is_the_same_bit_for_bit_with_audits(tmp_path, dtype):
    plain, before = train(tmp_path / "plain", dtype)
    audited, after = train(tmp_path / "audited", dtype, audit_at=range(6), scales=(1.0, 1024.0))
    assert plain == audited
    assert all(torch.equal(before[k], after[k]) for k in before)
    one, two = load_run(tmp_path / "plain"), load_run(tmp_path / "audited")
    assert one.steps.loss.tolist() == two.steps.loss.tolist()
    assert one.tensors().numel.tolist() == two.tensors().numel.tolist(), (
        "the passes of an audit do not count for the run"
    )


def test_rows_per_tensor_and_scale(tmp_path):
    train(tmp_path / "run", torch.float16, audit_at=(3,), scales=(2.0**-24, 64.0))
    audits = load_run(tmp_path / "run").audits
    assert audits.step.unique().tolist() == [3]
    assert sorted(audits.loss_scale.unique()) == [2.0**-24, 64.0]
    assert audits.precision.unique().tolist() == ["fp16"]
    names = {n for n, _ in Noisy().named_parameters()}
    assert set(audits.name) == names and len(audits) == 2 * len(names)
    good, poor = audits[audits.loss_scale == 64.0], audits[audits.loss_scale == 2.0**-24]
    weights = good[good.name.str.startswith("last")]
    assert (weights.lost == 0).all() and (weights.cosine > 0.999).all()
    first = poor[poor.name == "first.weight"].iloc[0]
    assert first.lost == first.nonzero and first.lost_mass_frac == pytest.approx(1.0), (
        "values far below 2^-24 are all flushed"
    )


def test_the_current_loss_scale_is_the_default(tmp_path):
    train(tmp_path / "run", torch.float16, audit_at=(0,))
    assert load_run(tmp_path / "run").audits.loss_scale.unique().tolist() == [64.0]


def test_fp32_against_itself_loses_nothing(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        model(x).square().sum().backward()
        rec.audit(lambda: model(x).square().sum())
        optimizer.step()
    audits = load_run(tmp_path / "run").audits
    assert (audits.rel_error == 0).all() and (audits.lost == 0).all()
    assert np.allclose(audits.cosine, 1)


def test_pure_fp16_weights_are_replayed_in_fp32_and_restored(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(5, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        model(x.half()).float().square().sum().backward()
        before = model.weight.data_ptr()
        rec.audit(lambda: model(x.to(model.weight.dtype)).float().square().sum())
        assert model.weight.dtype == torch.float16 and model.weight.data_ptr() == before
        optimizer.step()
    audits = load_run(tmp_path / "run").audits
    assert (audits.rel_error > 0).all() and (audits.rel_error < 0.01).all()


CASTS = {
    "to the dtype of the weights": lambda model, x: x.to(model[0].weight.dtype),
    "to a dtype by name": lambda model, x: x.to(torch.bfloat16),
    "by a method": lambda model, x: x.bfloat16(),
    "as the weights": lambda model, x: x.type_as(model[0].weight),
}


def test_a_closure_that_casts_its_input_to_16_bits_is_replayed_in_fp32(tmp_path):
    rows = {}
    for number, (how, cast) in enumerate(CASTS.items()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).bfloat16()
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        given = cast(model, x)

        def loss_of(model=model, x=x, y=y, cast=cast):
            return nn.functional.cross_entropy(model(cast(model, x)).float(), y)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, into=tmp_path / str(number), every=1) as rec:
            loss_of().backward()
            rec.audit(loss_of, forward=True)
            rec.audit(lambda model=model, x=given, y=y: nn.functional.cross_entropy(model(x).float(), y))
            optimizer.step()
        assert given.dtype is torch.bfloat16
        rows[how] = load_run(tmp_path / str(number)).audits[["name", "rel_error"]]
    first, *others = rows.values()
    assert (first["rel_error"] > 0).all() and len(first) == 12
    assert all(first.equals(other) for other in others)


def test_a_closure_that_cannot_run_in_fp32_is_told_so_in_one_sentence(tmp_path):
    model = nn.Linear(6, 3).bfloat16()
    x = torch.randn(8, 6)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        model(x.bfloat16()).sum().backward()
        with pytest.raises(RunError, match="closure cannot run in FP32, as it mixes dtypes"):
            rec.audit(lambda: model(x.double()).sum())
        optimizer.step()


def test_an_audit_between_forward_and_backward_does_not_break_backward(tmp_path):
    """Autograd refuses buffers that were written in between, so BatchNorm's are restored with their version
    counters."""
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        loss = model(x).square().mean()
        before = model.norm.running_mean.clone()
        rec.audit(lambda: model(x).square().mean())
        assert torch.equal(model.norm.running_mean, before)
        loss.backward()
        optimizer.step()
    assert len(load_run(tmp_path / "run").audits) == len(list(model.parameters()))


PER_OPERATOR = hasattr(torch.backends.cudnn, "conv")  # from torch 2.9 on
FLAGS = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul] if PER_OPERATOR else []
FLAGS += [torch.backends.cudnn.conv, torch.backends.cudnn.rnn] if PER_OPERATOR else []


def readable():
    """The older switches, each None where PyTorch refuses to read it because a newer one disagrees."""
    found = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    ):
        try:
            found.append(read())
        except RuntimeError:
            found.append(None)
    return found


@pytest.mark.skipif(not PER_OPERATOR, reason="torch before 2.9 has the older flags alone")
@pytest.mark.parametrize("set_by", ["nobody", "older flags", "newer flags", "matmul precision", "one of each"])
def test_tf32_is_off_in_fp32_and_every_flag_is_put_back(tmp_path, set_by):
    originally = [f.fp32_precision for f in FLAGS]
    older = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    precision = torch.get_float32_matmul_precision()
    try:
        if set_by == "older flags":
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
        elif set_by == "newer flags":
            for flag in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
                flag.fp32_precision = "tf32"
        elif set_by == "matmul precision":
            torch.set_float32_matmul_precision("medium")
        elif set_by == "one of each":
            torch.set_float32_matmul_precision("high")
            torch.backends.cuda.matmul.fp32_precision = "ieee"
        before = [f.fp32_precision for f in FLAGS], readable()
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inside = []

        def loss():
            inside.append({f.fp32_precision for f in FLAGS})
            return model(torch.ones(1, 5)).sum()

        with watch(model, optimizer, into=tmp_path / "run") as rec:
            loss().backward()
            rec.audit(loss)
            optimizer.step()
        assert inside[1] == {"ieee"}, "first call: the loop's own; second: FP32; third: the recipe"
        assert ([f.fp32_precision for f in FLAGS], readable()) == before
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = older
        for flag, value in zip(FLAGS, originally, strict=True):
            flag.fp32_precision = value


def test_a_precision_other_than_the_runs_can_be_audited(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        model(x).square().sum().backward()
        for precision in ("fp16", "bf16"):
            rec.audit(lambda: model(x).float().square().sum(), precision=precision)
        with pytest.raises(RunError, match="precision='fp8' cannot be audited; choose one of fp16, bf16"):
            rec.audit(lambda: model(x).sum(), precision="fp8")
        optimizer.step()
    audits = load_run(tmp_path / "run").audits.groupby("precision")["rel_error"].max()
    assert 0 < audits["fp16"] < audits["bf16"] < 0.02


def test_counts_and_fractions_agree_with_closed_forms():
    g = torch.tensor([0.0, 1.0, -2.0, 4.0, 8.0])
    r = torch.tensor([0.0, 0.0, -4.0, 8.0, float("inf")])
    row = dict(zip(COLUMNS, compare_gradients(g, r, 2.0).tolist(), strict=True))
    assert (row["numel"], row["nonzero"], row["lost"], row["nonfinite"]) == (5, 4, 1, 1)
    assert row["lost_mass_frac"] == pytest.approx(1 / 15)
    assert np.isnan(row["cosine"])
    exact = dict(zip(COLUMNS, compare_gradients(g, 2 * g, 2.0).tolist(), strict=True))
    assert exact["rel_error"] == 0 and exact["cosine"] == pytest.approx(1)


def test_invalid_arguments_raise_one_sentence(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 3)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        with pytest.raises(RunError, match="before the model's first forward"):
            rec.audit(lambda: model(x).sum())
        model(x).sum().backward()
        with pytest.raises(RunError, match=r"closure returned a tensor of shape \(2, 1\)"):
            rec.audit(lambda: model(x))
        optimizer.step()
    assert len(load_run(tmp_path / "run").steps) == 1


@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan")])
def test_error_and_cosine_are_nan_for_a_non_finite_gradient(broken):
    g = torch.tensor([1.0, -2.0, 3.0])
    row = dict(zip(COLUMNS, compare_gradients(g, torch.tensor([2.0, broken, 6.0]), 2.0).tolist(), strict=True))
    assert np.isnan(row["rel_error"]) and np.isnan(row["cosine"])
    assert (row["nonfinite"], row["lost"], row["numel"]) == (1, 0, 3)


def test_a_forward_audit_measures_each_modules_output_in_the_order_of_the_forward(tmp_path):
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    with watch(model, optimizer, into=tmp_path / "a") as rec:
        model(x).sum().backward()
        rec.audit(lambda: model(x).square().sum(), forward=True)
        state = torch.get_rng_state()
        with torch.random.fork_rng(), torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            first = nn.functional.linear(x, model.first.weight, model.first.bias).double()
        exact = nn.functional.linear(x.double(), model.first.weight.double(), model.first.bias.double())
        assert torch.equal(state, torch.get_rng_state())
        optimizer.step()
    run = load_run(tmp_path / "a")
    rows = run.forward_audits
    assert rows["name"].tolist() == ["first", "norm", "drop", "last"]
    expected = ((first - exact).norm() / exact.norm()).item()
    assert rows["rel_error"].iloc[0] == pytest.approx(expected, rel=1e-2) and expected > 1e-5
    assert set(run.audits["name"]) == {name for name, _ in model.named_parameters()}
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("how", ["wrapped", "in place", "by the loss"])
def test_the_layers_of_a_compiled_model_are_audited_in_eager_mode_and_nothing_is_compiled_again(how, tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Noisy()
    called = torch.compile(model, backend="aot_eager") if how == "wrapped" else model
    if how == "in place":
        model.compile(backend="aot_eager")

    def loss_of(x):
        return called(x).square().mean()

    compute = torch.compile(loss_of, backend="aot_eager") if how == "by the loss" else loss_of
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    with watch(called, optimizer, into=tmp_path / "a") as rec:
        for _ in range(2):
            compute(x).backward()
            optimizer.step()
        if how == "by the loss":
            with pytest.raises(RunError, match="give precision='fp16' or 'bf16'"):
                rec.audit(lambda: compute(x))
        rec.audit(lambda: compute(x), precision="fp16")  # compiles the pass in FP32
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        rec.audit(lambda: compute(x), precision="fp16", forward=True)
        compute(x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    run = load_run(tmp_path / "a")
    assert run.forward_audits["name"].tolist() == ["first", "norm", "drop", "last"]
    assert run.events.loc[run.events["kind"] == "audited", "detail"].str.contains("eager mode").all()
    torch._dynamo.reset()


class UnitLength(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-8)


@pytest.mark.parametrize("audited", [False, True])
def test_operators_in_compiled_code_are_inspected_by_a_forward_audit(audited, tmp_path):
    """Without one, the run says that they were not inspected."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), UnitLength(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)

    def loss():
        with torch.autocast("cpu", dtype=torch.float16):
            return compiled(x).square().mean().float()

    with watch(compiled, optimizer, into=tmp_path / "a") as rec:
        for _ in range(2):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        if audited:
            rec.audit(loss, forward=True)
    findings = {f.code: f for f in diagnose(load_run(tmp_path / "a"))}
    assert ("eps-rounds-to-zero" in findings) == audited
    if audited:
        assert findings["eps-rounds-to-zero"].where == "1" and "recording-incomplete" not in findings
    else:
        gap = findings["recording-incomplete"]
        assert gap.severity == "info" and "operators within compiled graphs" in gap.title
    torch._dynamo.reset()


def test_compiled_code_is_compared_with_eager_mode_layer_by_layer(tmp_path):
    """The compiler here computes one layer wrongly."""
    torch._dynamo.reset()

    def wrong(graph, inputs):
        norm = next(node for node in graph.graph.nodes if "batch_norm" in str(node.target))
        with graph.graph.inserting_after(norm):
            scaled = graph.graph.call_function(torch.mul, (norm, 1.01))
        norm.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        scaled.meta = dict(norm.meta)
        graph.recompile()
        return graph.forward

    torch.manual_seed(0)
    model = Noisy()
    compiled = torch.compile(model, backend=wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    with watch(compiled, optimizer, into=tmp_path / "a") as rec:
        for _ in range(2):
            compiled(x).square().mean().backward()
            optimizer.step()
        rec.audit(lambda: compiled(x).square().mean(), compiled=True)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        compiled(x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # those of the program are still there
    with watch(model, optimizer, into=tmp_path / "b") as rec:
        model(x).square().mean().backward()
        with pytest.raises(RunError, match="ran none that torch names"):
            rec.audit(lambda: model(x).square().mean(), compiled=True)
    rows = load_run(tmp_path / "a").compiled_audits.set_index("name")["rel_error"]
    assert list(rows.index) == ["first", "norm", "drop", "last"]
    assert rows["first"] == 0.0 and rows["norm"] == pytest.approx(0.01, rel=0.05) and rows["last"] > 0
    torch._dynamo.reset()


def test_training_is_the_same_bit_for_bit_with_forward_audits(tmp_path):
    states = []
    for audited in (False, True):
        torch.manual_seed(0)
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, into=tmp_path / str(audited)) as rec:
            for _ in range(4):
                x = torch.randn(8, 6)
                model(x).square().mean().backward()
                if audited:
                    rec.audit(lambda x=x, model=model: model(x).square().mean(), forward=True)
                optimizer.step()
                optimizer.zero_grad()
        states.append([value.clone() for value in model.state_dict().values()])
    assert all(torch.isfinite(value).all() for value in states[0])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
