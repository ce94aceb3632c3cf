"""Tracing the operators of one step: what is seen of it, and that the training does not notice."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from amp_core import Run, RunError, load_run, watch
from amp_core.analysis import precision_map
from amp_core.record import _optally
from amp_core.record._optally import Seeing
from amp_core.record._places import Modules
from amp_core.record.optrace import OpTrace
from amp_core.runlog import RunWriter
from tests.record import loops

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Attention(nn.Module):
    """A block of GPT, with dropout or without; without it there is a fused kernel on the CPU."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.fc = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout, self.checkpointed, self.reentrant = dropout, checkpointed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self._forward, x, use_reentrant=self.reentrant)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return x + F.gelu(self.fc(y.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    """Something of everything: embedding by a linear layer, two blocks, an LSTM, a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.blocks = nn.ModuleList([Attention(**options), Attention(**options)])
        self.lstm, self.head = nn.LSTM(32, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.lstm(x)[0])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x[:, None])), inplace=True).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt-lstm": Model,
    "dropout": lambda: Model(dropout=0.2),
    "checkpointed": lambda: Model(dropout=0.2, checkpointed=True),
    "checkpointed-reentrant": lambda: Model(checkpointed=True, reentrant=True),
    "convolutions": Convolutions,
}


def train(
    make: Callable[[], nn.Module],
    into: Path | None,
    dtype: torch.dtype | None,
    *,
    steps: int = 4,
    trace_ops: int | None = 2,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> list[float]:
    """A plain loop with a scaler where fp16 wants one; watched where `into` is given."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if dtype == torch.float16 else None
    recorder = None
    if into is not None:
        recorder = watch(model, optimizer, scaler=scaler, into=into, every=2, trace_ops=trace_ops)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2), torch.arange(out.flatten(0, -2).shape[0]) % 5)
        between(model, step)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if recorder is not None:
        recorder.close()
    return losses


def traced(
    make: Callable[[], nn.Module], into: Path, dtype: torch.dtype | None = torch.bfloat16, **options: Any
) -> Run:
    train(make, into, dtype, **options)
    return load_run(into)


def calls(run: Run, **of: Any) -> int:
    """How many operators of those properties were called."""
    rows = run.ops
    for column, value in of.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    return int(rows["count"].sum())


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
    changed = [(autocast, "__enter__"), (autocast, "__exit__"), (torch, "set_autocast_enabled")]
    before = [getattr(owner, name) for owner, name in changed]
    seen = []

    def look(model: nn.Module, step: int) -> None:
        hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        ours = [h for h in hooks if isinstance(getattr(getattr(h, "func", h), "__self__", None), Modules)]
        wrapped = [getattr(owner, name) is not was for (owner, name), was in zip(changed, before, strict=True)]
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Seeing)]
        seen.append((len(ours) == 2 * len(list(model.modules())), bool(ours), all(wrapped), any(wrapped), len(modes)))

    train(MODELS[name], tmp_path / "run", torch.bfloat16, between=look, steps=5)
    untouched = (False, False, False, False, 0)
    assert seen == [untouched, untouched, (True, True, True, True, 1), untouched, untouched]
    assert [getattr(owner, name) for owner, name in changed] == before


def test_a_loop_that_fails_within_the_step_leaves_nothing_either(tmp_path: Path) -> None:
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
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    run = load_run(tmp_path / "run")
    assert calls(run, op="aten::addmm") == 3 and "as far as it went" in run.events["detail"].str.cat()


def test_every_product_is_counted_with_the_operations_that_torch_counts(tmp_path: Path) -> None:
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
    assert calls(run, module="lstm", op="aten::mkldnn_rnn_layer_backward", phase="backward") == 1
    assert calls(run, module="blocks.0", op="aten::_scaled_dot_product_flash_attention_for_cpu") == 1
    assert calls(run, module=None, op="aten::nll_loss_backward") == 1


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed-reentrant"])
def test_what_is_made_again_for_backward_belongs_to_its_module(name: str, tmp_path: Path) -> None:
    run = traced(MODELS[name], tmp_path / "run")
    assert calls(run, module="blocks.1.qkv", op="aten::addmm", phase="forward") == 1
    assert calls(run, module="blocks.1.qkv", op="aten::addmm", phase="backward", autocast="bfloat16") == 1
    assert calls(run, module="blocks.1.qkv", op="aten::mm", phase="backward") == 2
    casts = run.ops[(run.ops["module"] == "blocks.0.qkv") & (run.ops["cast_of"] == "parameter")]
    assert set(casts["cast_by"]) == {"autocast"} and casts["repeated"].sum() == 2  # weight and bias, once more each


def test_casts_are_told_apart_by_who_made_them(tmp_path: Path) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.fc(x), self.fc(x)  # weight and bias come from the cache the second time
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
    assert products["count"].sum() == 9 and products["cache_hits"].sum() == 0  # a region for each micro-batch
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


def test_a_compiled_model_is_left_alone_and_the_run_says_so(tmp_path: Path) -> None:
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
    """Written in Python: what it calls is under autocast, and below autograd."""
    return (x @ weight).float()


custom_product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].flatten(0, -2).t() @ grad.flatten(0, -2)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Custom(nn.Module):
    """Operators that call others from inside: one of one's own, and one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.pair, self.fc = nn.Parameter(torch.randn(8, 8)), nn.Bilinear(8, 8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = custom_product(x, self.weight)
        return self.fc(self.pair(x, x))


@pytest.mark.parametrize("trace_ops", [None, 0, 1, 2])
def test_operators_that_call_others_keep_autocast_within(trace_ops: int | None, tmp_path: Path) -> None:
    alone = train(Custom, None, torch.bfloat16)
    assert train(Custom, tmp_path / "run", torch.bfloat16, trace_ops=trace_ops) == alone
    if trace_ops:
        run = load_run(tmp_path / "run")
        (policy,) = run.ops.query("op == 'ampscope_tests::prod'")["policy"]
        assert policy == "none" and precision_map(run).stayed.empty


def loops_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU())


def test_beside_another_mode_nothing_is_traced(tmp_path: Path) -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Other():
        run = traced(loops_model, tmp_path / "run")
    assert run.ops.empty and "another TorchDispatchMode" in run.events["detail"].str.cat()


def test_a_mode_entered_within_the_step_is_not_ended_for_its_owner(tmp_path: Path) -> None:
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


def test_an_error_of_the_counting_does_not_reach_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(_optally, "call_site", broken)
    losses = train(Model, tmp_path / "run", torch.bfloat16)
    monkeypatch.undo()
    assert losses == train(Model, None, torch.bfloat16)
    assert "counting stopped after 0 operators: KeyError" in load_run(tmp_path / "run").events["detail"].str.cat()


def test_a_step_that_never_came_is_told(tmp_path: Path) -> None:
    run = traced(loops_model, tmp_path / "run", trace_ops=40)
    assert run.ops.empty and "the run ended before step 40" in run.events["detail"].str.cat()


@pytest.mark.parametrize("step", [-1, 2.0, True, "2"])
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer, pytest.raises(RunError, match="trace_ops="):
        OpTrace(writer, loops_model(), step)


def test_shapes_no_longer_tell_rows_apart_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_optally, "MOST_ROWS", 5)
    run = traced(Model, tmp_path / "run")
    assert run.ops["in_shapes"].notna().sum() == 5 and calls(run, op="aten::addmm") == 5


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
