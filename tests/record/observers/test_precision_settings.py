"""The precision that was asked of frameworks, beside the dtypes that were seen in real trainings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel.distributed import _MixedPrecision

from amp_core import diagnose, load_run, watch
from amp_core.analysis import precision_disagreements, precision_settings
from amp_core.record.observers.precision_asked import asked
from tests.record.sharded import one_process


def trained(folder: Path, model: torch.nn.Module, dtype: torch.dtype = torch.float32, cast: bool = False) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=folder, every=1):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                loss = model(torch.randn(4, 8, dtype=dtype)).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return precision_settings(load_run(folder))


def seen(frame: pd.DataFrame) -> dict[str, str]:
    return dict(zip(frame["stage"], frame["seen"], strict=True))


def settings(frame: pd.DataFrame) -> dict[str, tuple[str, str]]:
    asked = frame[frame["asked"].notna()]
    return {row.stage: (row.asked, row.source) for row in asked.itertuples()}


def test_fsdp2s_policy_stands_beside_the_dtypes_seen(tmp_path: Path) -> None:
    with one_process() as mesh:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        frame = trained(tmp_path / "run", model)
    assert settings(frame) == {
        "compute": ("bfloat16", "MixedPrecisionPolicy.param_dtype"),
        "reduction": ("float32", "MixedPrecisionPolicy.reduce_dtype"),
        "outputs": ("float32", "MixedPrecisionPolicy.output_dtype"),
    }
    wanted = {"weights": "float32", "compute": "bfloat16", "outputs": "float32", "optimizer state": "float32"}
    assert wanted.items() <= seen(frame).items()
    assert not frame["differs"].any()


def test_ddps_communication_hook_is_named(tmp_path: Path) -> None:
    with one_process():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        frame = trained(tmp_path / "run", model)
    assert settings(frame)["reduction"] == ("float16", "DDP communication hook fp16_compress_hook")
    assert seen(frame)["reduction"] == "float16"


def test_a_hook_of_torchs_own_is_named() -> None:
    with one_process():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
        found = asked(model)
    assert found == [
        {"stage": "reduction", "dtype": "float16", "source": "DDP communication hook FP16_COMPRESS"},
    ]


def test_ddp_without_a_hook_reduces_gradients_as_they_are(tmp_path: Path) -> None:
    with one_process():
        frame = trained(tmp_path / "run", torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8)), cast=True)
    assert seen(frame)["reduction"] == "float32"


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
def test_the_mixed_precision_of_fsdp1_stands_beside_the_dtypes_seen(tmp_path: Path) -> None:
    with one_process():
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        device = torch.device("cpu")
        inner = torch.nn.Sequential(torch.nn.Linear(8, 8))
        model = FullyShardedDataParallel(inner, mixed_precision=policy, device_id=device, use_orig_params=True)
        frame = trained(tmp_path / "run", model)
    assert settings(frame) == {
        "compute": ("bfloat16", "MixedPrecision.param_dtype"),
        "reduction": ("float32", "MixedPrecision.reduce_dtype"),
    }
    assert {"weights": "float32", "compute": "bfloat16", "gradients": "float32"}.items() <= seen(frame).items()


def test_the_mixed_precision_of_ddp_is_read() -> None:
    """On a CPU, DDP refuses to train with it."""
    with one_process():
        policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), mixed_precision=policy)
        found = asked(model)
    assert found == [
        {"stage": "compute", "dtype": "bfloat16", "source": "MixedPrecision.param_dtype"},
        {"stage": "reduction", "dtype": "float16", "source": "MixedPrecision.reduce_dtype"},
    ]


@pytest.mark.parametrize("cast", [False, True])
def test_autocast_and_weights_are_seen(cast: bool, tmp_path: Path) -> None:
    frame = trained(tmp_path / "run", torch.nn.Linear(8, 8), cast=cast)
    dtype = "bfloat16" if cast else "float32"
    assert seen(frame) == {
        "weights": "float32",
        "compute": dtype,
        "outputs": dtype,
        "gradients": "float32",
        "optimizer state": "float32",
    }


def test_megatrons_accumulation_is_seen(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
    assert seen(trained(tmp_path / "run", model, torch.bfloat16))["accumulation"] == "float32"


def test_micro_batches_are_summed_in_the_dtype_of_gradients(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(2):
            model(torch.randn(4, 8, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    assert seen(precision_settings(load_run(tmp_path / "run")))["accumulation"] == "bfloat16"


@pytest.mark.parametrize("wide", [False, True])
def test_megatrons_settings_stand_beside_its_buffers(wide: bool, tmp_path: Path) -> None:
    """Its optimizer updates FP32 copies; `main_grad` belongs to the model's own parameters."""
    dtype = torch.float32 if wide else torch.bfloat16
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    model.ddp_config = SimpleNamespace(grad_reduce_in_fp32=wide)  # type: ignore[assignment]
    copies = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.Adam(copies, lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run"):
        model(torch.randn(4, 8, dtype=torch.bfloat16)).float().sum().backward()
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            parameter.main_grad = parameter.grad.to(dtype)  # type: ignore[attr-defined, union-attr]
            copy.grad = parameter.main_grad.float()  # type: ignore[attr-defined]
        optimizer.step()
    frame = precision_settings(load_run(tmp_path / "run"))
    source = f"Megatron `grad_reduce_in_fp32={wide}`"
    name = str(dtype).removeprefix("torch.")
    assert settings(frame) == {"accumulation": (name, source), "reduction": (name, source)}
    assert (seen(frame)["accumulation"], seen(frame)["weights"]) == (name, "float32")


def test_accelerates_plugin_says_what_it_asks_of_each_stage(tmp_path: Path) -> None:
    class FullyShardedDataParallelPlugin:
        mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)

    model = torch.nn.Linear(8, 8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.accelerator_state = SimpleNamespace(
        mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin(), distributed_type="FSDP"
    )
    with watch(model, optimizer, into=tmp_path / "run"):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    frame = precision_settings(load_run(tmp_path / "run"))
    plugin = "FullyShardedDataParallelPlugin.mixed_precision_policy"
    assert frame.loc[frame["asked"].notna(), ["stage", "asked", "source"]].to_numpy().tolist() == [
        ["compute", "bfloat16", f"{plugin}.param_dtype"],
        ["compute", "bfloat16", "Accelerator(mixed_precision='bf16')"],
        ["reduction", "bfloat16", f"{plugin}.reduce_dtype"],
    ]
    assert precision_disagreements(frame)[1] == (
        "Accelerator(mixed_precision='bf16') requests BF16 compute; FP32 was observed."
    )


def test_fabrics_precision_stands_beside_what_it_did(tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning.fabric", reason="lightning is not installed").Fabric
    launched = fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    inner = torch.nn.Linear(8, 8)
    model, optimizer = launched.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    with watch(model, optimizer, into=tmp_path / "run"):
        launched.backward(model(torch.randn(4, 8)).sum())
        optimizer.step()
    frame = precision_settings(load_run(tmp_path / "run"))
    source = "Fabric(precision='bf16-mixed')"
    assert settings(frame) == {"weights": ("float32", source), "compute": ("bfloat16", source)}
    assert not frame["differs"].any() and seen(frame)["compute"] == "bfloat16"


class DeepSpeedEngine(torch.nn.Linear):
    """Answers as DeepSpeed's engine does; DeepSpeed itself is not installed here."""

    communication_data_type = torch.bfloat16
    accumulated_in = torch.bfloat16

    def zero_optimization_stage(self) -> int:
        return 2

    def bfloat16_enabled(self) -> bool:
        return True

    def fp16_enabled(self) -> bool:
        return False

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.bfloat16, self.accumulated_in


class Engine(torch.nn.Module):
    """DeepSpeed's engine around a model, as far as names and micro-batches need it."""

    accumulated_in = torch.bfloat16
    communication_data_type = None
    zero_optimization_stage = DeepSpeedEngine.zero_optimization_stage
    bfloat16_enabled = DeepSpeedEngine.bfloat16_enabled
    fp16_enabled = DeepSpeedEngine.fp16_enabled
    get_data_types = DeepSpeedEngine.get_data_types

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x.to(torch.bfloat16))
        return out


Engine.__name__ = "DeepSpeedEngine"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deepspeeds_engine_is_unwrapped_and_its_dtype_of_accumulation_counts(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    engine = Engine(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)))
    engine.accumulated_in = dtype
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    with watch(engine, optimizer, into=tmp_path / "run", every=1):
        for _ in range(3):
            for _ in range(2):
                engine(torch.randn(4, 8)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert set(run.tensors(kind="weight_grad")["name"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert ("half-accumulation" in {f.code for f in diagnose(run)}) == (dtype == torch.bfloat16)


def test_deepspeeds_sections_are_read_and_a_dtype_that_differs_is_marked(tmp_path: Path) -> None:
    frame = trained(tmp_path / "run", DeepSpeedEngine(8, 8))
    assert settings(frame) == {
        "compute": ("bfloat16", "DeepSpeed `bf16`, ZeRO 2"),
        "accumulation": ("bfloat16", "DeepSpeed `grad_accum_dtype`"),
        "reduction": ("bfloat16", "DeepSpeed `communication_data_type`, ZeRO 2"),
    }
    assert frame.loc[frame["differs"], "stage"].tolist() == ["compute"]  # the stand-in casts nothing


@pytest.mark.parametrize(
    ("precision", "weights", "compute"),
    [("bf16-true", "bfloat16", "bfloat16"), ("bf16-mixed", "float32", "bfloat16"), ("32-true", "float32", "float32")],
)
def test_lightnings_precision_stands_beside_what_it_did(
    precision: str, weights: str, compute: str, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from amp_core.record.lightning import WatchCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 8)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.net(batch[0]).float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=4)
    lightning.Trainer(
        precision=precision, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[WatchCallback(tmp_path / "run")],
    ).fit(Module(), data)  # fmt: skip
    frame = precision_settings(load_run(tmp_path / "run"))
    assert settings(frame) == {
        "weights": (weights, f"Trainer(precision={precision!r})"),
        "compute": (compute, f"Trainer(precision={precision!r})"),
    }
    assert not frame["differs"].any()
    assert (seen(frame)["weights"], seen(frame)["compute"]) == (weights, compute)


class CountingOptimizer(torch.optim.Optimizer):
    """Keeps a number and a tensor of its own beside the state of parameters, as SPAM and MADGRAD do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        own: Any = self.state
        own["total"], own["k"] = 0, torch.zeros((), dtype=torch.long)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own: Any = self.state
        own["total"] += 1
        own["k"] += 1
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.bfloat16))
            momentum.mul_(0.9).add_(p.grad)
            p.sub_(0.1 * momentum)


def test_an_optimizer_may_keep_values_of_no_parameter(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = CountingOptimizer(model.parameters())
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert seen(precision_settings(run))["optimizer state"] == "bfloat16"
    assert not (run.events["kind"] == "warning").any()
    assert run.memory["optimizer_bytes"].max() > 0


def test_a_run_that_failed_in_its_first_step_has_no_dtype_beside_what_was_asked(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.accelerator_state = SimpleNamespace(mixed_precision="bf16", fsdp_plugin=None, distributed_type="NO")
    with pytest.raises(RuntimeError), watch(model, optimizer, into=tmp_path / "run"):
        model(torch.randn(4, 3))
    frame = precision_settings(load_run(tmp_path / "run"))
    assert frame[["stage", "asked"]].to_numpy().tolist() == [["compute", "bfloat16"]]
    assert frame["seen"].isna().all()
    assert not frame["differs"].any()
