"""Convert the debug logs of Transformer Engine (`nvdlfw-inspect`) into a run folder; what they lack is null.

    >>> made = import_te(["log"], "runs/te")
    >>> made.rows, made.layers, made.left_out
    ({'quantized': 480, 'tensors': 160}, 12, [])

Three things differ from a recorded run. Shares are of all elements, zeros included, as Transformer Engine counts them.
Text logs have four decimals, so smaller numbers are null, not 0. A statistic may be of a recipe that the training does
not use ("what if"): such ones are left out and named.
"""

import datetime
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_core.interop.te_logs import PERCENT, Statistic, TELogs, read_te_logs
from amp_core.quantization import OPERANDS, RECIPES, TENSOR, block_name
from amp_core.schema import RunError
from amp_core.store.atomic import new_folder
from amp_core.store.writer import RunWriter

MIN_TEXT_VALUE = 1e-3
"""Below it, four decimals leave less than two digits."""

_OURS = {
    "fp8_delayed_scaling": "fp8-delayed",
    "fp8_current_scaling": "fp8-tensorwise",
    "fp8_block_scaling": "fp8-block-pow2",
    "mxfp8": "mxfp8-e4m3-rceil",
    "nvfp4": "nvfp4-2d",
}
_OPERANDS = {"activation": "activation", "gradient": "output_grad", "weight": "weight"}
"""Our kinds in `quantized` for their names of tensors: an activation is the layer's input in both."""
_TENSORS = {"output": "activation", "gradient": "output_grad", "weight": "weight", "wgrad": "weight_grad"}
"""Our kinds in `tensors`, where an activation is a module's output."""


@dataclass(frozen=True)
class ImportedTE:
    """A run made from debug logs."""

    folder: Path
    rows: dict[str, int]
    """Rows written, by table."""
    layers: int
    recipe: str | None
    """The training's recipe, by our name; None where the logs do not tell."""
    left_out: list[str] = field(default_factory=list)
    """Statistics that no column has, and those of other recipes than the training's."""


def import_te(
    logs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], name: str | None = None
) -> ImportedTE:
    """Write the run folder `out` from the logs at `logs`: folders or files, text or TensorBoard.

    Raises `RunError`, with nothing written, if they cannot be read or hold no statistic.
    """
    read = read_te_logs([Path(log) for log in logs])
    if not read.values:
        raise RunError(
            f"logdir={os.fspath(logs[0])!r} holds no statistics of Transformer Engine's tensors, such as "
            "fc1_activation_cur_amax; enable LogTensorStats or LogFp8TensorStats in the tool's config"
        )
    recipe, others = _recipe_in_use(read)
    left_out = sorted(others) + sorted(read.unknown)
    casts = functools.partial(_quantized_rows, recipe)
    quantized = {rank: _rows(read, rank, casts) for rank in _ranks(read)}
    tensors = {rank: _rows(read, rank, _tensor_rows) for rank in _ranks(read)}
    began = min(read.wall_s.values(), default=None)
    with new_folder(out) as aside:
        for rank in _ranks(read):
            config = {
                "source": "import",
                "format": "transformer-engine",
                "log": Path(logs[0]).name,
                "tags_left_out": left_out[:1000],
            }
            options: dict[str, Any] = {"rank": rank}
            if rank == min(_ranks(read)):
                options = {"rank": rank, "name": name or Path(out).name, "config": config}
                options["world_size"] = max(_ranks(read)) + 1
            with RunWriter(aside, **options) as writer:
                if began is not None and "config" in options:
                    moment = datetime.datetime.fromtimestamp(began, datetime.UTC)
                    writer.update_head(created_at=moment.isoformat(timespec="milliseconds"))
                writer.event("started", name=name or Path(out).name, detail="imported from Transformer Engine's logs")
                steps = sorted(step for r, step in read.values if r == rank)
                times = [read.wall_s.get((rank, step)) for step in steps]
                since = [t - began if t is not None and began is not None else None for t in times]
                writer.append("steps", {"step": steps, "time_s": since, "skipped": [None] * len(steps)})
                for table, rows in (("quantized", quantized[rank]), ("tensors", tensors[rank])):
                    if rows:
                        writer.append(table, {c: [row.get(c) for row in rows] for c in rows[0]})
                if "config" in options:
                    _write_conversion(writer, read)
    layers = {statistic.layer for values in read.values.values() for statistic in values}
    counts = {"quantized": sum(map(len, quantized.values())), "tensors": sum(map(len, tensors.values()))}
    return ImportedTE(Path(out), counts, len(layers), _OURS.get(recipe or ""), left_out)


def _ranks(logs: TELogs) -> list[int]:
    return sorted({rank for rank, _ in logs.values})


def _recipe_in_use(logs: TELogs) -> tuple[str | None, set[str]]:
    """The recipe whose statistics are those of the training, and the names of other recipes' statistics.

    Statistics without a recipe are of the one in use, and delayed scaling can only be logged where it is in use.
    """
    named = {s.recipe for values in logs.values.values() for s in values if s.name in _CASTS}
    prefixed = named - {""}
    if "fp8_delayed_scaling" in prefixed:
        recipe: str | None = "fp8_delayed_scaling"
    elif len(prefixed) == 1 and "" not in named:
        (recipe,) = prefixed
    else:
        recipe = None
    allowed = {recipe, ""}
    others = {
        f"{s.tensor} {s.recipe}_{s.name}"
        for values in logs.values.values()
        for s in values
        if s.name in _CASTS and s.recipe not in allowed
    }
    return recipe, others


_CASTS = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse", "total_square_error")


def _rows(
    logs: TELogs, rank: int, make: Callable[[dict[Statistic, float]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for (of, step), values in sorted(logs.values.items()):
        if of == rank:
            rows += [{"step": step} | row for row in make(_readable(values, logs.rounded.get((of, step), set())))]
    return rows


def _readable(values: dict[Statistic, float], rounded: set[Statistic]) -> dict[Statistic, float]:
    """What is known to two digits at least, of numbers some of which are `rounded` to four decimals; shares in percent
    are readable from 0 on."""
    bounds = (*PERCENT, "min", "max", "mean", "dynamic_range", "dynamic_range_top", "dynamic_range_bottom")
    return {
        s: v
        for s, v in values.items()
        if s not in rounded or s.name in bounds or not math.isfinite(v) or abs(v) >= MIN_TEXT_VALUE
    }


def _quantized_rows(recipe: str | None, values: dict[Statistic, float]) -> list[dict[str, Any]]:
    casts: dict[tuple[str, str, bool], dict[str, float]] = {}
    for s, value in values.items():
        if s.name in _CASTS and s.recipe in (recipe, "") and s.tensor in _OPERANDS and math.isfinite(value):
            casts.setdefault((s.layer, s.tensor, s.columnwise), {})[s.name] = value
    rows = []
    ours = RECIPES.get(_OURS.get(recipe or "", ""))
    for (layer, tensor, columnwise), cast in casts.items():
        kind = _OPERANDS[tensor]
        plain = {
            s.name: v for s, v in values.items() if (s.layer, s.tensor) == (layer, tensor) and s.name not in _CASTS
        }
        numel, mse = plain.get("numel"), cast.get("mse")
        squares = _mean_square(plain)
        error = cast.get("total_square_error", mse * numel if mse is not None and numel else None)
        by_tensor = ours is not None and block_name(ours.block) == TENSOR
        low, high = cast.get("scale_inv_min"), cast.get("scale_inv_max")
        rows.append(
            {
                "name": f"{layer}.weight" if kind == "weight" else layer,
                "kind": kind,
                "product": None if by_tensor or ours is None else OPERANDS[kind][1 if columnwise else 0],
                "recipe": ours.name if ours is not None else None,
                "library": "transformer_engine",
                "element": ours.element_of(kind).name if ours is not None else None,
                "block": block_name(ours.block_of(kind)) if ours is not None else None,
                "numel": round(numel) if numel else None,
                "amax": _amax(plain),
                "scale": 1 / high if high else None,
                "scale_max": 1 / low if low else None,
                "scale_age": None,
                "saturated_frac": _share(cast.get("overflows%")),
                "underflow_frac": _share(cast.get("underflows%")),
                "sq_error": error,
                "rel_error": math.sqrt(mse / squares) if mse is not None and squares else None,
            }
        )
    return rows


def _tensor_rows(values: dict[Statistic, float]) -> list[dict[str, Any]]:
    by_tensor: dict[tuple[str, str], dict[str, float]] = {}
    for s, value in values.items():
        if s.name not in _CASTS and s.tensor in _TENSORS:
            by_tensor.setdefault((s.layer, s.tensor), {})[s.name] = value
    rows = []
    for (layer, tensor), plain in by_tensor.items():
        kind = _TENSORS[tensor]
        numel, squares, amax, spread = plain.get("numel"), _mean_square(plain), _amax(plain), plain.get("dynamic_range")
        known = amax is not None and spread is not None and 0 <= spread < 300
        rows.append(
            {
                "name": f"{layer}.weight" if kind.startswith("weight") else layer,
                "kind": kind,
                "loss_scale": None,
                "numel": round(numel) if numel else None,
                "absmax": amax,
                "rms": math.sqrt(squares) if squares is not None else None,
                "absmin": amax / 2**spread if amax is not None and spread is not None and known else None,
                "abs_sum": plain.get("l1_norm"),
            }
        )
    return rows


def _amax(plain: dict[str, float]) -> float | None:
    """The largest magnitude; None if not finite or not logged."""
    sizes = [abs(plain[name]) for name in ("min", "max") if name in plain]
    amax = plain.get("cur_amax", max(sizes) if len(sizes) == 2 else None)
    return amax if amax is not None and math.isfinite(amax) and amax > 0 else None


def _mean_square(plain: dict[str, float]) -> float | None:
    numel, norm = plain.get("numel"), plain.get("l2_norm")
    mean, std = plain.get("mean"), plain.get("std")
    if norm is not None and numel:
        square = norm**2 / numel
    elif mean is not None and std is not None:
        square = mean**2 + std**2
    else:
        return None
    return square if math.isfinite(square) and square > 0 else None


def _share(percent: float | None) -> float | None:
    return min(max(percent / 100, 0.0), 1.0) if percent is not None else None


def _write_conversion(writer: RunWriter, logs: TELogs) -> None:
    """Which layers are quantized, from the tool's own log."""
    if not logs.gemms:
        return
    step = min(step for _, step in logs.values)
    converted = [layer for layer, gemms in logs.gemms.items() if any(gemms.values())]
    if converted:
        writer.event(
            "quantized layers", [*logs.gemms][-1], step=step, count=len(converted), limit=float(len(logs.gemms))
        )
        for layer in logs.gemms:
            if layer not in converted:
                writer.event("not quantized", layer, "high precision", step)
