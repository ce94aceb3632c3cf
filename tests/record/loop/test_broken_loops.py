"""Steps that an exception interrupts, in a loop that continues."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from amp_core import Run, load_run
from amp_core.record import watch
from tests.record.loops import small_model
from tests.record.shapes import adam, batches


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("where", ["forward", "loss", "backward", "step"])
def test_a_step_after_a_caught_exception_is_recorded_as_if_there_had_been_none(tmp_path, where, scaled, closure):
    """The interrupted step is discarded, and the next one is recorded as usual."""
    if scaled and closure:
        pytest.skip("a GradScaler takes no closure")

    def loop(fail: int | None, into: Path) -> Run:
        torch.manual_seed(0)
        model = small_model()
        optimizer = adam(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
        rec = watch(model, optimizer, scaler=scaler, into=into, every=2)
        for number, (x, y) in enumerate(batches(8)):
            broken, handle = number == fail, None
            if fail is None and number == 4:
                continue

            def work(x: torch.Tensor = x, y: torch.Tensor = y, broken: bool = broken) -> torch.Tensor:
                loss = F.cross_entropy(model(x[:, :7] if broken and where == "forward" else x), y)
                if broken and where == "loss":
                    loss.register_hook(lambda grad: 1 / 0)
                (scaler.scale(loss) if scaler else loss).backward()
                return loss

            try:
                if broken and where == "backward":
                    handle = model[2].weight.register_hook(lambda grad: 1 / 0)
                if broken and where == "step":
                    optimizer.param_groups[0]["betas"] = None
                if closure:
                    optimizer.step(work)
                else:
                    work()
                    scaler.step(optimizer) if scaler else optimizer.step()
                if scaler:
                    scaler.update()
            except (RuntimeError, ZeroDivisionError, TypeError):
                optimizer.param_groups[0]["betas"] = (0.9, 0.999)
                if scaler:
                    scaler.update(64.0)
            if handle is not None:
                handle.remove()
            optimizer.zero_grad()
        rec.close()
        assert repr(rec).endswith("hooks=0)")
        return load_run(into)

    broken, smooth = loop(4, tmp_path / "broken"), loop(None, tmp_path / "smooth")
    assert broken.status == "finished" and len(broken.steps) == 7 and broken.steps.step.is_unique
    for column in ("loss", "grad_norm") + (("samples",) if where != "forward" else ()):
        assert broken.steps[column].tolist() == smooth.steps[column].tolist(), column
    assert broken.steps.backward_ms.notna().all()
    kinds = ["step", "name", "kind", "numel"]
    assert broken.tensors()[kinds].values.tolist() == smooth.tensors()[kinds].values.tolist()
