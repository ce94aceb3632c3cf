"""Runs, findings and comparisons in notebooks.

    run                       # at the end of a cell: a table with a small chart
    run.plot("loss_scale")    # the figure of the app's page, to zoom and hover in

Tables are HTML made of escaped parts, since names in a run are untrusted. Their charts are inline SVG in the colour of
the text, for light and dark notebooks. They need only pandas; figures need plotly.
"""

from amp_core.notebook.cells import comparison_html, finding_html, run_html
from amp_core.notebook.plots import PLOTS, plot

__all__ = ["PLOTS", "comparison_html", "finding_html", "plot", "run_html"]
