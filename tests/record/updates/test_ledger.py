"""The update ledger against the same step in float64, and what it leaves alone."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from amp_core import RunError, load_run, watch
from amp_core.findings import diagnose
from amp_core.record.updates import ledger
from tests.record.sharded import one_process
from tests.record.updates.optimizers import (
    CalledSgd,
    CountingSgd,
    KahanSgd,
    LateClosureSgd,
    Lion,
    Lookahead,
    NoisySgd,
    NormalisedSgd,
    SgdWithMasters,
)

STEPS = 4

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "adam, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-4)),
    "lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-3),
    "normalised": lambda p: NormalisedSgd(p, lr=1e-2),
}


def network(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).to(dtype)


def backward(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    parameter = next(model.parameters())
    x = torch.randn(16, parameter.shape[1]).to(parameter.dtype)
    ((model(x) - x) ** 2).mean().backward()


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, **options: Any) -> None:
    recorder = watch(model, optimizer, into=folder, every=1, **options) if folder else None
    for seed in range(STEPS):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    if recorder is not None:
        recorder.close()


def in_float64(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
    """Copies whose weights, gradients and state are float64."""
    wide, stepped = copy.deepcopy((model, optimizer))
    with torch.no_grad():
        for a, b in zip(wide.parameters(), model.parameters(), strict=True):
            a.data = b.detach().double()
            a.grad = b.grad.double()
    for group in stepped.param_groups:
        for key in ("fused", "foreach"):
            if key in group:
                group[key] = False
        if isinstance(group.get("eps"), tuple):
            group["eps"] = (torch.finfo(torch.bfloat16).eps, group["eps"][1])
    for state in stepped.state.values():
        state |= {k: v.double() for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
    stepped.step()
    return wide, stepped


def truth(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> pd.DataFrame:
    """Lost and unchanged shares of each step, by deep copies in float64 made here."""
    model = network()
    optimizer = make(list(model.parameters()))
    rows = []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for step in range(STEPS):
        backward(model, step)
        wide, _ = in_float64(model, optimizer)
        before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        exact = dict(wide.named_parameters())
        for name, p in model.named_parameters():
            if id(p) in held:
                update = exact[name].detach() - before[name]
                change = p.detach().double() - before[name]
                lost = ((change - update).abs().sum() / update.abs().sum()).item()
                unchanged = ((change == 0) & (update != 0)).sum().item() / (update != 0).sum().item()
                rows.append({"step": step, "name": name, "lost": lost, "unchanged": unchanged})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lost_shares_are_those_of_a_step_in_float64(name: str, tmp_path: Path) -> None:
    expected = truth(OPTIMIZERS[name])
    model = network()
    trained(model, OPTIMIZERS[name](list(model.parameters())), tmp_path / "run", updates=True)
    recorded = load_run(tmp_path / "run").updates.merge(expected, on=["step", "name"])
    assert len(recorded) == len(expected)
    assert (recorded["lost_mass_frac"] - recorded["lost"]).abs().max() < 0.001
    assert (recorded["unchanged_frac"] - recorded["unchanged"]).abs().max() < 0.001
    assert recorded["cure"].isna().all()
    assert recorded["lost_mass_frac"].max() > 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_training_stays_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    models = []
    for folder in (None, tmp_path / "run"):
        model = network()
        options: dict[str, Any] = {"updates": True} if folder else {}
        trained(model, OPTIMIZERS[name](list(model.parameters())), folder, **options)
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("state", ["AdamW8bit", "AdamW4bit", "Adam8bit"])
def test_quantized_states_are_repeated_dequantized(state: str, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    model = network()
    optimizer = getattr(torchao, state)(model.parameters(), lr=1e-4)
    backward(model, 0)
    optimizer.step()  # creates the state
    recorder = watch(model, optimizer, into=tmp_path / "run", every=1)
    backward(model, 1)
    exact = []
    for p in model.parameters():
        held = optimizer.state[p]
        twin = torch.nn.Parameter(p.detach().double())
        twin.grad = p.grad.double()
        kind = torch.optim.AdamW if optimizer.is_adamw else torch.optim.Adam
        group = optimizer.param_groups[0]
        reference = kind([twin], lr=float(group["lr"]), weight_decay=group["weight_decay"])
        reference.state[twin] = {"step": held["step"].clone()} | {
            key: (v.dequantize() if hasattr(v, "codes") or hasattr(v, "qmap") else v).double()
            for key, v in held.items()
            if key != "step"
        }
        before = twin.detach().clone()
        reference.step()
        exact.append((before, twin.detach()))
    optimizer.step()
    recorder.close()
    rows = load_run(tmp_path / "run").updates.set_index("name")
    for (name, p), (before, right) in zip(model.named_parameters(), exact, strict=True):
        lost = ((p.detach().double() - right).abs().sum() / (right - before).abs().sum()).item()
        assert rows.loc[name, "lost_mass_frac"] == pytest.approx(lost, abs=1e-3)


def updates_of(make: Callable[[Any], torch.optim.Optimizer], folder: Path, **options: Any) -> pd.DataFrame:
    model = network()
    trained(model, make(model.parameters()), folder, **options)
    return load_run(folder).updates


def test_weight_decay_below_half_a_unit_in_the_last_place_is_lost_and_a_large_one_is_not(tmp_path: Path) -> None:
    small = updates_of(lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1), tmp_path / "small")
    large = updates_of(lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.5), tmp_path / "large")
    without = updates_of(lambda p: torch.optim.SGD(p, lr=0.5), tmp_path / "without")
    wide = updates_of(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), tmp_path / "fp32", updates=True)
    assert small["lost_decay_frac"].min() > 0.99
    assert large["lost_decay_frac"].max() < 0.1
    assert without["lost_decay_frac"].isna().all()
    assert len(wide)


def test_kahan_summation_is_recognised_as_a_cure(tmp_path: Path) -> None:
    rows = updates_of(lambda p: KahanSgd(p, lr=1e-3), tmp_path / "run", updates=True)
    assert set(rows["cure"]) == {"kahan summation"}
    assert rows["lost_mass_frac"].max() < 0.1


def test_fp32_masters_are_recognised_as_a_cure(tmp_path: Path) -> None:
    rows = updates_of(lambda p: SgdWithMasters(p, lr=1e-3), tmp_path / "run", updates=True)
    assert set(rows["cure"]) == {"fp32 masters"}
    assert rows["lost_mass_frac"].max() < 0.01


def test_stochastic_rounding_is_recognised_as_a_cure(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    rows = updates_of(lambda p: torchao.AdamW8bit(p, lr=1e-4, bf16_stochastic_round=True), tmp_path / "run")
    assert set(rows["cure"]) == {"stochastic rounding"}
    large = rows[rows["elements"] > 1000]
    assert large["lost_mass_frac"].max() < 0.1


def test_fp32_weights_are_compared_only_where_asked_for(tmp_path: Path) -> None:
    for asked in (False, True):
        model = network(torch.float32)
        trained(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tmp_path / str(asked), updates=asked)
        rows = load_run(tmp_path / str(asked)).updates
        assert len(rows) == (STEPS * 4 if asked else 0)
        assert not asked or rows["lost_mass_frac"].max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.ASGD])
def test_a_parameter_of_one_number_is_compared(optimizer_class: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = network(dtype)
    model[0].register_parameter("temperature", torch.nn.Parameter(torch.ones((), dtype=dtype)))
    model[0].register_forward_hook(lambda module, args, output: output * module.temperature)
    trained(model, optimizer_class(model.parameters(), lr=1e-2), tmp_path / "run", updates=True)
    rows = load_run(tmp_path / "run").updates
    assert (rows["name"] == "0.temperature").sum() == STEPS and not why_not_recorded(tmp_path / "run")
    if dtype is torch.float32:
        assert rows.loc[rows["name"] == "0.temperature", "lost_mass_frac"].max() < 1e-3


def test_rounding_noise_before_a_batchnorm_is_no_lost_update(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16))
    with watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run", updates=True):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    rows = load_run(tmp_path / "run").updates
    assert rows.loc[rows["name"] == "0.bias", "lost_mass_frac"].max() > 0.5
    assert not [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "lost-weight-updates"]


def test_evenly_spaced_elements_stand_for_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = updates_of(OPTIMIZERS["adamw"], tmp_path / "whole")
    for bound in ("MAX_WHOLE", "MAX_ELEMENTS_AT_FIRST", "MAX_ELEMENTS_UNASKED"):
        monkeypatch.setattr(ledger, bound, 1200)
    some = updates_of(OPTIMIZERS["adamw"], tmp_path / "some")
    both = whole.merge(some, on=["step", "name"], suffixes=("", "_of_some"))
    assert len(both) == len(whole)
    assert both["elements_of_some"].max() < 600 < both["elements"].max()
    assert (both["lost_mass_frac"] - both["lost_mass_frac_of_some"]).abs().max() < 0.1


def test_fewer_elements_are_compared_until_the_cost_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_WHOLE", 1200)
    monkeypatch.setattr(ledger, "MAX_ELEMENTS_AT_FIRST", 1200)
    monkeypatch.setattr(ledger, "MAX_TIME_FRAC", 1.0)  # so that the step after the first ones is compared too
    elements = updates_of(OPTIMIZERS["adamw"], tmp_path / "run").groupby("step")["elements"].sum().tolist()
    assert elements == [1200] * ledger.MIN_STEPS + [2 * 2048 + 96]


def test_tensors_whose_elements_move_together_are_compared_whole_and_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_ELEMENTS", 2100)  # either of the two weights, of 2,048 elements
    rows = updates_of(OPTIMIZERS["normalised"], tmp_path / "run", updates=True)
    assert rows.groupby("name")["step"].apply(list).to_dict()["0.weight"] == [0, 2]
    assert rows.groupby("name")["step"].apply(list).to_dict()["2.weight"] == [1, 3]
    assert (rows["elements"] == rows["numel"]).all()


def why_not_recorded(folder: Path) -> list[str]:
    events = load_run(folder).events
    return events[events["name"] == "not recorded"]["detail"].tolist()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: CountingSgd(p, lr=1e-2), "to a tensor that is not in its state"),
        (lambda p: NoisySgd(p, lr=1e-2), "differs from the replay on copies"),
    ],
)
def test_an_optimizer_that_cannot_be_repeated_is_named_once(make: Any, why: str, tmp_path: Path) -> None:
    before = CountingSgd.steps.clone()
    rows = updates_of(make, tmp_path / "run", updates=True)
    assert rows.empty
    (reason,) = why_not_recorded(tmp_path / "run")
    assert why in reason
    assert CountingSgd.steps - before in (0, STEPS)


def test_16_bit_weights_that_never_change_are_found_where_the_step_cannot_be_repeated(tmp_path: Path) -> None:
    model = network().to(torch.bfloat16)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=1e-9))
    with watch(model, optimizer, into=tmp_path / "run", every=1, updates=True):
        for _ in range(5):
            model(torch.randn(4, next(model.parameters()).shape[1]).bfloat16()).float().square().mean().backward()
            optimizer.step()
    codes = {f.code: f.severity for f in diagnose(load_run(tmp_path / "run"))}
    assert codes["lost-weight-updates"] == "warning" and codes["recording-incomplete"] == "info"


def test_code_of_the_program_is_not_run_unasked(tmp_path: Path) -> None:
    before = CalledSgd.calls
    assert updates_of(lambda p: CalledSgd(p, lr=1e-2), tmp_path / "run").empty
    assert CalledSgd.calls - before == STEPS
    run = load_run(tmp_path / "run")
    assert run.events.query("name == 'updates'")["detail"].str.contains("CalledSgd").sum() == 1
    assert why_not_recorded(tmp_path / "run") == []


def test_an_optimizer_that_holds_another_is_not_repeated(tmp_path: Path) -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    trained(model, Lookahead(inner), tmp_path / "run", updates=True)
    assert inner.steps == STEPS  # type: ignore[attr-defined]
    assert len(load_run(tmp_path / "run").steps) == STEPS
    assert "may change a SGD that it holds as 'inner'" in why_not_recorded(tmp_path / "run")[0]


def test_what_a_program_attaches_to_torchs_optimizer_does_not_matter(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(1e-4))
    optimizer.owner = object()  # type: ignore[attr-defined]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    with watch(model, optimizer, into=tmp_path / "run", every=1, updates=True):
        for seed in range(2):
            backward(model, seed)
            optimizer.step()
            scheduler.step()
    assert len(load_run(tmp_path / "run").updates) == 2 * 4


def trained_by_closures(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, **options: Any
) -> None:
    recorder = watch(model, optimizer, into=folder, every=1, **options) if folder else None
    for seed in range(STEPS):

        def closure(seed: int = seed) -> float:
            optimizer.zero_grad()
            backward(model, seed)
            return 0.0

        optimizer.step(closure)
    if recorder is not None:
        recorder.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_whose_closure_computes_the_gradients_is_compared_like_one_without(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"updates": True}
    models = [network() for _ in range(3)]
    made = [OPTIMIZERS[name](list(model.parameters())) for model in models]
    trained(models[0], made[0], tmp_path / "plain", **options)
    trained_by_closures(models[1], made[1], tmp_path / "closure", **options)
    trained_by_closures(models[2], made[2], None)
    plain, closure = (load_run(tmp_path / run).updates for run in ("plain", "closure"))
    assert len(plain) == STEPS * (2 if name == "muon" else 4)
    pd.testing.assert_frame_equal(plain, closure)
    for a, b in zip(models[1].parameters(), models[2].parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_that_calls_its_closure_again_is_named(tmp_path: Path) -> None:
    models = [network(torch.float32) for _ in range(2)]
    for model, folder in zip(models, (tmp_path / "run", None), strict=True):
        options: dict[str, Any] = {"updates": True} if folder else {}
        trained_by_closures(model, torch.optim.LBFGS(model.parameters(), lr=0.1), folder, **options)
    run = load_run(tmp_path / "run")
    assert run.updates.empty and len(run.steps) == STEPS
    assert why_not_recorded(tmp_path / "run") == ["updates: the step of LBFGS calls its closure more than once"]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_that_writes_weights_before_its_closure_is_named(tmp_path: Path) -> None:
    model = network()
    trained_by_closures(model, LateClosureSgd(model.parameters(), lr=1e-2), tmp_path / "run", updates=True)
    assert load_run(tmp_path / "run").updates.empty
    assert "writes no weight after its closure" in why_not_recorded(tmp_path / "run")[0]


def test_a_lightning_trainer_in_bf16_has_its_updates_compared(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from amp_core.record.lightning import WatchCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network(torch.float32)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return ((self.net(batch[0]) - batch[0]) ** 2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trained_weights = []
    for callbacks in ([], [WatchCallback(tmp_path / "run", every=1, updates=True)]):
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(64, 32))
        trainer = lightning.Trainer(
            precision="bf16-true", max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
        trained_weights.append([p.detach().clone() for p in module.parameters()])
    run = load_run(tmp_path / "run")
    assert len(run.updates) == 4 * 4 and run.updates["lost_mass_frac"].max() > 0.1
    assert why_not_recorded(tmp_path / "run") == []
    assert all(torch.equal(a, b) for a, b in zip(*trained_weights, strict=True))


def test_weights_that_are_not_finite_have_no_shares(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, optimizer, into=tmp_path / "run", every=1):
        backward(model, 0)
        model[0].weight.grad.fill_(float("inf"))
        optimizer.step()
    rows = load_run(tmp_path / "run").updates.set_index("name")
    assert pd.isna(rows.loc["0.weight", "lost_mass_frac"])
    assert rows.loc["2.weight", "lost_mass_frac"] > 0


def test_a_scaler_that_skips_leaves_no_row(tmp_path: Path) -> None:
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1, updates=True):
        for seed in range(2):
            x = torch.randn(4, 32)
            scaler.scale(model(x).sum() * (float("inf") if not seed else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert set(load_run(tmp_path / "run").updates["step"]) == {1}


def test_shards_of_fsdp2_are_compared_as_the_weights_they_are_of(tmp_path: Path) -> None:
    with one_process() as mesh:
        shares = []
        for name, sharded in (("plain", False), ("shards", True)):
            model = network()
            if sharded:
                fully_shard(model, mesh=mesh)
            trained(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tmp_path / name)
            shares.append(load_run(tmp_path / name).updates[["step", "name", "lost_mass_frac", "unchanged_frac"]])
    common = set(shares[0]["step"]) & set(shares[1]["step"])  # a slow machine compares fewer
    assert common
    plain, shards = (share[share["step"].isin(common)].reset_index(drop=True) for share in shares)
    pd.testing.assert_frame_equal(plain, shards, rtol=1e-2)


def test_updates_that_are_no_bool_are_refused(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(RunError, match="updates=1 is not True or False"):
        watch(model, torch.optim.SGD(model.parameters(), lr=1e-2), into=tmp_path / "run", updates=1)  # type: ignore[arg-type]


def test_an_update_that_rounds_the_wrong_way_loses_at_most_all_of_it(tmp_path: Path) -> None:
    """Weight decay is rounded away and the step is rounded up: the weight lands further off than if it had stayed."""
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = torch.optim.AdamW([weight], lr=0.004, weight_decay=0.475)
    with watch(model, optimizer, into=tmp_path / "run", every=1, updates=True):
        (-weight.sum()).backward()
        optimizer.step()
    run = load_run(tmp_path / "run")
    assert run.updates["lost_mass_frac"].tolist() == [1.0]
    run.validate(full=True)
