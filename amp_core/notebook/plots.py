"""`run.plot(name)`: the views of `amp_core.views`, with the defaults of the pages.

>>> plot(run, "loss_scale")
>>> plot(run, "ranges", dark=True).write_html("ranges.html")
"""

from typing import Any

from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.views import RUN_VIEWS

PLOTS = tuple(RUN_VIEWS)
"""Views that `plot` can draw, by name."""


def plot(run: Run, name: str, dark: bool = False) -> Any:
    """The plotly figure `name` of `PLOTS`. The figure says so if its data was not recorded or is damaged.

    Raises `RunError` for another name, and if plotly is missing.
    """
    if name not in PLOTS:
        raise RunError(f"name={name!r} is no plot; choose one of {', '.join(PLOTS)}")
    try:
        import amp_core.figures  # noqa: F401 - fails here, not while drawing, if plotly is missing
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        raise RunError("plots need plotly; install it with `pip install plotly`") from None
    return RUN_VIEWS[name].draw(run.salvaged(), dark)
