"""One profiled step over time: what ran on each stream, how long work waited in the queue, how full the device was.

>>> rows = timeline(run)
>>> timeline_bars(rows)[["lane", "label", "start_ms", "end_ms"]]
>>> device_use(rows).queue_length
41.3
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.step_cost import PARTS, part_of
from amp_core.store.run import Run

MAX_BARS = 3000
"""Approximate largest number of bars: closer neighbours of one part are merged."""
MAX_PLACES = 600
"""Where parts alternate in less time than can be seen, the width is cut into so many places, each of the part with
most of the time in it."""
PHASE_LANE = "phase"
_TEXTS = ["name", "device", "category", "tensor_core", "precision", "phase", "module", "op"]
_NUMBERS = ["step", "start_us", "total_us", "queue_us", "stream", "occupancy_frac", "blocks_per_sm", "rank"]


@dataclass(frozen=True)
class DeviceUse:
    """How the device was used in the step. None if the trace does not record it."""

    queue_length: float | None
    """Work that is launched and has not begun, mean over time."""
    queue_empty_frac: float | None
    """Share of the time without any."""
    occupancy_frac: float | None
    """Occupancy as the profiler estimates it, mean over kernel time without communication, as the next."""
    small_frac: float | None
    """Share of kernel time in kernels with less than one block per multiprocessor, which cannot fill the device."""


def timeline(run: Run) -> pd.DataFrame:
    """Rows of `timeline` of the lowest rank, in order, with end_us and part and label (of `step_cost`); null texts are
    "", null numbers NaN. Kernels shorter than the profiler's clock can tell have a duration of 0."""
    return run.cached_frame(["timeline"], _timeline)


def _timeline(run: Run) -> pd.DataFrame:
    frame: pd.DataFrame = run.timeline
    frame[_NUMBERS] = frame[_NUMBERS].astype(float)
    frame[_TEXTS] = frame[_TEXTS].astype(object).where(frame[_TEXTS].notna(), "").astype(str)
    frame = frame[np.isfinite(frame["start_us"]) & (frame["total_us"] >= 0) & (frame["rank"] == frame["rank"].min())]
    frame["end_us"] = frame["start_us"] + frame["total_us"]
    frame["part"] = part_of(frame) if len(frame) else pd.Series(dtype=object)
    frame["label"] = frame["part"].map(PARTS)
    return frame.sort_values("start_us", kind="stable", ignore_index=True)


def timeline_bars(frame: pd.DataFrame) -> pd.DataFrame:
    """Bars of a timeline: lane (stream, and device where there are several; first the phases), part, label, start_ms,
    end_ms, name (of the longest kernel in it), count. Neighbours of one part are merged where they are closer than can
    be seen, and where parts alternate faster than that, a bar is of the part with most of the time."""
    columns = ["lane", "part", "label", "start_ms", "end_ms", "name", "count", "step"]
    if not len(frame):
        return pd.DataFrame(columns=columns)
    several = frame["device"].nunique() > 1
    stream = frame["stream"].map(lambda number: "" if np.isnan(number) else f"{number:.0f}")
    lane = (frame["device"] + " " if several else "") + "stream " + stream
    phases = frame[frame["phase"] != ""]
    rows = pd.concat(
        [phases.assign(lane=PHASE_LANE, part=phases["phase"], label=phases["phase"]), frame.assign(lane=lane)]
    )
    width = float(frame["end_us"].max() - frame["start_us"].min())
    gap = 0.0
    for share in (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
        gap = share * width
        bars = _merged(rows, gap)
        if len(bars) <= MAX_BARS:
            break
    if len(bars) > MAX_BARS:
        bars = _merged(_by_place(rows, width / MAX_PLACES), width / MAX_PLACES)
    return bars.assign(step=frame["step"].iloc[0])[columns]


def _by_place(rows: pd.DataFrame, width: float) -> pd.DataFrame:
    """The rows with the part that has most of the time in their place, which is so wide; phases as they are."""
    place = (rows["start_us"] // width).where(rows["lane"] != PHASE_LANE, -1.0)
    us = rows.groupby(["lane", place, "part", "label"])["total_us"].sum().reset_index()
    most = us.loc[us.groupby(["lane", "start_us"])["total_us"].idxmax()].set_index(["lane", "start_us"])
    at = pd.MultiIndex.from_arrays([rows["lane"], place])
    chosen = most.loc[most.index.get_level_values("lane") != PHASE_LANE].reindex(at)
    kept = chosen["part"].isna().to_numpy()
    part, label = (rows[name].where(kept, chosen[name].to_numpy()) for name in ("part", "label"))
    return rows.assign(part=part, label=label)


def _merged(rows: pd.DataFrame, gap: float) -> pd.DataFrame:
    """Neighbours in a lane as one bar: phases always, kernels of one part that are at most `gap` apart."""
    rows = rows.sort_values(["lane", "start_us"], kind="stable", ignore_index=True)
    same = (rows["lane"] == rows["lane"].shift()) & (rows["part"] == rows["part"].shift())
    reach = rows.groupby("lane")["end_us"].cummax().shift()
    near = rows["start_us"] - reach <= gap if gap else pd.Series(False, index=rows.index)
    group = (~(same & (near | (rows["lane"] == PHASE_LANE)))).cumsum()
    longest = rows.loc[rows.groupby(group)["total_us"].idxmax()].set_axis(group.unique())
    by = rows.groupby(group)
    return pd.DataFrame(
        {
            "lane": longest["lane"],
            "part": longest["part"],
            "label": longest["label"],
            "start_ms": by["start_us"].min() / 1e3,
            "end_ms": by["end_us"].max() / 1e3,
            "name": longest["name"],
            "count": by.size(),
        }
    ).reset_index(drop=True)


def device_use(frame: pd.DataFrame) -> DeviceUse:
    """Queue, occupancy and size of the kernels of a timeline."""
    launched = frame[frame["queue_us"].notna()]
    length = empty = None
    if len(launched):
        begin, end = launched["start_us"] - launched["queue_us"], launched["start_us"]
        low, high = float(frame["start_us"].min()), float(frame["end_us"].max())
        edges = np.clip(np.concatenate([begin, end]), low, high)
        change = np.repeat([1, -1], len(launched))
        order = np.lexsort((change, edges))
        edges, depth = edges[order], np.cumsum(change[order])
        lasts = np.diff(np.append(edges, high))
        before = float(edges[0]) - low
        length = float((depth * lasts).sum() / (high - low)) if high > low else None
        empty = float((lasts[depth == 0].sum() + before) / (high - low)) if high > low else None
    computing = frame[(frame["part"] != "communication") & (frame["total_us"] > 0)]  # NCCL takes few blocks on purpose
    occupancy = computing[computing["occupancy_frac"].notna()]
    blocks = computing[computing["blocks_per_sm"].notna()]
    return DeviceUse(
        length,
        empty,
        float(np.average(occupancy["occupancy_frac"], weights=occupancy["total_us"])) if len(occupancy) else None,
        float(blocks.loc[blocks["blocks_per_sm"] < 1, "total_us"].sum() / blocks["total_us"].sum())
        if len(blocks)
        else None,
    )
