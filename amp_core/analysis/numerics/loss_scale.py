"""The loss scale: its trace, the skipped steps, and their episodes.

>>> trace = scale_trace(run)  # step, time_s, loss_scale, skipped, growth_tracker, grad_norm
>>> scale_summary(run).skip_frac
0.02
>>> skip_episodes(run)  # one row per group of steps skipped in a row

A GradScaler halves its scale after a skipped step and doubles it after `growth_interval` clean ones in a row
(`torch.amp.GradScaler`). `loss_scale` is the scale in effect at the step, so the change shows one row later.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.steps import attempts, scaler_enabled
from amp_core.store.run import Run

CALIBRATION_STEPS = 25
"""Skips that begin within the first so many steps are calibration: from 2^16 down to 1 takes 16."""
MAX_NAMES = 5
"""Most tensors named per episode; the rest are counted."""


@dataclass(frozen=True)
class ScaleSummary:
    """The loss scale of a whole run. Scales are None where none was recorded."""

    has_scaler: bool
    """A GradScaler was active, dynamic or static."""
    first: float | None
    last: float | None
    """In effect at the first and the last step."""
    lowest: float | None
    highest: float | None
    skips: int
    """Skipped steps; 0 also if skips were not recorded."""
    skips_recorded: bool
    """Whether the run records skips: an imported trace does not."""
    attempts: int
    """Optimizer steps attempted, skipped ones included."""
    skip_frac: float | None
    """Skips over attempts; None without attempts, or where skips were not recorded."""
    calibration_skips: int
    """Skips of the series that begin in the first `CALIBRATION_STEPS`: the scale falls from its first value."""
    settled_steps: int
    """Steps attempted after those of calibration."""
    growths: int
    """Number of times the scale rose from one step to the next."""
    backoffs: int
    """Number of times it fell."""

    @property
    def settled_skips(self) -> int:
        """Skips after calibration."""
        return self.skips - self.calibration_skips


def scale_trace(run: Run) -> pd.DataFrame:
    """One row per step attempted: step, time_s (s), loss_scale (1 without a scaler), skipped, growth_tracker (clean
    steps since the scale last changed), grad_norm (2-norm, unscaled, before clipping; not finite where skipped)."""
    frame = attempts(run)[["step", "time_s", "loss_scale", "skipped", "growth_tracker", "grad_norm"]]
    return frame.reset_index(drop=True)


def skip_episodes(run: Run) -> pd.DataFrame:
    """Series of consecutive skipped steps: first, last (steps), skips, scale_before (at the first), scale_after (at the
    following step; NaN if there is none), tensors (with non-finite gradients, where recorded), and
    origin: `forward` if the loss of the first step was not finite, `backward` if it was, empty if no
    loss was recorded."""
    return run.cached_frame(["steps", "events"], _skip_episodes)


def _skip_episodes(run: Run) -> pd.DataFrame:
    trace = attempts(run)
    skipped = trace["skipped"].to_numpy()
    edges = np.diff(np.concatenate([[False], skipped, [False]]).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)  # ends are exclusive
    steps, scales = trace["step"].to_numpy(), trace["loss_scale"].to_numpy()
    first, last = steps[starts], steps[ends - 1]
    return pd.DataFrame(
        {
            "first": first,
            "last": last,
            "skips": ends - starts,
            "scale_before": scales[starts],
            "scale_after": np.append(scales, np.nan)[ends],
            "tensors": _tensors(run.events, first, last),
            "origin": _origins(trace.iloc[starts]),
        }
    )


def scale_summary(run: Run) -> ScaleSummary:
    """The loss scale in a few numbers."""
    return run.cached(["steps", "events"], _scale_summary)


def _scale_summary(run: Run) -> ScaleSummary:
    trace = attempts(run)
    scales = trace["loss_scale"].dropna().to_numpy()
    skips, count = int(trace["skipped"].sum()), len(trace)
    column = run.table("steps").column("skipped")
    recorded = column.null_count < len(column)
    episodes = skip_episodes(run)
    settled = int(trace["step"].iloc[0]) + CALIBRATION_STEPS if count else 0
    calibrating = episodes[episodes["first"] < settled]
    settled = max(settled, int(calibrating["last"].max()) + 1) if len(calibrating) else settled
    return ScaleSummary(
        has_scaler=scaler_enabled(run),
        first=float(scales[0]) if len(scales) else None,
        last=float(scales[-1]) if len(scales) else None,
        lowest=float(scales.min()) if len(scales) else None,
        highest=float(scales.max()) if len(scales) else None,
        skips=skips,
        skips_recorded=recorded,
        attempts=count,
        skip_frac=skips / count if count and recorded else None,
        calibration_skips=int(calibrating["skips"].sum()),
        settled_steps=int((trace["step"] >= settled).sum()),
        growths=int((scales[1:] > scales[:-1]).sum()),
        backoffs=int((scales[1:] < scales[:-1]).sum()),
    )


def _origins(firsts: pd.DataFrame) -> np.ndarray:
    """Where the first non-finite value arose: in backward if the loss was finite."""
    finite = np.isfinite(firsts["loss"].to_numpy())
    return np.where(firsts["has_loss"].to_numpy(), np.where(finite, "backward", "forward"), "").astype(object)


def _tensors(events: pd.DataFrame, first: np.ndarray, last: np.ndarray) -> list[str]:
    """The names in the events of skips and non-finite gradients, by episode."""
    events = events[events["kind"].isin(["skipped", "non-finite"]) & events["step"].notna() & events["name"].ne("")]
    steps = events["step"].to_numpy(dtype=np.int64)
    episode = np.searchsorted(first, steps, side="right") - 1
    names: list[dict[str, None]] = [{} for _ in first]  # a dict keeps the order
    for i, step, text in zip(episode, steps, events["name"], strict=True):
        if i >= 0 and step <= last[i]:
            names[i].update(dict.fromkeys(str(text).split(", ")))
    return [_joined(list(tensors)) for tensors in names]


def _joined(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
