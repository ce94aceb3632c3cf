"""The ranks of a distributed training side by side: which is slow, which disagrees, which failed and why.

>>> rank_table(run)  # one row per rank: times, skips, memory, how it ended
>>> rank_spread(run).slowest
3
>>> rank_cause(run).in_words()
'rank 1 failed after step 12: ValueError: boom'

Every rank records independently. Ranks wait for each other where they exchange gradients: in backward, and with FSDP in
forward too. So all have nearly the same step time, and a slow rank shows in the phases without waiting. Traces of
several ranks show how long each waits in collectives, and for which rank.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.performance.rank_waiting import WaitedFor, rank_waiting, waited_for
from amp_core.analysis.steps import TIMES, median, warmup_steps
from amp_core.store.run import Run

WAITING_PHASES = {"ddp": ("backward_ms",), "fsdp": ("forward_ms", "backward_ms", "optimizer_ms")}
"""Phases in which a rank may wait for others, by kind of parallelism; those of DDP where that is not known. With
FSDP clipping by norm and a scaler's check wait too."""

_LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was)|closed by peer|broken pipe|timed? ?out|nccl|gloo|process ?group|distbackend"
    r"|diststore|tcpstore|watchdog|remote process|socket",
    re.IGNORECASE,
)
"""What torch reports when the peer process is gone: a consequence, not a cause."""

NO_END = "it was killed, ran out of memory, or its machine went down"
NEVER_BEGAN = "it never started recording"


@dataclass(frozen=True)
class RankEnd:
    """How one process ended."""

    rank: int
    status: str
    """`running`, `finished`, `stopped`, `failed`, or `gone` if it recorded no end."""
    reason: str
    last_step: int | None
    """The last step that it recorded."""
    ended_s: float
    """Seconds since 1970; NaN if not known."""

    def in_words(self) -> str:
        """For instance `rank 1 failed after step 12: ValueError: boom`."""
        after = f" after step {self.last_step:,}" if self.last_step is not None else " before its first step"
        verb = "recorded no end" if self.status == "gone" else self.status
        return f"rank {self.rank} {verb}{after}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class RankSpread:
    """The spread of ranks in the time in which they do not wait for each other."""

    slowest: int
    own_ms: float
    """Median time per step that the slowest rank spends in these phases; from collectives, its time without waiting."""
    median_ms: float
    """Median of that time over ranks."""
    frac: float
    """Excess of the slowest rank over the median, as a share of the step time (0–1): how long others wait."""
    phases: tuple[str, ...]
    """The phases that count, e.g. `data`, `forward`; empty if waiting was measured in collectives."""


def rank_ends(run: Run) -> list[RankEnd]:
    """How each process ended, by rank. A run of imported traces has only the ranks whose traces were given."""
    events = run.table("events")
    frame = events.filter(pc.is_in(events.column("kind"), pa.array(["started", "ended"]))).to_pandas()
    steps = run.table("steps").select(["step", "rank"]).to_pandas().groupby("rank")["step"].max()
    known = {int(r) for r in [*frame["rank"].dropna(), *steps.index]}
    live = run.is_live
    if run.head.config.get("source") == "import" or run.damaged("events"):  # how each ended is not known
        return [RankEnd(rank, run.status, "", None, np.nan) for rank in sorted(known)]
    events_of_rank = {int(rank): rows for rank, rows in frame.sort_values("time_s", kind="stable").groupby("rank")}
    last_steps = {int(rank): int(step) for rank, step in steps.items()}
    ends = []
    for rank in sorted(known | set(range(run.head.world_size))):
        last_step = last_steps.get(rank)
        if rank not in events_of_rank:
            status, reason = ("running", "") if live else ("gone", NO_END if rank in known else NEVER_BEGAN)
            ends.append(RankEnd(rank, status, reason, last_step, np.nan))
            continue
        rows = events_of_rank[rank]
        begun, ended = (rows[rows["kind"] == kind] for kind in ("started", "ended"))
        over = len(ended) and (not len(begun) or ended["time_s"].iloc[-1] >= begun["time_s"].iloc[-1])
        if over:
            end = ended.iloc[-1]
            at = begun["value"].astype(float).iloc[-1] if len(begun) else np.nan
            at += float(end["time_s"]) - float(begun["time_s"].iloc[-1]) if len(begun) else 0.0
            ends.append(RankEnd(rank, str(end["name"]), str(end["detail"] or ""), last_step, float(at)))
        elif live:
            ends.append(RankEnd(rank, "running", "", last_step, np.nan))
        else:
            ends.append(RankEnd(rank, "gone", NO_END, last_step, np.nan))
    return ends


def rank_cause(run: Run) -> RankEnd | None:
    """The process whose end ended the run; None if none failed, and for a run of one process.

    A process that failed by its own error comes first, then one that recorded no end. A lost connection, or a process
    that torchrun stopped, is a consequence of another's end.
    """
    if run.head.world_size < 2:
        return None
    frame = run.cached_frame(["events", "steps"], _cause, run.head.world_size, run.status, run.is_live)
    return frame["cause"].iloc[0] if len(frame) else None


def _cause(run: Run, *_of_head: object) -> pd.DataFrame:
    """No row or one. Cached: ten rules read it, and a head may list a hundred thousand ranks."""
    cause = _first_to_fail(rank_ends(run))
    return pd.DataFrame({"cause": [] if cause is None else [cause]}, dtype=object)


def _first_to_fail(ends: list[RankEnd]) -> RankEnd | None:
    failed = [e for e in ends if e.status == "failed"]
    own = [e for e in failed if not _LOST_CONNECTION.search(e.reason)]
    gone = [e for e in ends if e.status == "gone"]
    if len(gone) == len(ends):  # the machine went down, or all were killed: none was the cause
        return None
    for candidates in (own, gone, failed):
        if candidates:
            return min(candidates, key=lambda e: (not np.isfinite(e.ended_s), e.ended_s, e.rank))
    return None


def end_in_words(run: Run) -> str | None:
    """Why the run ended: with several processes, which one was the cause and how the others ended."""
    cause = rank_cause(run)
    if cause is None:
        return run.end_reason
    others = [e for e in rank_ends(run) if e.rank != cause.rank]
    states = {s: [str(e.rank) for e in others if e.status == s] for s in dict.fromkeys(e.status for e in others)}
    texts = [f"{_named(ranks)} {_VERBS[status]}" for status, ranks in states.items()]
    return f"{cause.in_words()}. Then {'; '.join(texts)}"


def rank_table(run: Run) -> pd.DataFrame:
    """One row per rank: rank, steps, last_step, skipped, loss_scale (the last), memory_peak_bytes, the median of each
    time of a step without the warm-up (step_ms, data_ms, …; NaN if not measured), status, reason."""
    frame = _rows(run)
    ends = {e.rank: e for e in rank_ends(run)}
    steps = np.unique(frame["step"].to_numpy())
    timed = frame[frame["step"].isin(steps[warmup_steps(len(steps)) :])]
    rows = []
    for rank, end in ends.items():
        rows_of_rank = frame[frame["rank"] == rank]
        skipped = rows_of_rank.groupby("step")["skipped"].any()
        count = len(skipped)
        of_rank = timed[timed["rank"] == rank].groupby("step")[list(TIMES)].sum(min_count=1)
        rows.append(
            {
                "rank": rank,
                "steps": count,
                "last_step": end.last_step,
                "skipped": int(skipped.sum()),
                "loss_scale": float(rows_of_rank["loss_scale"].iloc[-1]) if count else np.nan,
                "memory_peak_bytes": float(rows_of_rank["memory_peak_bytes"].max()) if count else np.nan,
                **{time: np.nan if (ms := median(of_rank[time])) is None else ms for time in TIMES},
                "status": end.status,
                "reason": end.reason,
            }
        )
    return pd.DataFrame(rows)


def rank_spread(run: Run) -> RankSpread | None:
    """Which rank the others wait for, and how long; None if that was not measured or there is only one rank."""
    table = rank_table(run)
    if (waited := waited_for(run)) is not None:
        return _spread_of_waiting(waited, table.set_index("rank")["step_ms"], rank_waiting(run).set_index("rank"))
    waiting = WAITING_PHASES.get(str(run.head.config.get("parallel")), WAITING_PHASES["ddp"])
    phases = [t for t in TIMES if t not in ("step_ms", "watch_ms", *waiting)]
    table = table.assign(own=table[phases].sum(axis=1, min_count=1)).dropna(subset=["own", "step_ms"])
    if len(table) < 2:
        return None
    slowest = table.nlargest(1, "own").iloc[0]
    middle, step_ms = float(table["own"].median()), float(table["step_ms"].median())
    return RankSpread(
        slowest=int(slowest["rank"]),
        own_ms=float(slowest["own"]),
        median_ms=middle,
        frac=(float(slowest["own"]) - middle) / step_ms if step_ms > 0 else 0.0,
        phases=tuple(p.removesuffix("_ms") for p in phases),
    )


def _spread_of_waiting(waited: WaitedFor, step_ms: "pd.Series[float]", waiting: pd.DataFrame) -> RankSpread | None:
    """Who is waited for in collectives; `step_ms` and `waiting` are by rank."""
    own = (step_ms - waiting["waiting_ms"]).dropna()
    if waited.rank not in own.index:
        return None
    middle = float(step_ms[own.index].median())
    return RankSpread(
        slowest=waited.rank,
        own_ms=float(own[waited.rank]),
        median_ms=float(own.median()),
        frac=waited.waiting_ms / middle if middle > 0 else 0.0,
        phases=(),
    )


def rank_scales(run: Run) -> pd.DataFrame:
    """Steps at which ranks disagree on the loss scale or on skipping: step, rank, loss_scale, skipped, of all ranks at
    such steps; empty if they agree."""
    frame = _rows(run)[["step", "rank", "optimizer", "loss_scale", "skipped"]]
    by = frame.groupby(["step", "optimizer"])
    differs = (by["loss_scale"].transform("nunique") > 1) | (by["skipped"].transform("nunique") > 1)
    rows: pd.DataFrame = frame.loc[differs, ["step", "rank", "loss_scale", "skipped"]]
    return rows.reset_index(drop=True)


_VERBS = {
    "running": "still running",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed too",
    "gone": "recorded no end",
}


def _named(ranks: list[str]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks[:8])}{', …' if len(ranks) > 8 else ''}"


def _rows(run: Run) -> pd.DataFrame:
    table = run.table("steps")
    columns = ["step", "rank", "optimizer", "loss_scale", "skipped", "memory_peak_bytes", *TIMES]
    frame: pd.DataFrame = table.select(columns).to_pandas().sort_values(["step", "rank", "optimizer"], kind="stable")
    frame["skipped"] = frame["skipped"].fillna(False).astype(bool)
    numbers = ["loss_scale", "memory_peak_bytes", *TIMES]
    return frame.astype(dict.fromkeys(numbers, float))
