"""One HTML file that describes a run or compares several, for a colleague, an archive or a printer.

    from amp_core import load_run
    from amp_core.report import report_html

    Path("report.html").write_text(report_html([load_run("runs/fp32"), load_run("runs/bf16")]), encoding="utf-8")

The file needs nothing but a browser: plotly.js is inside it (once, packed), and its content security policy forbids
every request. Texts that come from runs are escaped where the HTML is made (`_html.tag`), so a name is only ever text.
"""

from amp_core.report.build import report_html

__all__ = ["report_html"]
