"""Every tensor of a kind at every sampled step, in few enough cells to draw.

>>> shares_over_steps(run, "output_grad", depth=2, max_steps=100)  # name, step, until, subnormal_frac, …
"""

from collections.abc import Collection

import pandas as pd

from amp_core.analysis.downsample import merged_steps
from amp_core.analysis.numerics.module_tree import folded_name
from amp_core.analysis.numerics.ranges import CLASSES, float_column, rows_of_kind
from amp_core.store.run import Run


def shares_over_steps(
    run: Run, kind: str, depth: int = 99, names: Collection[str] | None = None, max_steps: int = 200
) -> pd.DataFrame:
    """One row per tensor and sampled step, over all ranks, in the run's order of tensors.

    Columns: name; step, until (the first and the last sampled step that the row covers); subnormal_frac (of the
    finite nonzero values), zero_frac, nonfinite_frac (infinite or NaN, of all elements), absmax (largest finite
    magnitude as stored). NaN if not recorded or where there is no such value.

    Args:
        depth: tensors below each module at this depth of the tree are summed in one row.
        names: only these tensors.
        max_steps: with more sampled steps, neighbouring ones are merged by the maximum of each column.

    Raises `RunError` for an unknown kind.
    """
    table = rows_of_kind(run, kind, None)
    frame = pd.DataFrame({column: float_column(table, column) for column in ("step", "numel", "absmax", *CLASSES)})
    frame["name"] = table.column("name").to_pylist()
    if names is not None:
        frame = frame[frame["name"].isin(names)]
    folded = {name: folded_name(name, depth) for name in frame["name"].unique()}
    frame["name"] = frame["name"].map(folded)
    rows = frame.groupby(["name", "step"], sort=False)
    cells = rows[["numel", *CLASSES]].sum(min_count=1)
    nonzero = cells["subnormal"] + cells["normal"]
    cells["subnormal_frac"] = cells["subnormal"] / nonzero.where(nonzero > 0)
    numel = cells["numel"].where(cells["numel"] > 0)
    cells["zero_frac"] = cells["zero"] / numel
    cells["nonfinite_frac"] = (cells["inf"].fillna(0.0) + cells["nan"].fillna(0.0)) / numel
    finite = cells["zero"] + nonzero
    cells["absmax"] = rows["absmax"].max().where(~(finite == 0))
    cells = cells.reset_index()
    cells = cells.assign(**merged_steps(cells["step"], max_steps))
    columns = ["subnormal_frac", "zero_frac", "nonfinite_frac", "absmax"]
    pooled: pd.DataFrame = cells.groupby(["name", "step", "until"], sort=False)[columns].max().reset_index()
    order = {name: i for i, name in enumerate(dict.fromkeys(folded.values()))}
    return pooled.sort_values(["name", "step"], key=lambda c: c.map(order) if c.name == "name" else c, kind="stable")
