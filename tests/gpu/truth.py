"""Compare predictions, the safe window and tensor-core use with measurements of the device."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from amp_core import Run, load_run
from amp_core.analysis import predicted_and_audited, safe_window, tensor_core_use, what_if
from amp_core.analysis.numerics.safe_window import MIN_COSINE
from amp_core.analysis.numerics.what_if import MAX_SOURCE_UNDERFLOW_FRAC
from amp_core.record import watch
from amp_core.train import TrainConfig, train
from tests.gpu.checks import Place, Row
from tests.gpu.loops import Loop, scratch

LOG2_SCALES = range(-4, 17, 2)
STEPS = 12
IDLE = 0.05
"""Tensor cores count as idle up to this share of the time."""
OFF = 0.01
"""Largest error of a predicted share of lost elements."""


def prediction(place: Place) -> Iterator[Row]:
    """Compare predicted with audited underflow, and the recommended window with audits inside and outside of it."""
    for workload in ("text-gpt", "text-lstm", "text-bert")[: 1 if place.quick else 3]:
        with scratch() as folder:
            loop = Loop(place, workload, "tiny", "fp16", into=folder / "run", every=1)
            loop.run(STEPS - 1)
            state = {k: v.clone() for k, v in loop.model.state_dict().items()}
            batch = next(loop.batches)
            loop.batches = iter([batch])

            def loss(loop: Loop = loop, batch: object = batch) -> torch.Tensor:
                return loop.workload.loss_fn(loop.model, batch)

            assert loop.recorder is not None
            loop.run(1)
            loop.model.load_state_dict(state)
            loop.recorder.audit(loss, [2.0**k for k in LOG2_SCALES])
            loop.recorder.close()
            run = load_run(folder / "run")
            yield _predictions(place, workload, run)
            yield _window(place, workload, run, loop, loss, folder)
            loop.close()


def matrices(run: Run, names: "pd.Series[str]") -> "pd.Series[bool]":
    """Whether each of the named weights has at least two dimensions."""
    return names.map(lambda name: len(run.head.model["shapes"][name]) > 1)


def _predictions(place: Place, workload: str, run: Run) -> Row:
    audits = predicted_and_audited(run)
    step = int(audits["step"].iloc[0])
    source = what_if(run, ("fp16",), range(-4, 17), kinds=("weight_grad",), step=step)
    source = source.set_index(["name", "log2_scale"])["source_underflow_frac"]
    keys = pd.MultiIndex.from_arrays([audits["name"], np.log2(audits["loss_scale"]).astype(int)])
    healthy = source.reindex(keys).to_numpy() <= MAX_SOURCE_UNDERFLOW_FRAC
    judged = matrices(run, audits["name"]) & audits["audited_frac"].notna() & healthy
    off = (audits["predicted_frac"] - audits["audited_frac"]).abs()[judged]
    return Row(
        f"predicted against audited underflow, {workload} tiny",
        f"within {OFF} of elements",
        f"at most {off.max():.4f} over {len(off)} pairs of matrix and loss scale",
        "pass" if len(off) and off.max() < OFF else "FAIL",
        {"most": float(off.max()), "pairs": len(off)},
    )


def _window(place: Place, workload: str, run: Run, loop: Loop, loss: object, folder: Path) -> Row:
    window = safe_window(run)
    lowest, highest = np.log2([window.lowest, window.highest])
    inside = [2.0**k for k in np.arange(lowest, highest + 1, 3)] + [window.highest]
    below, above = window.lowest / 16, window.highest * 4
    # no optimizer step: all audits are of the same weights
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
    with watch(loop.model, optimizer, into=folder / "audits") as recorder:
        loss().backward()  # type: ignore[operator]
        recorder.audit(loss, [*inside, below, above], precision="fp16")  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    audits = load_run(folder / "audits").audits
    audits = audits[matrices(run, audits["name"]) & (audits["nonzero"] > 0)]
    at = dict(iter(audits.groupby("loss_scale")))
    worst = min(at[scale]["cosine"].min() for scale in inside)
    lost = at[below]["cosine"].min() < MIN_COSINE or (at[below]["lost"] / at[below]["nonzero"]).max() > OFF
    overflows = bool((at[above]["nonfinite"] > 0).any())
    good = worst >= MIN_COSINE and all((at[scale]["nonfinite"] == 0).all() for scale in inside) and lost and overflows
    return Row(
        f"the safe window, {workload} tiny",
        f"cosine ≥ {MIN_COSINE} inside; something fails at 1/16 of its lower end and 4 × its upper end",
        f"2^{lowest:g} to 2^{highest:g}: cosine ≥ {worst:.5f} inside; "
        f"{'fails' if lost else 'holds'} below, {'fails' if overflows else 'holds'} above",
        "pass" if good else "FAIL",
        {"lowest": window.lowest, "highest": window.highest, "worst_cosine": float(worst)},
    )


def tensor_cores(place: Place) -> Iterator[Row]:
    """Compare the kernel table with the counter, on runs that are mostly matrix products."""
    size, steps = ("tiny", 30) if place.quick else ("large", 100)
    for recipe, batch in (("fp16", 32), ("fp32", 8)):
        count = steps if recipe == "fp16" else steps // 2
        with scratch() as folder:
            config = TrainConfig(
                workload="text-bert",
                size=size,
                precision=recipe,
                batch_size=batch,
                steps=count,
                fused=True,
                every=1000,
                evaluate=False,
                profile=(count // 2, count // 2 + 3),
                device=str(place.device),
            )
            train(config, folder / "run", stop=lambda: None)
            use = tensor_core_use(load_run(folder / "run"))
        place.free()
        counter, kernels = use.counter_frac, use.tensor_wall_frac
        shares = f"counter {_share(counter)} ({use.counter_samples} samples of the {use.counter_where or 'run'}), "
        shares += f"kernels {_share(kernels)} of the time, of unknown name {_share(use.unknown_frac)}"
        numbers = {"counter": counter, "kernels": kernels, "samples": use.counter_samples}
        if counter is None or kernels is None:
            hopper = use.capability is not None and use.capability >= (9, 0)
            yield Row(_title(recipe, size), "", shares, place.judged(not hopper), numbers)
        elif recipe == "fp16":
            good = kernels / 4 < counter < kernels
            yield Row(
                _title(recipe, size),
                "a quarter of the kernels' < counter < kernels'",
                shares,
                place.judged(good),
                numbers,
            )
        else:  # FP32 attention has a kernel that computes each product as three TF32 products
            yield Row(_title(recipe, size), f"counter < {IDLE:.0%}", shares, place.judged(counter < IDLE), numbers)


def _title(recipe: str, size: str) -> str:
    return f"tensor cores at work, text-bert {size}, {recipe}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
