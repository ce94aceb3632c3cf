"""One attempted optimizer step: what was gathered for it, and the rows it becomes."""

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import torch

from amp_core.phases import PHASES
from amp_core.record.measure import INFINITIES, NANS, SQUARES, merged, packed_length, unpack_together
from amp_core.record.parcel import Parcel

_NAMED = 8
"""Non-finite gradients named in one event; the rest is counted."""


@dataclass
class Attempt:
    """An optimizer step from the first look at its gradients to the rows written for it."""

    step: int
    optimizer: int
    sampled: bool
    bare: bool = False
    """Whether the step was run with as few hooks as can be; see `calibration`."""
    parcel: Parcel = field(default_factory=Parcel)
    gradients: list[str] = field(default_factory=list)
    """Names of the optimizer's gradients, in the model's order."""
    norm_order: list[int] = field(default_factory=list)
    """Which of `gradients` each entry of `norms` in the parcel is of."""
    measured: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, kind and dtype of each measurement, in the order they were put in; a module that ran twice has two."""
    capped: list[tuple[str, str]] = field(default_factory=list)
    """Name and dtype of each measurement of a capped weight gradient, likewise."""
    vectors: dict[str, list[str]] = field(default_factory=lambda: {"measured": [], "capped": []})
    """In which parts of the parcel they lie, one after another."""
    scaled: bool = False
    """Whether the gradients were looked at before they were unscaled."""
    put_in: set[str] = field(default_factory=set)
    """Names of what was put into the parcel."""
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    seen: frozenset[str] = frozenset()
    logged: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    samples: int = 0
    memory: tuple[int, int] = (0, 0)
    time_s: float = 0.0
    _grad_norm: tuple[float | None] | None = None
    """Once it was asked for."""
    _packed: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Likewise."""

    def put(self, key: str, value: torch.Tensor | float | None) -> None:
        """Keep a tensor or a number of the step; None, and a tensor without values (meta), is kept as nothing."""
        if value is not None and not (isinstance(value, torch.Tensor) and value.is_meta):
            self.parcel.put(key, value)
            self.put_in.add(key)

    def add(self, kind: str, named: Sequence[tuple[str, str]], packed: torch.Tensor) -> None:
        """The same as `add_all` for tensors of one kind, by name and dtype."""
        self.add_all([(name, kind, dtype) for name, dtype in named], packed)

    def add_all(self, keys: Sequence[tuple[str, str, str]], packed: torch.Tensor) -> None:
        """Keep measurements of tensors, by name, kind and dtype, whose packed vectors come one after another."""
        self.measured += keys
        self._keep("measured", packed)

    def add_capped(self, named: Sequence[tuple[str, str]], packed: torch.Tensor) -> None:
        """Keep measurements of weight gradients capped by channel, likewise."""
        self.capped += named
        self._keep("capped", packed)

    def _keep(self, what: str, packed: torch.Tensor) -> None:
        keys = self.vectors[what]
        keys.append(f"{what}:{len(keys)}")
        self.parcel.put(keys[-1], packed)

    @property
    def sort(self) -> str:
        """What kind of step it is to `calibration`."""
        return "sampled" if self.sampled else "bare" if self.bare else "plain"

    @property
    def all_measured(self) -> bool:
        """Whether every gradient was measured, in order and on one device, so that their norms are known too."""
        return 0 < len(self.gradients) <= len(self.measured) and all(
            kind == "weight_grad" and name == gradient
            for (name, kind, _), gradient in zip(self.measured, self.gradients, strict=False)
        )

    @property
    def norms(self) -> tuple[list[int], npt.NDArray[np.float64]]:
        """2-norms of gradients as they were looked at, and which of `gradients` each is of."""
        if self.parcel.has("norms"):
            return self.norm_order, self.parcel.values("norms")
        if not self.all_measured:
            return [], np.zeros(0)
        lengths = [packed_length(dtype) for _, _, dtype in self.measured[: len(self.gradients)]]
        starts = np.cumsum([0, *lengths[:-1]])
        packed = self.packed("measured")
        found = np.sqrt(packed[starts + SQUARES])
        found[packed[starts + INFINITIES] > 0] = np.inf
        found[packed[starts + NANS] > 0] = np.nan
        return list(range(len(starts))), found

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of all gradients together, without the loss scale; None where it is not known."""
        if self._grad_norm is None:  # what functools has for this takes a lock, which each step would pay for
            self._grad_norm = (self._norm_of_all(),)
        return self._grad_norm[0]

    def _norm_of_all(self) -> float | None:
        _, norms = self.norms
        scale = self.multiplied_by("weight_grad")
        if not len(norms) or not scale:  # multiplied by 0, nothing is left to tell it from
            return None
        if scale != 1.0:
            norms = norms / scale
        return math.sqrt(norms.dot(norms))

    def packed(self, what: str) -> npt.NDArray[np.float64]:
        """The packed vectors of all `measured`, or all `capped`."""
        if what not in self._packed:
            self._packed[what] = self.parcel.joined(self.vectors[what])
        return self._packed[what]

    def send(self) -> None:
        """Nothing more comes: start the one copy to the host."""
        for key, value in self.logged.items():
            if isinstance(value, torch.Tensor):
                self.put(f"logged:{key}", value)
        self.parcel.send()

    def given(self, key: str) -> float | None:
        """What the loop logged under `key`."""
        if key not in self.logged:
            return None
        value = self.parcel.value(f"logged:{key}")
        logged = self.logged[key]
        return value if value is not None or isinstance(logged, torch.Tensor) else logged

    @property
    def loss_scale(self) -> float:
        """The scale in effect; 1 without a scaler. It may be 0, where one ends that is halved at every step."""
        scale = self.parcel.value("loss_scale")
        return 1.0 if scale is None else scale

    def multiplied_by(self, kind: str) -> float:
        """By what the values of that kind were multiplied when they were looked at."""
        if kind == "output_grad":
            return self.loss_scale
        return self.loss_scale if kind == "weight_grad" and self.scaled else 1.0

    @property
    def skipped(self) -> bool:
        """Whether the scaler found a non-finite gradient."""
        return bool(self.parcel.value("found_inf"))


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Now and at most so far: allocated by torch on CUDA, else the resident set of this process."""
    if device.type == "cuda":
        # `memory_allocated` and `max_memory_allocated` each sort a hundred figures into a dictionary of their own.
        allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
        return allocated["current"], max(allocated["peak"], earlier_peaks.get(device, 0))
    now = resident_bytes()
    global _peak
    _peak = max(_peak, now)
    return now, _peak


_peak = 0
earlier_peaks: dict[torch.device, int] = {}
"""Highest use of a CUDA device before torch's own peak was begun anew; who begins it anew writes it here first."""


def forget_peaks() -> None:
    """Find the highest use of memory anew: for a process that trains once more. torch's own peak is left alone."""
    global _peak
    _peak = 0
    earlier_peaks.clear()


def resident_bytes() -> int:
    """The resident set of this process."""
    file = _statm(os.getpid())
    if file is None:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(file, 128, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _statm(pid: int) -> int | None:
    """This process's memory in pages, where there is such a file (Linux). It stays open: opening it takes longest."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def step_row(attempt: Attempt, times: Mapping[str, float]) -> dict[str, list[Any]]:
    """The row of `steps`. `times` are the milliseconds of each phase."""
    loss, norm, rate, samples = (attempt.given(k) for k in ("loss", "grad_norm", "lr", "samples"))
    tracker = attempt.parcel.value("growth_tracker")
    missed = {"backward"} - attempt.seen
    missed |= set() if "forward" in attempt.seen else {"data", "forward"}
    return {
        "step": [attempt.step],
        "time_s": [attempt.time_s],
        "loss": [loss if loss is not None else attempt.parcel.value("loss")],
        "loss_scale": [attempt.loss_scale],
        "skipped": [attempt.skipped],
        "growth_tracker": [int(tracker) if tracker is not None else None],
        "grad_norm": [norm if norm is not None else attempt.grad_norm],
        "lr": [rate if rate is not None else attempt.lr],
        "samples": [int(samples) if samples is not None and math.isfinite(samples) else attempt.samples or None],
        "step_ms": [sum(times.values())],
        **{phase.column: [times[name] if name not in missed else None] for name, phase in PHASES.items()},
        "memory_allocated_bytes": [attempt.memory[0]],
        "memory_peak_bytes": [attempt.memory[1]],
        "optimizer": [attempt.optimizer],
    }


def tensor_rows(attempt: Attempt) -> dict[str, Any]:
    """The rows of `tensors`, one per tensor and kind; what passed several times in a step is counted together."""
    keys, packed = _together(attempt.measured, attempt.packed("measured"))
    found, counts = unpack_together(packed, [dtype for _, _, dtype in keys])
    scales = {kind: attempt.multiplied_by(kind) for kind in {kind for _, kind, _ in keys}}
    rows: dict[str, Any] = {
        "step": np.full(len(keys), attempt.step),
        "name": _texts(tuple(name for name, _, _ in keys)),
        "kind": _texts(tuple(kind for _, kind, _ in keys)),
        "dtype": _texts(tuple(dtype for _, _, dtype in keys)),
        "loss_scale": np.array([scales[kind] for _, kind, _ in keys]),
        "exp_counts": _histograms(counts),
    }
    if attempt.capped:
        caps, histograms = unpack_together(attempt.packed("capped"), [dtype for _, dtype in attempt.capped])
        place = {name: i for i, (name, _) in enumerate(attempt.capped)}
        at = [place.get(name) if kind == "weight_grad" else None for name, kind, _ in keys]
        rows["capped_min"] = [int(caps["exp_min"][i]) if i is not None else None for i in at]
        rows["capped_counts"] = _histograms([histograms[i] if i is not None else None for i in at])
    same = ("numel", "zero", "subnormal", "normal", "inf", "nan", "absmax", "rms", "exp_min", "absmin", "abs_sum")
    return rows | {column: found[column] for column in same}


def _together(
    measured: list[tuple[str, str, str]], packed: npt.NDArray[np.float64]
) -> tuple[list[tuple[str, str, str]], npt.NDArray[np.float64]]:
    """One measurement for each name, kind and dtype, in the order of their first."""
    if len(set(measured)) == len(measured):
        return measured, packed
    vectors: dict[tuple[str, str, str], npt.NDArray[np.float64]] = {}
    end = 0
    for key in measured:
        start, end = end, end + packed_length(key[2])
        before = vectors.get(key)
        vectors[key] = packed[start:end] if before is None else merged(before, packed[start:end])
    return list(vectors), np.concatenate(list(vectors.values()))


@functools.lru_cache(maxsize=64)
def _texts(values: tuple[str, ...]) -> pa.Array:
    """A column of words: the same at every sampled step, so made once."""
    encoded = [value.encode("utf-8", "replace") for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def _histograms(counts: Sequence[npt.NDArray[np.int64] | None]) -> pa.Array:
    """A column of exponent counts, null where there are none."""
    given = [one for one in counts if one is not None]
    missing = None
    if len(given) < len(counts):
        missing = pa.py_buffer(np.packbits([one is not None for one in counts], bitorder="little"))
    offsets = np.cumsum([0, *(len(one) if one is not None else 0 for one in counts)], dtype=np.int32)
    values = np.concatenate(given) if given else np.zeros(0, np.int64)
    items = pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(counts), [missing, pa.py_buffer(offsets)], children=[items])


def event_rows(attempt: Attempt) -> dict[str, list[Any]]:
    """An event for a skipped step, or, where no scaler guards it, for one with non-finite gradients; mostly none."""
    bad = _nonfinite(attempt)
    scaled = list(_logged_scaled(attempt))
    if not (bad or scaled or attempt.skipped):
        return {}
    rows: dict[str, list[Any]] = {
        column: [] for column in ("step", "time_s", "kind", "name", "detail", "value", "limit")
    }
    for name, ratio in scaled:
        rows["step"].append(attempt.step)
        rows["time_s"].append(attempt.time_s)
        rows["kind"].append("logged scaled")
        rows["name"].append(name)
        rows["detail"].append("")
        rows["value"].append(ratio)
        rows["limit"].append(attempt.loss_scale)
    if attempt.skipped or bad:
        # Gradients arrive from the last layer to the first: what is non-finite latest in the model was so first.
        first = bad[-1] if bad else ""
        named = ", ".join(reversed(bad[-_NAMED:])) + (", …" if len(bad) > _NAMED else "")
        rows["step"].append(attempt.step)
        rows["time_s"].append(attempt.time_s)
        rows["kind"].append("skipped" if attempt.skipped else "non-finite")
        rows["name"].append(first)
        rows["detail"].append(f"{len(bad)} of {len(attempt.gradients)} gradients non-finite: {named}" if bad else "")
        rows["value"].append(None)
        rows["limit"].append(None)
    return rows


def _logged_scaled(attempt: Attempt) -> Iterator[tuple[str, float]]:
    """What the loop logged is the true value times the loss scale, within 1 %: its name, and logged over true."""
    if attempt.loss_scale < 2 or attempt.skipped:
        return
    for name, true in (("loss", attempt.parcel.value("loss")), ("grad_norm", attempt.grad_norm)):
        logged = attempt.given(name)
        if logged is None or not true or not math.isfinite(ratio := logged / true):
            continue
        if abs(ratio / attempt.loss_scale - 1) < 0.01:
            yield name, ratio


def _nonfinite(attempt: Attempt) -> list[str]:
    """Names of gradients that hold an infinity or a NaN, in the model's order."""
    if attempt.grad_norm is not None and math.isfinite(attempt.grad_norm):
        return []
    order, norms = attempt.norms
    return [
        attempt.gradients[i] for i in sorted(i for i, norm in zip(order, norms, strict=True) if not np.isfinite(norm))
    ]
