"""Realistic runs without training: gradients are drawn, scaled, rounded to the format and counted like real ones.

    path = write(tmp_path / "a", "overflowing")         # a closed run folder; SCENARIOS has the names
    with live(tmp_path / "b") as run:                    # a run that is still being written
        run.advance(20)

The loss scaler is the real algorithm (back off on a non-finite gradient, grow after `growth_interval` clean steps), so
skips, growths and the five counts fit together as in a recorded run. Everything follows from the seed.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from amp_core.formats import FORMATS
from amp_core.store.writer import RunWriter
from tests.paths import SAMPLE_RUNS
from tests.synthetic_kernels import GPU, add_window
from tests.synthetic_memory import memory_rows
from tests.synthetic_ops import add_trace

LAYERS = {
    "embed.weight": -16.0,
    "blocks.0.attention.qkv.weight": -11.0,
    "blocks.0.feedforward.up.weight": -12.5,
    "blocks.1.attention.qkv.weight": -9.0,
    "blocks.1.feedforward.up.weight": -10.0,
    "head.weight": -6.0,
}
"""Typical log2 of the gradient's magnitude, unscaled."""

ELEMENTS = 1500
SAMPLES = {p.parent.name: p.parent for p in sorted(SAMPLE_RUNS.glob("*/run.json"))}
"""Recorded runs that come with the project, by name."""
_STORED = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Scenario:
    """The course of a run. `spike` adds to the log2 of all gradients from step `first` to before step `last`."""

    precision: str = "fp16"
    steps: int = 120
    scaler: bool = True
    dynamic: bool = True
    init_scale: float = 65536.0
    growth_interval: int = 40
    shift: float = 0.0
    spikes: tuple[tuple[int, int, float], ...] = ()
    loss_breaks_at: int | None = None
    device: str = "cpu"
    step_ms: float = 40.0
    memory_bytes: int = 300 * 2**20
    optimizers: int = 1
    ranks: int = 1
    profile: str = ""
    bare: bool = False
    trace: str | None = None
    status: str = "finished"
    end_reason: str | None = None
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def stored(self) -> str:
        """Format in which gradients are computed."""
        return self.precision.split("-")[0]


SCENARIOS = {
    "healthy": Scenario(),
    "calibrating": Scenario(init_scale=2.0**22, growth_interval=50),
    "fp32": Scenario(precision="fp32", scaler=False, step_ms=80.0, memory_bytes=500 * 2**20),
    "bf16": Scenario(precision="bf16", scaler=False, device="cuda:0", step_ms=44.0),
    "overflowing": Scenario(shift=4.0, spikes=((60, 64, 8.0), (90, 91, 8.0)), growth_interval=15),
    "collapsing": Scenario(spikes=((50, 10**9, 200.0),), loss_breaks_at=50, status="failed", end_reason="loss is NaN"),
    "underflowing": Scenario(precision="fp16-unscaled", scaler=False, shift=-9.0),
    "static": Scenario(dynamic=False, init_scale=128.0),
    "bf16-with-scaler": Scenario(precision="bf16"),
    "two-optimizers": Scenario(optimizers=2, steps=60),
    "two-ranks": Scenario(ranks=2, steps=60),
    "one-step": Scenario(steps=1),
    "empty": Scenario(steps=0),
    "bare": Scenario(bare=True, steps=60),
    "profiled": Scenario(profile="fp16", device="cuda:0", steps=60),
    "profiled-fp32": Scenario(profile="fp32", precision="fp32", scaler=False, device="cuda:0", steps=60),
    "profiled-cpu": Scenario(profile="cpu", precision="fp32", scaler=False, steps=60),
    "traced": Scenario(trace="cuda", device="cuda:0", steps=20),
    "traced-cpu": Scenario(trace="cpu", precision="bf16", scaler=False, steps=20),
    "traced-foreign": Scenario(trace="foreign", device="cuda:0", steps=0),
    "stopped": Scenario(steps=37, status="stopped", end_reason="stopped by SIGTERM"),
}
"""`bare` has steps and losses only, as a foreign writer may give: every other column is null. `profiled` ones have a
made-up window of kernels, see `tests/synthetic_kernels.py`; `traced` ones a step of operators, see
`tests/synthetic_ops.py`."""


def write(folder: str | os.PathLike[str], scenario: str | Scenario, **changes: Any) -> Path:
    """Write a whole run and close it; `changes` replace fields of the scenario, e.g. `steps=300, seed=1`."""
    what = replace(SCENARIOS[scenario] if isinstance(scenario, str) else scenario, **changes)
    writers = [SyntheticRun(folder, what, rank) for rank in range(what.ranks)]
    for run in reversed(writers):  # rank 0 writes the end of the run
        run.advance(what.steps)
        if what.profile:
            add_window(run.writer, what.profile)
        if what.trace:
            add_trace(run.writer, what.trace)
        run.writer.close(what.status, what.end_reason)
    return Path(folder)


def write_all(folder: Path) -> dict[str, Path]:
    """Every scenario in a folder of its own, by name."""
    return {name: write(folder / name, name) for name in SCENARIOS}


def write_rows(
    folder: str | os.PathLike[str],
    *,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None,
    **tables: dict[str, Any],
) -> Path:
    """A closed run of exactly these rows: `write_rows(path, steps={"step": [0, 1], "loss": [2.0, None]})`."""
    with RunWriter(folder, name=Path(folder).name, config=config, environment=environment, model=model) as writer:
        for table, columns in tables.items():
            writer.append(table, columns)
        for event in events or []:
            writer.event(**event)
    return Path(folder)


@contextlib.contextmanager
def live(
    folder: str | os.PathLike[str], scenario: str | Scenario = "healthy", **changes: Any
) -> Iterator["SyntheticRun"]:
    """A run that is being written by this process: `advance(n)` adds steps. Closed on leaving."""
    run = SyntheticRun(folder, replace(SCENARIOS[scenario] if isinstance(scenario, str) else scenario, **changes))
    try:
        yield run
    finally:
        run.writer.close()


class SyntheticRun:
    """A run that is being written: `writer` is its RunWriter, `path` its folder, `step` the next step."""

    def __init__(self, folder: str | os.PathLike[str], what: Scenario, rank: int = 0) -> None:
        self.what = what
        self.step = 0
        self._random = np.random.default_rng(what.seed)
        # Rounding makes recipes differ slightly under the same seed.
        self._rounding = np.random.default_rng([what.seed, sum(map(ord, what.precision))])
        self._scale = what.init_scale if what.scaler else 1.0
        self._clean = 0
        self._clock = 0.0
        self._samples = 32
        self.writer = RunWriter(
            folder,
            name=Path(folder).name,
            config=_config(what),
            environment={"torch": "2.13.0", "python": "3.11.2", "device": what.device}
            | ({"gpus": [GPU]} if what.profile and what.device.startswith("cuda") else {}),
            model={"class": "TinyModel", "parameters": ELEMENTS * len(LAYERS)},
            rank=rank,
            world_size=what.ranks,
        )
        self.path = Path(folder)
        self.writer.event("started")

    def advance(self, steps: int) -> None:
        """Train `steps` more steps."""
        rows: dict[str, list[Any]] = {}
        tensors: dict[str, list[Any]] = {}
        for _ in range(steps):
            for optimizer in range(self.what.optimizers):
                for name, value in self._one(optimizer, tensors).items():
                    rows.setdefault(name, []).append(value)
            self.step += 1
        if rows:
            self.writer.append("steps", rows)
        if tensors:
            self.writer.append("tensors", tensors)

    def _one(self, optimizer: int, tensors: dict[str, list[Any]]) -> dict[str, Any]:
        what, step, random = self.what, self.step, self._random
        shift = what.shift + sum(up for first, last, up in what.spikes if first <= step < last) - 0.01 * min(step, 200)
        sampled = step % 10 == 0 and optimizer == 0
        largest = {n: 2.0 ** (size + shift) * (4 + 0.3 * random.standard_normal()) for n, size in LAYERS.items()}
        limit = FORMATS[what.stored].overflow_threshold
        bad = [n for n, top in largest.items() if top * self._scale >= limit]
        if sampled and not what.bare:
            self._sample(largest, tensors)
        skipped = bool(bad) and what.scaler
        broken = what.loss_breaks_at is not None and step >= what.loss_breaks_at
        loss = float("nan") if broken else 2.0 + 3.5 * np.exp(-step / 50) + 0.03 * random.standard_normal()
        loss += 0.004 * self._rounding.standard_normal()
        times = what.step_ms * np.array([0.05, 0.3, 0.45, 0.15]) * (1 + 0.03 * np.abs(random.standard_normal(4)))
        watch_ms = 0.05 * what.step_ms if sampled else 0.002 * what.step_ms
        step_ms = float(times.sum()) + watch_ms + 0.02 * what.step_ms
        self._clock += step_ms / 1000
        row: dict[str, Any] = {"step": step, "time_s": self._clock, "loss": loss}
        if not what.bare:
            norm = float(np.sqrt(sum(top * top for top in largest.values())) * 8)
            memory = int(what.memory_bytes * (1 - 0.3 / (1 + step)))
            row |= {
                "loss_scale": self._scale,
                "skipped": skipped,
                "growth_tracker": self._clean if what.scaler and what.dynamic else None,
                "grad_norm": float("inf") if bad else norm,
                "lr": 1e-3,
                "samples": self._samples,
                "step_ms": step_ms,
                "data_ms": times[0],
                "forward_ms": times[1],
                "backward_ms": times[2],
                "optimizer_ms": times[3],
                "watch_ms": watch_ms,
                "memory_allocated_bytes": memory,
                "memory_peak_bytes": memory,
                "optimizer": optimizer,
            }
        if skipped:
            detail = f"{len(bad)} of {len(LAYERS)} gradients non-finite: {', '.join(bad)}"
            self.writer.event("skipped", bad[0], detail, step)
        if optimizer == what.optimizers - 1:
            self._update(skipped)
        if what.device.startswith("cuda") and sampled:
            self._device()
        if step in (1, 4, 16, 64) and optimizer == 0 and not what.bare:
            self.writer.append("memory", memory_rows(step, what.device, what.precision))
        return row

    def _update(self, skipped: bool) -> None:
        what = self.what
        if not (what.scaler and what.dynamic):
            return
        self._clean = 0 if skipped else self._clean + 1
        if skipped:
            self._scale /= 2
        elif self._clean == what.growth_interval:
            self._scale *= 2
            self._clean = 0

    def _sample(self, largest: dict[str, float], tensors: dict[str, list[Any]]) -> None:
        stored = _STORED[self.what.stored]
        for name, top in largest.items():
            values = self._random.standard_normal(ELEMENTS) * np.exp2(1.5 * self._random.standard_normal(ELEMENTS))
            values *= top * self._scale / np.abs(values).max()
            values[: ELEMENTS // 10] = 0.0  # true zeros, as behind a ReLU
            for kind, dtype in (("output_grad", stored), ("weight_grad", "float32")):
                module = name.removesuffix(".weight")
                row = measure(rounded(values, stored), dtype)
                row |= {"step": self.step, "name": module if kind == "output_grad" else name, "kind": kind}
                for column, value in (row | {"dtype": dtype, "loss_scale": self._scale}).items():
                    tensors.setdefault(column, []).append(value)

    def _device(self) -> None:
        self.writer.append(
            "device",
            {
                "time_s": [self._clock],
                "index": [0],
                "gpu_util_frac": [0.9],
                "memory_used_bytes": [self.what.memory_bytes + 2**29],
                "power_w": [280.0],
                "temperature_c": [61.0],
                "memory_total_bytes": [80 * 2**30],
                "power_limit_w": [700.0],
                "sm_clock_mhz": [1980.0],
                "mem_clock_mhz": [2619.0],
                "throttle": ["none"],
            },
        )


def rounded(values: np.ndarray, stored: str) -> np.ndarray:
    """`values` rounded to float16, bfloat16 or float32 (ties to even), as float32."""
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
        if stored == "float16":
            return single.astype(np.float16).astype(np.float32)
    if stored == "bfloat16":
        bits = single.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return single


def measure(values: np.ndarray, dtype: str) -> dict[str, Any]:
    """The columns of `tensors` for a tensor of `dtype` with these values, in plain NumPy."""
    tiny = {f.dtype: f.min_normal for f in FORMATS.values()}[dtype]
    size = np.abs(values.astype(np.float64))
    finite = size[np.isfinite(size)]
    nonzero = finite[finite > 0]
    exponents = np.frexp(nonzero)[1] - 1
    low = int(exponents.min()) if len(nonzero) else 0
    return {
        "numel": values.size,
        "zero": int((finite == 0).sum()),
        "subnormal": int((nonzero < tiny).sum()),
        "normal": int((nonzero >= tiny).sum()),
        "inf": int(np.isinf(size).sum()),
        "nan": int(np.isnan(size).sum()),
        "absmax": float(finite.max(initial=0.0)),
        "absmin": float(nonzero.min()) if len(nonzero) else 0.0,
        "rms": float(np.sqrt(np.mean(finite**2))) if len(finite) else 0.0,
        "abs_sum": float(finite.sum()),
        "exp_min": low,
        "exp_counts": np.bincount(exponents - low) if len(nonzero) else np.zeros(0, np.int64),
    }


def _config(what: Scenario) -> dict[str, Any]:
    if what.bare:
        return {"source": "import"} | what.config
    scaler = {
        "enabled": True,
        "init_scale": what.init_scale,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": what.growth_interval,
    }
    return {
        "source": "train",
        "workload": "text-gpt",
        "size": "tiny",
        "precision": what.precision,
        "autocast_dtype": {"fp16": "float16", "bf16": "bfloat16", "fp32": None}[what.stored],
        "scaler": scaler if what.scaler else None,
        "optimizers": ["AdamW"] * what.optimizers,
        "device": what.device,
        "steps": what.steps,
        "batch_size": 32,
        "accumulate": 1,
        "clip_norm": 1.0,
        "lr": 1e-3,
        "optimizer": "adamw",
        "seed": what.seed,
        "loss_scale": "dynamic" if what.dynamic else what.init_scale,
        "init_scale": what.init_scale,
        "growth_interval": what.growth_interval,
        "every": 10,
        "compile": False,
        "deterministic": True,
        "data": "synthetic",
    } | what.config
