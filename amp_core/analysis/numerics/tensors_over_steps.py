"""Every tensor of a kind at every sampled step, in few enough cells to be drawn and clicked.

>>> shares_over_steps(run, "output_grad", depth=2, most_steps=100)  # name, step, until, subnormal_frac, …
"""

from collections.abc import Collection

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.module_tree import folded_name
from amp_core.analysis.numerics.ranges import CLASSES, float_column, rows_of_kind
from amp_core.store.run import Run


def shares_over_steps(
    run: Run, kind: str, depth: int = 99, names: Collection[str] | None = None, most_steps: int = 200
) -> pd.DataFrame:
    """One row per tensor and sampled step, ranks taken together, in the run's order of tensors.

    Columns: name; step, until (the first and the last sampled step that the row stands for); subnormal_frac (of the
    finite nonzero values), zero_frac, nonfinite_frac (infinite or NaN, of all elements), absmax (largest finite
    magnitude as stored). NaN where not recorded or where there is no such value.

    Args:
        depth: tensors below each module of the tree at this depth are one row, their elements added up.
        names: only these tensors.
        most_steps: of more sampled steps neighbouring ones become one, each column its largest value: no spike is lost.

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
    found = rows[["numel", *CLASSES]].sum(min_count=1)
    nonzero = found["subnormal"] + found["normal"]
    found["subnormal_frac"] = found["subnormal"] / nonzero.where(nonzero > 0)
    numel = found["numel"].where(found["numel"] > 0)
    found["zero_frac"] = found["zero"] / numel
    found["nonfinite_frac"] = (found["inf"].fillna(0.0) + found["nan"].fillna(0.0)) / numel
    finite = found["zero"] + nonzero
    found["absmax"] = rows["absmax"].max().where(~(finite == 0))
    found = found.reset_index()
    steps, place = np.unique(found["step"].to_numpy(), return_inverse=True)
    together = max(1, -(-len(steps) // most_steps))
    group = place // together
    found["step"] = steps[group * together].astype(np.int64) if len(found) else found["step"].astype(np.int64)
    last = np.minimum((group + 1) * together, len(steps)) - 1
    found["until"] = steps[last].astype(np.int64) if len(found) else found["step"]
    columns = ["subnormal_frac", "zero_frac", "nonfinite_frac", "absmax"]
    pooled: pd.DataFrame = found.groupby(["name", "step", "until"], sort=False)[columns].max().reset_index()
    order = {name: i for i, name in enumerate(dict.fromkeys(folded.values()))}
    return pooled.sort_values(["name", "step"], key=lambda c: c.map(order) if c.name == "name" else c, kind="stable")
