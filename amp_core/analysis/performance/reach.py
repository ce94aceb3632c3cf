"""How much of what shorter kernels save reaches the end of the step: collectives and the host may outlast them.

>>> within_reach(saving, rows, windows, basis).saved_us / saving.saved_us
0.62
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from amp_core.analysis.performance.layouts import layout_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import MIN_KERNEL_US, Basis, Saving
from amp_core.text.formatting import percent
from amp_core.traces.replay import REACHES, SHORTER_FRACS

MIN_BESIDE_FRAC = 0.1
"""Share of kernels beside collectives from which what these save is told without it."""
_BESIDE_COLLECTIVES = ("fp32-products", "slow-products", "layout-transposes")
"""Savings of kernels that may lie beside collectives; memory-bound kernels are counted without that from the start."""
_OF_KERNELS = ("fp32-products", "slow-products", "memory-bound-kernels", "fp64-operators")
"""Savings of shorter kernels."""
_UNTIL_HOST = "until the device waits for the host"
MIN_BEHIND_IDLE_FRAC, MAX_REACH_FRAC = 0.15, 0.3
"""Share of the step that a device is idle from which its host may be the one that others wait for, and share of shorter
kernels that reaches the end of the step below which it is."""


def within_reach(saving: Saving, rows: pd.DataFrame, windows: pd.DataFrame, basis: Basis) -> Saving:
    """The saving as far as the step becomes shorter by it, with what limits it in words. `rows` of `kernels`."""
    saving = _beside_none(saving, rows, basis)
    if saving.code not in _OF_KERNELS or saving.waits_for_idle:
        return saving
    limit_us = min(_host_limit_us(windows, basis), _replayed_us(saving.saved_us, windows, basis))
    if saving.code == "memory-bound-kernels":
        limit_us += _of_chains(rows) * max(0.0, saving.saved_us - limit_us)
    if saving.saved_us <= MAX_OVER_RATIO * limit_us:
        return saving
    return replace(saving, saved_us=limit_us, what=f"{saving.what}, {_UNTIL_HOST}", unlimited=saving)


def _of_chains(rows: pd.DataFrame) -> float:
    """The share of launches that are of chains of kernels: fused, the host hardly launches these."""
    of_chains = float(rows["count"][rows["fused_away_us"].fillna(0.0) > 0].sum())
    return of_chains / max(1.0, float(rows["count"].sum()))


MAX_OVER_RATIO = 1.02
"""A saving that is so little above what reaches the end is told as it is."""


def _replayed_us(saved_us: float, windows: pd.DataFrame, basis: Basis) -> float:
    """By how much a step ends sooner, microseconds, if its kernels are shorter by so much in all: what a replay of the
    launches tells, where all are shorter by the same share. All of it where launches are not known."""
    known = windows[windows[list(REACHES)].notna().all(axis=1) & (windows["busy_us"] > 0)]
    kernels_us = basis.cost.step_us - float(np.nan_to_num(basis.cost.us(*_NO_KERNELS)))
    if not kernels_us > 0 or len(known) < len(windows):
        return saved_us
    fracs = [float((known[name] * known["busy_us"]).sum() / known["busy_us"].sum()) for name in REACHES]
    shorter = np.array([0.0, *SHORTER_FRACS])
    reached = np.interp(saved_us / kernels_us, shorter, shorter * np.array([1.0, *fracs]))
    return min(saved_us, float(reached) * kernels_us)


_NO_KERNELS = ("gaps", "data", "communication", "copy")
"""Parts of a step in which the device runs no kernel but collectives."""


def _beside_none(saving: Saving, rows: pd.DataFrame, basis: Basis) -> Saving:
    """The saving without the part of its kernels that runs beside collectives, where these take long alone: they
    outlast what runs beside them."""
    if saving.code not in _BESIDE_COLLECTIVES or not basis.is_long(np.nan_to_num(basis.cost.us("communication"))):
        return saving
    of_it = layout_rows(rows) if saving.code == "layout-transposes" else rows[is_matrix(rows)]
    beside = float(of_it["beside_us"].fillna(0.0).sum()) / max(float(of_it["total_us"].sum()), MIN_KERNEL_US)
    if beside < MIN_BESIDE_FRAC:
        return saving
    what = f"{saving.what}; {percent(beside)} of that time lies beside collectives, and is not counted"
    return replace(saving, saved_us=saving.saved_us * max(0.0, 1 - beside), what=what)


def _host_limit_us(windows: pd.DataFrame, basis: Basis) -> float:
    """What shorter kernels save per step at most, microseconds: then the step takes what the host needs to launch it.
    Where the device is idle after the host has waited for it, each pass, that is the time that the host waits."""
    host_us, sync_us, idle_us = (
        basis.each_us(windows[name].fillna(0.0)) for name in ("host_us", "sync_us", "idle_sync_us")
    )
    step_us = basis.cost.step_us
    return max(0.0, min(step_us - host_us, sync_us if basis.is_long(idle_us) else step_us))


def is_behind_host(windows: pd.DataFrame, basis: Basis) -> bool:
    """Whether a step hardly ends sooner with shorter kernels, since the host launches them just before they start."""
    known = windows[windows["reach_frac"].notna()]
    wall_us = float(known["wall_us"].sum())
    idle_frac = float(np.nan_to_num(basis.cost.us("gaps", "data"))) / basis.cost.step_us
    if known.empty or wall_us <= 0 or idle_frac < MIN_BEHIND_IDLE_FRAC:
        return False
    return float((known["reach_frac"] * known["wall_us"]).sum()) / wall_us < MAX_REACH_FRAC
