"""The report as a download: offered on Overview and Compare, and made from the shown runs."""

from amp_core import load_run
from pages.parts.overview import report
from tests.synthetic import write


def test_overview_and_compare_offer_the_report(home, open_app):
    for name, scenario in (("a", "fp32"), ("b", "healthy")):
        write(home.runs / name, scenario, steps=20)
    assert "Report" in [b.label for b in open_app(run="run/a").get("download_button")]
    app = open_app("pages/compare_runs.py", run="run/a", **{"with": ["run/a", "run/b"]})
    assert not app.exception
    assert "Report" in [b.label for b in app.get("download_button")]


def test_the_file_is_named_after_its_runs_in_valid_characters(tmp_path):
    runs = [load_run(write(tmp_path / "a", "fp32", steps=3)), load_run(write(tmp_path / "b", "healthy", steps=3))]
    assert report.file_name(runs) == "report-a-b"
    runs[0].head = runs[0].head.__class__(run_id="x", name="../<b>/π x", created_at="")
    assert report.file_name(runs[:1]) == "report-.._b_x"


def test_the_file_has_the_reason_if_the_report_cannot_be_made(tmp_path):
    run = load_run(write(tmp_path / "a", "empty"))
    assert b"has no steps" in report._made([run])
