"""The rows of a trace of one step's operators. `test_cleanup.py` tests that tracing does not change the training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from amp_core import RunError, load_run, watch
from amp_core.analysis import precision_map
from amp_core.record.op_trace import op_counter
from amp_core.record.op_trace.observer import OpTrace
from amp_core.store.writer import RunWriter
from amp_core.train import cpu_layers
from tests.record import loops
from tests.record.traced import MODELS, Convolutions, Model, calls, loops_model, traced


def test_every_matrix_product_has_the_flops_that_torch_counts(tmp_path: Path) -> None:
    run = traced(Convolutions, tmp_path / "run")
    model, x = Convolutions(), torch.randn(4, 6, 8)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(x), torch.arange(4)).backward()
    assert run.ops["flops"].sum() == counter.get_total_flops() > 0


def test_forward_is_decided_by_the_cpus_lists_and_backward_follows(tmp_path: Path) -> None:
    run = traced(Model, tmp_path / "run")
    products = run.ops[run.ops["flops"].notna()]
    assert set(products["in_dtypes"].str.split(", ").str[0]) == {"bfloat16"}
    assert set(products.query("phase == 'forward'")["policy"]) == {"lower_precision_fp"}
    assert products.query("phase == 'backward'")["policy"].isna().all()
    assert calls(run, op="aten::_log_softmax", policy="fp32") == 1  # cross_entropy_loss is in the CPU's list
    assert calls(run, op="aten::gelu", policy="none", out_dtype="bfloat16") == 2
    assert set(run.ops["device"]) == {"cpu"}
    assert set(run.ops.query("phase == 'forward'")["autocast"]) == {"bfloat16"}
    assert set(run.ops.query("phase == 'optimizer'")["in_dtypes"]) == {"float32"}


def test_each_operator_belongs_to_its_module_in_forward_and_backward(tmp_path: Path) -> None:
    run = traced(Model, tmp_path / "run")
    for name in ("embed", "blocks.0.qkv", "blocks.1.fc"):
        assert calls(run, module=name, op="aten::addmm", phase="forward") == 1, name
        assert calls(run, module=name, op="aten::mm", phase="backward") == (1 if name == "embed" else 2), name
    assert calls(run, module="blocks.1.norm", op="aten::native_layer_norm_backward") == 1
    one_call = cpu_layers.runs("LSTM", torch.bfloat16, torch.float32)  # oneDNN's operator, if it has one for this CPU
    assert calls(run, module="lstm", op="aten::mkldnn_rnn_layer_backward", phase="backward") == one_call
    assert one_call or calls(run, module="lstm", op="aten::mm", phase="backward") > 1
    assert calls(run, module="blocks.0", op="aten::_scaled_dot_product_flash_attention_for_cpu") == 1
    assert calls(run, module=None, op="aten::nll_loss_backward") == 1


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed-reentrant"])
def test_recomputed_operators_belong_to_their_module(name: str, tmp_path: Path) -> None:
    run = traced(MODELS[name], tmp_path / "run")
    assert calls(run, module="blocks.1.qkv", op="aten::addmm", phase="forward") == 1
    assert calls(run, module="blocks.1.qkv", op="aten::addmm", phase="backward", autocast="bfloat16") == 1
    assert calls(run, module="blocks.1.qkv", op="aten::mm", phase="backward") == 2
    casts = run.ops[(run.ops["module"] == "blocks.0.qkv") & (run.ops["cast_of"] == "parameter")]
    assert set(casts["cast_by"]) == {"autocast"} and casts["repeated"].sum() == 2  # weight and bias, once more each


def test_casts_are_distinguished_by_origin(tmp_path: Path) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.fc(x), self.fc(x)  # the second time, weight and bias come from the cache
            with torch.autocast("cpu", enabled=False):
                wide = F.linear((first + second).float(), self.fc.weight)
            return wide.to(torch.bfloat16).float()  # there and back again

    run = traced(Casting, tmp_path / "run")
    fc = run.ops[run.ops["module"] == "fc"]
    autocasts = fc[fc["cast_by"] == "autocast"].groupby("cast_of")[["count", "out_bytes", "repeated"]].sum()
    assert autocasts.loc["parameter"].tolist() == [2, (64 + 8) * 2, 0]
    assert autocasts.loc["other"].tolist() == [2, 2 * 4 * 6 * 8 * 2, 1]  # the input, for each call
    products = fc[(fc["op"] == "aten::addmm") & (fc["phase"] == "forward")]
    assert products[["count", "casts", "cast_bytes", "cache_hits"]].sum().tolist() == [2, 4, 144 + 768, 2]
    own = run.ops[(run.ops["module"] == "") & (run.ops["cast_by"] == "code")]
    assert own["count"].sum() == 3 and own["undone"].sum() == 1
    assert set(run.ops[run.ops["phase"] == "backward"]["cast_by"].dropna()) == {"gradient"}
    disabled = run.ops.query("autocast == 'disabled' and flops.notna()")
    assert disabled[["in_dtypes", "module", "count"]].to_numpy().tolist() == [["float32", "", 1]]
    view = precision_map(run)
    assert view.stayed["why"].tolist() == ["inside autocast(enabled=False)"] and view.cache_hits == 2


def test_the_cache_lasts_as_long_as_the_region(tmp_path: Path) -> None:
    once = loops.train(tmp_path / "once", torch.bfloat16, steps=4, accumulate=3, trace_ops=2)
    run = load_run(tmp_path / "once")
    assert once.recorder is not None
    products = run.ops[(run.ops["op"] == "aten::addmm") & (run.ops["phase"] == "forward")]
    assert products["count"].sum() == 9 and products["cache_hits"].sum() == 0  # one region per micro-batch
    casts = run.ops[(run.ops["cast_of"] == "parameter") & (run.ops["cast_by"] == "autocast")]
    assert casts["count"].sum() == 3 * 6


def test_attention_without_a_fused_kernel_is_named_as_the_reason(tmp_path: Path) -> None:
    view = precision_map(traced(MODELS["dropout"], tmp_path / "run"))
    assert view.stayed[["module", "modules", "op"]].to_numpy().tolist() == [["blocks.*", 2, "bmm"]]
    assert view.stayed["why"][0].startswith("attention without a fused kernel")
    assert view.casts.query("cast_by == 'operator' and phase == 'forward'")["count"].sum() > 0
    fused = precision_map(traced(Model, tmp_path / "fused"))
    assert fused.stayed.empty and fused.matrix_frac == {"bf16": 1.0}


def test_watching_itself_is_not_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = loops.small_model()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", every=1, level="full", trace_ops=1):
        for _ in range(3):
            model(torch.randn(4, 24)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    writer = RunWriter(tmp_path / "plain")
    trace, optimizer = OpTrace(writer, plain, 1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        trace.step_began(step)
        plain(torch.randn(4, 24)).sum().backward()
        trace.called("optimizer.step", 0)
        optimizer.step()
        trace.step_ended(step)
        optimizer.zero_grad()
    writer.close()
    keys = ["module", "op", "phase", "in_dtypes", "in_shapes"]
    frames = [load_run(tmp_path / name).ops.fillna({"module": "-", "in_shapes": "-"}) for name in ("run", "plain")]
    watched, alone = (frame.groupby(keys)["count"].sum() for frame in frames)
    assert watched.to_dict() == alone.to_dict() and watched.sum() > 20


def test_a_requested_step_that_never_came_is_reported(tmp_path: Path) -> None:
    run = traced(loops_model, tmp_path / "run", trace_ops=40)
    assert run.ops.empty and "the run ended before step 40" in run.events["detail"].str.cat()


@pytest.mark.parametrize("step", [-1, 2.0, True, "2"])
def test_an_invalid_step_is_refused(step: Any, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer, pytest.raises(RunError, match="trace_ops="):
        OpTrace(writer, loops_model(), step)


def test_rows_have_no_shapes_beyond_the_row_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_counter, "MAX_ROWS", 5)
    run = traced(Model, tmp_path / "run")
    assert run.ops["in_shapes"].notna().sum() == 5
    for name in ("embed", "blocks.0.qkv", "blocks.0.fc", "blocks.1.qkv", "blocks.1.fc"):
        assert calls(run, op="aten::addmm", module=name) == 1


def test_a_model_wrapped_for_several_processes_keeps_its_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        run = traced(lambda: nn.parallel.DistributedDataParallel(Model()), tmp_path / "run")
        plain = traced(Model, tmp_path / "plain")
    finally:
        torch.distributed.destroy_process_group()
    assert calls(run, module="blocks.1.fc", op="aten::addmm") == 1
    products = [r.ops[r.ops["flops"].notna()].groupby(["module", "op", "phase"])["count"].sum() for r in (run, plain)]
    assert products[0].to_dict() == products[1].to_dict()


@pytest.mark.parametrize("max_iter", [1, 4])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_only_the_first_call_of_an_optimizers_closure_is_traced(
    compiled_before: bool, max_iter: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    if compiled_before:  # torch disables the steps of LBFGS then
        torch.compile(torch.sin, backend="eager")(torch.ones(2))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=max_iter)
    called = []

    def closure() -> torch.Tensor:
        called.append(len(called))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.ones(4, 8)), torch.arange(4))
        loss.backward()
        return loss

    with watch(model, optimizer, into=tmp_path / "run", trace_ops=1):
        for _ in range(3):
            optimizer.step(closure)
    assert len(called) >= 3 * max_iter
    run = load_run(tmp_path / "run")
    assert calls(run, op="aten::addmm", phase="forward") == 2 and calls(run, op="aten::addmm") == 2
    assert calls(run, op="aten::mm", phase="backward") == 3
    assert calls(run, phase="optimizer") > 0
    assert run.events[run.events.kind == "calls"].name.tolist() == ["zero_grad backward optimizer.step"]
