"""The recorder detects a step's forward wherever the loop enters the model, and autocast wherever it is enabled."""

import torch
from torch import nn

from amp_core import diagnose, load_run
from amp_core.record import watch
from amp_core.record.loop.autocast_regions import RegionDetector
from amp_core.record.loop.entry_points import EntryPoints
from amp_core.record.torch_internals.module_calls import listeners
from tests.record.loops import small_model


def entered(model, calls):
    """Names of the modules that were reported as entered, and the number of hooks after the first step."""
    names = {id(m): n for n, m in model.named_modules()}
    seen = []
    entries = EntryPoints(
        model, lambda m, a, k: seen.append(names[id(m)]), lambda m, a, o: seen.append(names[id(m)] + ".")
    )
    calls()
    entries.narrow()
    stay = len(entries)
    entries.remove()
    assert not any(listeners(m) or m._forward_hooks for m in model.modules())
    return seen, stay


def test_the_model_is_the_entry_point_if_the_loop_calls_it():
    model = small_model()
    assert entered(model, lambda: model(torch.randn(2, 24))) == (["", "."], 2)


def test_submodules_are_entry_points_if_the_loop_calls_them():
    model = nn.ModuleDict({"body": small_model(), "heads": nn.ModuleList([nn.Linear(10, 2), nn.Linear(10, 3)])})

    def calls():
        h = model["body"][:2](torch.randn(2, 24))  # a new Sequential of the model's submodules
        model["heads"][1](model["body"][2:](h))

    seen, stay = entered(model, calls)
    assert seen[:4] == ["body.0", "body.0.", "body.1", "body.1."] and seen[-2:] == ["heads.1", "heads.1."]
    assert stay == 2 * (1 + 6 + 3), "the model, the entered submodules, the outermost"


def test_an_exception_in_a_forward_does_not_hide_the_next_entry():
    model = nn.ModuleDict({"a": small_model()})

    def calls():
        try:
            model["a"](torch.randn(2, 23))
        except RuntimeError:
            model["a"](torch.randn(2, 24))

    assert entered(model, calls)[0] == ["a", "a.", "a", "a."]


class Inside(nn.Module):
    """Enters its autocast region itself, as Accelerate does around a forward."""

    def __init__(self, dtype):
        super().__init__()
        self.body = small_model()
        self.dtype = dtype

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = x * 1
        with torch.autocast("cpu", dtype=self.dtype):
            return self.body(x)


def test_autocast_inside_forward_is_detected(tmp_path):
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16-unscaled")):
        model = Inside(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, optimizer, into=tmp_path / name):
            for _ in range(2):
                model(torch.randn(4, 24)).float().square().mean().backward()
                optimizer.step()
        run = load_run(tmp_path / name)
        assert run.head.config["precision"] == name
    assert [f.code for f in diagnose(run) if f.severity == "error"] == ["fp16-without-scaler"]


def test_detecting_regions_leaves_autocast_unchanged():
    enter = torch.autocast.__enter__
    seen = RegionDetector("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        pass
    assert seen.stop() == torch.float16
    assert torch.autocast.__enter__ is enter
