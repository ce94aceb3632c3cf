"""The statistics that Transformer Engine's debug tool (`nvdlfw-inspect`) writes, as plain data.

    >>> parse_name("block.0.layernorm_qkv_gradient_mxfp8_underflows%_columnwise")
    Statistic(layer='block.0.layernorm_qkv', tensor='gradient', recipe='mxfp8', name='underflows%', columnwise=True)
    >>> logs = read_te_logs([Path("log")])
    >>> logs.values[0, 10][parse_name("fc1_weight_cur_amax")]
    0.4238

Names and formats are those of transformer_engine/debug/features and nvdlfw_inspect/logging.py: text files
`…_globalrank-N.log` with one number per line, and TensorBoard scalars with the same names.
"""

import datetime
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from amp_core.interop.event_files import read_log
from amp_core.schema import RunError

MAX_FILES = 10_000
MAX_LINE = 4096
"""Characters of a line that are read; the tool's own are far shorter."""

TENSORS = ("activation", "gradient", "weight", "output", "wgrad", "dgrad")
RECIPES = ("fp8_delayed_scaling", "fp8_current_scaling", "fp8_block_scaling", "mxfp8", "nvfp4")
PERCENT = ("underflows%", "overflows%")
_PLAIN = (
    *("min", "max", "sum", "mean", "numel", "l1_norm", "l2_norm_square", "l2_norm", "variance", "std"),
    *("cur_amax", "dynamic_range_top", "dynamic_range_bottom", "dynamic_range"),
)

_NAME = re.compile(
    rf"(?P<layer>.+)_(?P<tensor>{'|'.join(TENSORS)})_"
    rf"(?:(?:(?P<recipe>{'|'.join(RECIPES)})_)?(?P<quantized>(?:under|over)flows(?:_num|%|_)|scale_inv_min|scale_inv_max|"
    rf"mse|total_square_error)(?P<columnwise>_columnwise)?|(?P<plain>{'|'.join(_PLAIN)})|(?P<blockwise>"
    r"max_blockwise_dynamic_range_block_size_\d+_dims_\d(?:_max_over_orientations)?))"
)
_VALUE = re.compile(
    r"(?:(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)?) - )?(?:[A-Z]+ - )?(?P<name>\S.*?)\s+"
    r"iteration=(?P<step>\d{1,15})\s+value=(?P<value>[-+.\deE]+|nan|[-+]?inf)\s*"
)
_GEMM = re.compile(
    r"(?:.* - )?LAYER=(?P<layer>\S+): Tensor: (?P<tensor>\w+), gemm (?P<gemm>fprop|dgrad|wgrad) - "
    r"(?P<how>High Precision|(?:FP8 )?Quantize)"
)
"""Lines of `log_messages_about_plans` of transformer_engine/debug/pytorch/debug_quantization.py, behind the layer from
nvdlfw_inspect/utils.py. What a feature of the tool changes itself ("modify_tensor()") may be in either precision."""
_RANK = re.compile(r"globalrank-(\d{1,6})")


class Statistic(NamedTuple):
    """What a number is of. `recipe` is empty for statistics of the recipe in use, and of values before the cast."""

    layer: str
    tensor: str
    recipe: str
    name: str
    columnwise: bool = False


@dataclass
class TELogs:
    """The numbers of all files."""

    values: dict[tuple[int, int], dict[Statistic, float]] = field(default_factory=dict)
    """By rank and step."""
    wall_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """When the first number of that rank and step was written, seconds since 1970."""
    gemms: dict[str, dict[tuple[str, str], bool]] = field(default_factory=dict)
    """By layer: whether the operand of a product (`activation`, `fprop`) is quantized."""
    rounded: dict[tuple[int, int], set[Statistic]] = field(default_factory=dict)
    """By rank and step: what is known to four decimals alone, from text."""
    unknown: set[str] = field(default_factory=set)
    """Names that no statistic has."""


def parse_name(name: str) -> Statistic | None:
    """The statistic of that name; None if it is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    quantized = match["quantized"]
    if quantized is not None and quantized.endswith("flows_"):  # TensorBoard writers replace the percent sign
        quantized = f"{quantized[:-1]}%"
    stat = quantized or match["plain"] or match["blockwise"]
    return Statistic(match["layer"], match["tensor"], match["recipe"] or "", stat, match["columnwise"] is not None)


def read_te_logs(paths: Iterable[Path]) -> TELogs:
    """Read all text logs and TensorBoard files at and below `paths`. Raises `RunError` if there are none."""
    logs = TELogs()
    given = list(paths)
    texts, events = [], []
    for path in given:
        if not path.exists():
            raise RunError(f"logdir={str(path)!r} does not exist; give the log_dir of nvdlfw-inspect, or its files")
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        texts += [p for p in files if p.suffix == ".log"]
        if any("tfevents" in p.name for p in files):
            events.append(path)
    if not texts and not events:
        raise RunError(
            f"logdir={str(given[0])!r} holds neither text logs (*.log) nor event files (*tfevents*) of nvdlfw-inspect"
        )
    if len(texts) > MAX_FILES:
        raise RunError(f"logdir={str(given[0])!r} holds {len(texts)} log files; at most {MAX_FILES} are read at once")
    for path in texts:
        _read_text(path, logs)
    for path in events:
        _read_events(path, logs)
    return logs


def _read_text(path: Path, logs: TELogs) -> None:
    number = _RANK.search(path.name)
    rank = int(number[1]) if number else 0
    for line in _lines(path):
        match = _VALUE.fullmatch(line)
        if match is not None:
            try:
                value = float(match["value"])
            except ValueError:
                continue
            key = rank, int(match["step"])
            _add(logs, key, match["name"].strip(), value, _seconds(match["time"]), rounded=True)
        elif (gemm := _GEMM.fullmatch(line)) is not None:
            logs.gemms.setdefault(gemm["layer"], {})[gemm["tensor"], gemm["gemm"]] = gemm["how"] != "High Precision"


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(MAX_LINE):
                yield line.rstrip("\r\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_events(path: Path, logs: TELogs) -> None:
    for tag, points in read_log(path).scalars.items():
        name = tag.rpartition("/")[2]  # without the folder of the event file: names of layers have dots, not slashes
        for point in points:
            wall = point.wall_s if math.isfinite(point.wall_s) else None
            _add(logs, (0, point.step), name, point.value, wall, rounded=False)


def _add(logs: TELogs, key: tuple[int, int], name: str, value: float, wall_s: float | None, *, rounded: bool) -> None:
    statistic = parse_name(name)
    if statistic is None:
        logs.unknown.add(name[:200])
        return
    logs.values.setdefault(key, {})[statistic] = value
    inexact = logs.rounded.setdefault(key, set())
    (inexact.add if rounded else inexact.discard)(statistic)
    if wall_s is not None:
        logs.wall_s.setdefault(key, wall_s)


def _seconds(written: str | None) -> float | None:
    """Python's logging writes local time without a zone; taken as UTC, so that differences hold."""
    if written is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(written.replace(",", "."))
    except ValueError:
        return None
    return moment.replace(tzinfo=datetime.UTC).timestamp()
