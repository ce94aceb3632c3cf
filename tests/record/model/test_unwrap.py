"""`watch` finds the loop's scaler if it is not given, and inside wrappers."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from amp_core import diagnose, load_run
from amp_core.record import watch
from tests.record.loops import small_model
from tests.record.sharded import one_process


class NativeScaler:
    """As in timm, DeiT and MAE: called with the loss and the optimizer, it does backward, step and update."""

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()


class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def begin(self, model, optimizer, into):
        return watch(model, optimizer, into=into)


def as_variable(model, optimizer, into):
    loop_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    return watch(model, optimizer, into=into), loop_scaler


def of_self(model, optimizer, into):
    trainer = Trainer()
    return trainer.begin(model, optimizer, into), trainer.scaler


def in_a_wrapper(model, optimizer, into):
    loss_scaler = NativeScaler()
    return watch(model, optimizer, into=into), loss_scaler._scaler


def given_in_a_wrapper(model, optimizer, into):
    return watch(model, optimizer, scaler=(held := NativeScaler()), into=into), held._scaler


@pytest.mark.parametrize("way", [as_variable, of_self, in_a_wrapper, given_in_a_wrapper])
def test_the_scaler_of_the_loop_is_detected(tmp_path, way):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder, scaler = way(model, optimizer, tmp_path / "run")
    losses, scales = [], []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(16, 24)).square().mean()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    recorder.close()
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == losses and run.steps.loss_scale.tolist() == scales
    assert run.steps.skipped.iloc[0] and run.head.config["precision"] == "fp16"
    assert "fp16-without-scaler" not in [finding.code for finding in diagnose(run)]


def test_none_of_two_reachable_scalers_is_chosen(tmp_path):
    scalers = one, other = [torch.amp.GradScaler("cpu") for _ in range(2)]
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        pass
    assert one is not other and load_run(tmp_path / "run").head.config["scaler"] is None and len(scalers) == 2


@pytest.mark.parametrize(
    ("dtype", "scaled", "recipe"),
    [
        (torch.bfloat16, False, "bf16"),
        (torch.float16, True, "fp16"),
        (torch.float16, False, "fp16-unscaled"),
        (None, False, "fp32"),
    ],
)
def test_the_precision_is_the_dtype_that_fsdp_casts_parameters_to(tmp_path, dtype, scaled, recipe):
    model = small_model()
    with one_process() as mesh:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        with watch(model, optimizer, scaler=scaler, into=tmp_path / "run"):
            scaler.scale(model(torch.randn(4, 24)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert load_run(tmp_path / "run").head.config["precision"] == recipe


def test_a_reachable_scaler_that_the_loop_does_not_use_hides_nothing(tmp_path):
    unused = torch.amp.GradScaler("cpu")
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(4):
            loss = model(torch.randn(16, 24)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    steps = load_run(tmp_path / "run").steps
    assert unused.is_enabled() and steps.loss.tolist() == losses and steps.step.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_objects_that_fabric_has_set_up_are_watched_unchanged(tmp_path, precision):
    fabric_of = pytest.importorskip("lightning.fabric")
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22) if precision == "16-mixed" else None
    plugin = MixedPrecision(precision, "cpu", scaler)

    def train(into):
        torch.manual_seed(0)
        fabric = fabric_of.Fabric(accelerator="cpu", plugins=plugin)
        model = small_model()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        recorder = watch(model, optimizer, into=into, every=2) if into is not None else None
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 24)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        if recorder is not None:
            recorder.close()
        return losses

    watched = train(tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == watched
    assert run.head.config["precision"] == {"bf16-mixed": "bf16", "16-mixed": "fp16"}[precision]
    assert set(run.tensors(kind="weight_grad").name) == {name for name, _ in small_model().named_parameters()}
    assert set(run.tensors(kind="output_grad").name) == {"0", "1", "2", "3", "4", "5"}
    if scaler is not None:
        assert run.steps.skipped.iloc[0] and run.steps.loss_scale.iloc[0] == 2.0**22
    else:
        assert train(None) == watched
