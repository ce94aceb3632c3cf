"""Detects casts to 16 bits after which values are equal that were not: integers, grids, columns of an input, masks.

inputs = RoundedInputs(reports)
inputs.check(wide, copy, module)           # after each cast to 16 bits
"""

import numpy as np
import numpy.typing as npt
import torch

from amp_core.record.observers.signals.bins import MAX_VALUES
from amp_core.record.observers.signals.narrow_sums import max_exact
from amp_core.record.observers.signals.op_reports import Module, OpReports

INTEGERS = (torch.int16, torch.int32, torch.int64)
MIN_ROWS = 16
"""Rows of an input whose columns are compared with their copies in 16 bits."""
MAX_ROUNDED_VARIANCE_FRAC = 0.02
"""Share of a column's variance by which rounding may change its values."""
MIN_GRID = 16
"""Coordinates of a grid along one dimension."""
COLUMN_PARTS = ("column errors", "column variances", "column means")
MIN_SPREAD_RATIO = 1e-5
"""Standard deviation of a column over its mean; below that, its values differ by rounding alone."""


class RoundedInputs:
    """The casts of one step."""

    def __init__(self, reports: OpReports) -> None:
        self._reports = reports
        # Module, dtype, rows, and by column the norm of the rounding error, the variance and the mean.
        self._columns: tuple[str, torch.dtype, int, list[torch.Tensor]] | None = None

    def check(self, wide: torch.Tensor, copy: torch.Tensor, module: Module) -> None:
        """Inspect a cast to 16 bits of integers, or of FP32 values without a gradient."""
        if wide.dtype in INTEGERS:
            self._count_rounded(wide, copy, module)
        elif wide.is_floating_point() and not wide.requires_grad:
            if copy.dtype == torch.float16:
                self._check_mask(wide, copy, module)
            self._check_columns(wide, copy, module)
            self._check_grid(wide, copy, module)

    def check_back(self, narrow: torch.Tensor, module: Module) -> None:
        """Inspect values that were in 16 bits and become integers."""
        largest = narrow.detach().abs().amax()
        self._later("integers", module, narrow.dtype, largest, max_exact(narrow.dtype))

    def send(self) -> None:
        """Put what is known of columns on the way to the host."""
        if self._columns is not None:
            for part, values in zip(COLUMN_PARTS, self._columns[-1], strict=True):
                self._reports.transfer.put(part, values)

    def finish(self) -> None:
        """Report columns that hardly differ any more; what is known of them is on the host."""
        if self._columns is None:
            return
        name, dtype, rows, _ = self._columns
        error, variance, mean = (self._reports.transfer.values(part) for part in COLUMN_PARTS)
        if lost := _hardly_differ(error, variance, mean, rows, dtype):
            self._reports.write("rounded positions", "columns", name, float(lost), 0.0, dtype)
        self._columns = None

    def _check_mask(self, wide: torch.Tensor, copy: torch.Tensor, module: Module) -> None:
        """A mask is 0 or a large negative constant, which becomes infinite."""
        lowest = -torch.where(wide.isfinite(), wide, 0.0).amin() * (wide.amax() <= 0)
        limit = torch.finfo(copy.dtype).max
        self._reports.later("constant overflow", "_to_copy", module(), copy.dtype, lowest, limit)

    def _check_columns(self, wide: torch.Tensor, copy: torch.Tensor, module: Module) -> None:
        """Columns of an input, such as years, whose values differ by little beside their size."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self._columns is not None or in_backward or wide.dim() < 2 or wide.shape != copy.shape:
            return
        values = wide.detach().flatten(0, -2)
        if len(values) >= MIN_ROWS and values.numel() <= MAX_VALUES:
            error = torch.linalg.vector_norm(copy.detach().flatten(0, -2) - values, dim=0)
            self._columns = module(), copy.dtype, len(values), [error, *torch.var_mean(values, 0)]

    def _check_grid(self, wide: torch.Tensor, copy: torch.Tensor, module: Module) -> None:
        """The coordinates of a grid are integers in equal steps. The first line along each dimension tells."""
        for dim in range(wide.dim()) if wide.shape == copy.shape and wide.numel() else ():
            first = tuple(slice(None) if d == dim else 0 for d in range(wide.dim()))
            line, rounded = wide.detach()[first], copy.detach()[first]
            if MIN_GRID <= len(line) <= MAX_VALUES:
                steps = line[1:] - line[:-1]
                is_grid = (steps == steps[0]).all() & (steps[0] != 0) & (line == line.round()).all()
                collisions = (rounded[1:] == rounded[:-1]).sum()
                self._later("_to_copy", module, copy.dtype, collisions * is_grid)

    def _count_rounded(self, whole: torch.Tensor, copy: torch.Tensor, module: Module) -> None:
        if whole.numel() <= MAX_VALUES and whole.shape == copy.shape:
            rounded = (copy.detach().to(torch.float32) != whole.to(torch.float32)).sum()
            self._later("_to_copy", module, copy.dtype, rounded)

    def _later(self, op: str, module: Module, dtype: torch.dtype, value: torch.Tensor, limit: float = 0.0) -> None:
        self._reports.later("rounded positions", op, module(), dtype, value, limit)


def _hardly_differ(
    error: npt.NDArray[np.float64],
    variance: npt.NDArray[np.float64],
    mean: npt.NDArray[np.float64],
    rows: int,
    dtype: torch.dtype,
) -> int:
    """How many columns of so many rows rounding changes by a part of their variance. Not constants, and not a table of
    cosines, which are 1 at low frequencies."""
    with np.errstate(over="ignore", invalid="ignore"):
        differs = (np.abs(mean) >= max_exact(dtype)) & (variance > (MIN_SPREAD_RATIO * mean) ** 2)
        return int((differs & (error**2 / rows > MAX_ROUNDED_VARIANCE_FRAC * variance)).sum())
