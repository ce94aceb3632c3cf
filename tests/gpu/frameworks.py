"""FP16 training on a GPU in each framework, with the scaler that the framework itself creates."""

import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_core import diagnose, load_run
from tests.gpu.checks import Place, Row
from tests.gpu.loops import scratch
from tests.record.frameworks.examples import EVERY, EXAMPLES
from tests.record.frameworks.healthy import FULL, missing_values

STEPS = 40
NAMES = ("accelerate", "transformers", "lightning", "keras")


def frameworks(place: Place) -> Iterator[Row]:
    """The example of each framework, bare and watched. A framework that is not installed is skipped."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    warnings.simplefilter("ignore")
    torch.backends.cudnn.deterministic = True
    for name in NAMES:
        missing = next((m for m in (EXAMPLES[name].package, "sklearn") if find_spec(m) is None), None)
        if missing is not None:
            yield Row(f"fp16 in {name}", "", f"{missing} is not installed", "skipped")
            continue
        with scratch() as folder, sdpa_kernel(SDPBackend.MATH):
            yield _row(place, name, folder / "run")


def _row(place: Place, name: str, into: Path) -> Row:
    example = EXAMPLES[name]
    steps = 12 if place.quick else STEPS
    # Some GPU kernels sum in a varying order: losses that differ between bare trainings prove nothing.
    bare, again = (example.train("fp16", steps, None, device=place.device.type).losses for _ in range(2))
    done = example.train("fp16", steps, into, device=place.device.type)
    run = load_run(into)
    wrong = missing_values(run, steps, EVERY, done.parameters, example.columns or FULL)
    if bare != done.losses and bare == again:
        wrong.append(f"{sum(a != b for a, b in zip(bare, done.losses, strict=True))} losses differ")
    scaler = run.head.config.get("scaler") or {}
    if run.head.config.get("precision") != "fp16" or not scaler.get("enabled"):
        wrong.append(f"precision {run.head.config.get('precision')}, scaler {scaler or None}")
    wrong += [f"finding: {f.code}, {f.title}" for f in diagnose(run) if f.severity == "error"]
    same = "the same" if bare == done.losses else "differ without watching too"
    scale = run.steps.loss_scale.iloc[-1]
    return Row(
        f"fp16 in {name}",
        "losses equal bit for bit, tables complete, the framework's scaler detected, no finding of severity error",
        "; ".join(wrong) or f"losses of {steps} steps {same}, loss scale {scale:g}, {run.head.config['framework']}",
        "FAIL" if wrong else "pass",
    )
