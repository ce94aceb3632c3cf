"""Contract of every view in the catalogue: it is registered, and pages, notebook and report draw the same traces."""

import base64
import gzip
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import amp_core.views
from amp_core import Run, load_run
from amp_core.analysis import safe_window, sampled_steps
from amp_core.figures.browser import for_browser
from amp_core.report import report_html
from amp_core.schema import TABLES
from amp_core.views import CLASSES, LOSS, LOSS_SCALE, MEMORY, MULTI_RUN_VIEWS, RANGES, RUN_VIEWS, View, uncached
from amp_core.views.tensors import shown_kind
from tests.paths import ROOT
from tests.synthetic import SAMPLES, SCENARIOS, live, write

PAGES = (
    "run_overview",
    "loss_scale",
    "number_ranges",
    "update_losses",
    "memory_use",
    "step_cost",
    "tensor_cores",
    "precision_map",
)
"""The pages that draw views of one run."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: load_run(write(folder / name, name)) for name in SCENARIOS}


def all_views() -> list[View[Any]]:
    """Every view that a module of `amp_core.views` makes."""
    names = [f"amp_core.views.{result.name}" for result in pkgutil.iter_modules(amp_core.views.__path__)]
    modules = [importlib.import_module(name) for name in names]
    return [thing for module in modules for thing in vars(module).values() if isinstance(thing, View)]


def traces(record: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Names and points of a figure as sent to the browser."""
    return [tuple(json.dumps(trace.get(part)) for part in ("type", "name", "x", "y", "z")) for trace in record["data"]]


def drawn(view: View[Any], run: Run, **options: Any) -> list[tuple[Any, ...]]:
    return traces(for_browser(view.draw(run, **options)))


def in_report(run: Run) -> list[list[tuple[Any, ...]]]:
    match = re.search(r'<script type="application/x-gzip" id="charts">([^<]*)</script>', report_html([run]))
    assert match
    return [traces(c["light"]) for c in json.loads(gzip.decompress(base64.b64decode(match[1]))).values()]


def test_every_view_is_in_the_catalogue_under_its_name() -> None:
    known = RUN_VIEWS | MULTI_RUN_VIEWS
    assert {id(view) for view in all_views()} == {id(view) for view in known.values()}
    assert len(known) == len(RUN_VIEWS) + len(MULTI_RUN_VIEWS)
    assert all(name == view.name for name, view in known.items())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_view_gives_a_reason_exactly_if_nothing_is_drawn(scenario: str, runs: dict[str, Run]) -> None:
    run = runs[scenario]
    for name, view in RUN_VIEWS.items():
        frame = view.frame(run)
        figure, sentence = view.figure(frame), view.absent(frame)
        assert (sentence is None) == bool(figure.data), name
        if sentence is not None:
            assert sentence.endswith(".") and figure.layout.annotations[0].text == sentence, name
            assert figure.layout.title.text == view.title, name


@pytest.mark.parametrize("name", RUN_VIEWS)
def test_a_view_reads_only_the_tables_that_it_names(
    name: str, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    table = Run.table

    def spy(self: Run, which: str) -> Any:
        read.add(which)
        return table(self, which)

    monkeypatch.setattr(Run, "table", spy)
    for run in runs.values():
        RUN_VIEWS[name].frame(load_run(run.path))
    assert set(RUN_VIEWS[name].tables) <= set(TABLES)
    assert read == set(RUN_VIEWS[name].tables)


@pytest.mark.parametrize("scenario", ["overflowing", "profiled", "traced"])
def test_notebook_and_report_draw_the_same_traces(scenario: str, runs: dict[str, Run]) -> None:
    run, charts = runs[scenario], in_report(runs[scenario])
    for name, view in RUN_VIEWS.items():
        assert traces(for_browser(run.plot(name))) == drawn(view, run)
        assert (drawn(view, run) in charts) == (view.missing(run) is None), name


@pytest.mark.parametrize("scenario", ["overflowing", "profiled", "traced", "two-ranks"])
def test_the_pages_draw_the_same_traces(
    scenario: str, runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(tmp_path, monkeypatch, write(tmp_path / "runs" / "a", scenario))
    charts = []
    for page in PAGES:
        if page != "run_overview":
            app.switch_page(f"pages/{page}.py").run()
        assert not app.exception
        charts += shown(app)
    run = load_run(tmp_path / "runs" / "a")
    for name, view in RUN_VIEWS.items():
        if view is CLASSES and drawn(view, run) not in charts:
            classes = view.frame(run)  # the page omits it if every value is normal or zero
            assert not (classes[["subnormal_frac", "inf_frac", "nan_frac"]] > 0.001).any(axis=None)
        elif view.missing(run) is None:
            assert drawn(view, run) in charts, name


def test_the_live_page_draws_the_same_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tmp_path / "runs" / "a", SCENARIOS["overflowing"], steps=80) as writer:
        writer.advance(80)
        charts = shown(opened(tmp_path, monkeypatch, tmp_path / "runs" / "a"))
        run = load_run(tmp_path / "runs" / "a")
        kind = shown_kind(run, uncached)
        assert drawn(LOSS, run) in charts and drawn(MEMORY, run) in charts
        assert drawn(LOSS_SCALE, run, band=False) in charts
        last = RANGES.frame(run, step=sampled_steps(run, kind)[-1])
        assert traces(for_browser(RANGES.figure(last, clickable=False))) in charts


def opened(home: Path, monkeypatch: pytest.MonkeyPatch, run: Path) -> Any:
    """The app with a run in an otherwise empty library."""
    pytest.importorskip("streamlit", reason="the app needs streamlit")
    from pages.parts.library import run_list
    from tests.app_test import app_test

    monkeypatch.setenv("AMPSCOPE_RUNS", str(home / "runs"))
    monkeypatch.setattr(run_list, "SAMPLES", home / "samples")
    return app_test(run=f"run/{run.name}").run()


def shown(app: Any) -> list[list[tuple[Any, ...]]]:
    return [traces(json.loads(chart.proto.spec)) for chart in app.get("plotly_chart")]


def test_the_band_is_bounded_by_underflow_and_omitted_without_a_lower_end(runs: dict[str, Run], tmp_path: Path) -> None:
    changes = {"precision": "fp16", "scaler": True, "dynamic": False, "init_scale": 1.0}
    low = load_run(write(tmp_path / "low", "underflowing", **changes))
    assert safe_window(low).caveat is not None and safe_window(runs["overflowing"]).caveat is None
    drawn = next(trace for trace in LOSS_SCALE.draw(low).data if trace.name == "lowest safe")
    assert min(drawn.y) > safe_window(low).underflowed_at == 1.0
    for run, band in ((low, True), (runs["overflowing"], True), (runs["bare"], False)):
        names = {trace.name for trace in LOSS_SCALE.draw(run).data}
        assert any("safe" in (name or "") for name in names) == band, names


def test_a_view_of_several_runs_gives_a_reason_if_nothing_is_drawn(runs: dict[str, Run]) -> None:
    pairs = [(runs["healthy"], runs["fp32"]), (runs["empty"], runs["empty"])]
    pairs.append((load_run(SAMPLES["fp32"]), load_run(SAMPLES["fp16-healthy"])))
    shown = {view.name: [] for view in MULTI_RUN_VIEWS.values()}
    for pair in pairs:
        for view in MULTI_RUN_VIEWS.values():
            figure, sentence = view.draw(pair), view.missing(pair)
            assert (sentence is None) == bool(figure.data), view.name
            shown[view.name].append(sentence is None)
    assert all(any(result) and not all(result) for result in shown.values()), shown


def test_names_and_frames_need_no_plotly() -> None:
    code = (
        "import sys\nfrom amp_core import load_run\nfrom amp_core.views import RUN_VIEWS\n"
        f"run = load_run({str(SAMPLES['fp16-overflow'])!r})\n"
        "assert not RUN_VIEWS['loss_scale'].missing(run) and RUN_VIEWS['device'].missing(run)\n"
        "print([m for m in ('plotly', 'torch', 'streamlit') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
