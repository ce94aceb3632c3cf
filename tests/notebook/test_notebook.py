"""Runs, findings and comparisons in a notebook: escaped tables with a chart, and the figures of the pages."""

import builtins
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from amp_core import Finding, Run, RunError, diagnose, load_run
from amp_core.analysis import compare
from amp_core.figures.browser import for_browser
from amp_core.notebook import PLOTS
from amp_core.store.writer import RunWriter
from tests.paths import SAMPLE_RUNS

NASTY = '<script>alert(1)</script><img src=x onerror="x">'


def parsed(html: str) -> ET.Element:
    """The HTML parsed as XML, which fails if anything is not escaped."""
    root = ET.fromstring(f"<div>{html}</div>")
    assert not {element.tag for element in root.iter()} & {"script", "img", "iframe", "a"}
    return root


def text(html: str) -> str:
    return " ".join("".join(parsed(html).itertext()).split())


def points(html: str) -> list[list[str]]:
    return [line.get("points", "").split() for line in parsed(html).iter("polyline")]


def test_a_run_shows_its_facts_and_its_curves() -> None:
    html = load_run(SAMPLE_RUNS / "fp16-overflow")._repr_html_()
    content = text(html)
    assert "fp16-overflow" in content and "finished" in content and "400" in content and "skipped steps" in content
    loss, scale = points(html)
    assert 100 < len(loss) <= 240 and len(scale) <= 240
    assert all(0 <= float(x) <= 240 and 0 <= float(y) <= 48 for x, y in (p.split(",") for p in loss))
    assert len(points(load_run(SAMPLE_RUNS / "fp32")._repr_html_())) == 1  # without a scaler there is no loss scale
    assert "style" not in {e.tag for e in parsed(html).iter()} and "currentColor" in html


def test_an_empty_and_a_damaged_run_are_shown_too(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "empty"):
        pass
    assert "finished" in text(load_run(tmp_path / "empty")._repr_html_())
    with RunWriter(tmp_path / "nan") as writer:
        writer.append("steps", {"step": [0, 1], "loss": [math.nan, math.inf]})
    assert points(load_run(tmp_path / "nan")._repr_html_()) == []
    (tmp_path / "nan" / "steps" / "00000.parquet").write_bytes(b"PAR1")
    assert "cannot be read" in text(load_run(tmp_path / "nan")._repr_html_())


def test_untrusted_names_are_shown_as_text(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", name=NASTY, config={"workload": NASTY, "device": NASTY, "precision": NASTY}) as w:
        w.append("steps", {"step": [0, 1], "loss": [2.0, 1.0]})
    run = load_run(tmp_path / "a")
    assert NASTY in text(run._repr_html_())
    finding = Finding("code", "error", NASTY, NASTY, (0, 1), 2.0, 1.0, NASTY, NASTY, NASTY)
    assert text(finding._repr_html_()).count("<script>") == 5
    assert NASTY in text(compare([run, run])._repr_html_())


def test_a_finding_shows_its_evidence_beside_its_limit() -> None:
    finding = next(f for f in diagnose(load_run(SAMPLE_RUNS / "fp16-overflow")) if f.limit and f.value)
    html = finding._repr_html_()
    assert finding.title in text(html) and finding.advice in text(html) and f"[{finding.code}]" in text(html)
    value, limit = [float(bar.get("width", "0")) for bar in parsed(html).iter("rect")]
    assert (value > limit) == (abs(finding.value or 0) > abs(finding.limit or 0))
    bare = Finding("code", "info", "t", "w", None, None, None, "", "a", "")
    assert not list(parsed(bare._repr_html_()).iter("svg"))


def test_a_comparison_shows_a_row_for_each_run() -> None:
    html = compare([load_run(SAMPLE_RUNS / name) for name in ("fp32", "bf16", "fp16-healthy")])._repr_html_()
    rows = list(parsed(html).iter("tr"))
    assert len(rows) == 4 and len(list(parsed(html).iter("rect"))) == 3
    assert [("".join(row[0].itertext())) for row in rows[1:]] == ["fp32", "bf16", "fp16-healthy"]


PAGES = {
    "loss": "run_overview",
    "phases": "run_overview",
    "memory": "run_overview",
    "loss_scale": "loss_scale",
    "grad_norm": "loss_scale",
    "ranges": "number_ranges",
    "classes": "number_ranges",
    "kernels": "tensor_cores",
    "step_cost": "step_cost",
    "precision_map": "precision_map",
    "memory_parts": "memory_use",
}
"""Where the app shows what a plot of that name draws."""


@pytest.fixture(scope="module")
def drawn_by_pages() -> dict[str, list[dict[str, Any]]]:
    """The figures of each page of the sample `fp16-overflow`."""
    pytest.importorskip("streamlit", reason="the app needs streamlit")
    from tests.app_test import app_test

    figures = {}
    for page in set(PAGES.values()):
        address = {"run": "sample/fp16-overflow", "baseline": "none"}  # a plot of one run has none
        app = app_test(f"pages/{page}.py", **address).run()
        assert not app.exception
        figures[page] = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    return figures


@pytest.mark.parametrize("name", PAGES)
def test_plots_are_the_figures_of_the_pages(name: str, drawn_by_pages: dict[str, list[dict[str, Any]]]) -> None:
    ours = for_browser(load_run(SAMPLE_RUNS / "fp16-overflow").plot(name))
    title = ours["layout"]["title"]["text"]
    page_figure = next((f for f in drawn_by_pages[PAGES[name]] if f["layout"]["title"]["text"] == title), None)
    assert page_figure is not None, f"no figure of that page is called {title!r}"
    assert page_figure["data"] == ours["data"]


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("sample", ["fp32", "fp16-underflow"])
def test_every_plot_of_every_run_is_a_figure(name: str, sample: str) -> None:
    run = load_run(SAMPLE_RUNS / sample)
    light, dark = run.plot(name), run.plot(name, dark=True)
    assert light.layout.title.text and len(light.layout.meta["alt"]) > 20
    assert len(light.data) == len(dark.data)


@pytest.mark.parametrize("name", PLOTS)
def test_unrecorded_data_gives_a_figure_with_a_sentence(name: str, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "empty"):
        pass
    figure = load_run(tmp_path / "empty").plot(name)
    assert not figure.data and figure.layout.annotations[0].text.endswith(".")


def test_an_unknown_plot_is_refused_with_the_known_names() -> None:
    with pytest.raises(RunError, match=r"^name='accuracy' is no plot; choose one of loss, loss_scale, grad_norm"):
        load_run(SAMPLE_RUNS / "fp32").plot("accuracy")


def test_without_plotly_plots_raise_one_sentence_and_tables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    run: Run = load_run(SAMPLE_RUNS / "fp32")
    for name in [n for n in sys.modules if re.match(r"plotly|amp_core\.figures", n)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("amp_core.figures", raising=False)
    original = builtins.__import__

    def without_plotly(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "plotly":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_plotly)
    with pytest.raises(RunError, match=r"^plots need plotly; install it with `pip install plotly`$"):
        run.plot("loss")
    assert "fp32" in run._repr_html_()
