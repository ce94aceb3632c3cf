"""Pages that are analysed before a newcomer opens them."""

import shutil
import socket
import sys
import threading

import pytest

from amp_core import diagnose, load_run
from amp_core.analysis import overview
from amp_core.store.writer import RunWriter
from pages.parts import loaders, warm_up
from pages.parts.library import run_list
from tests.pages.conftest import ROOT
from tests.synthetic import write
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("warming", "idle")


@pytest.fixture
def idle():
    """No run of the test before is being analysed: one at a time is."""
    wait_for(lambda: not warm_up._analysing.locked())


def analyses_of(monkeypatch, work):
    """The analyses of `work`: names of the functions, runs, and other arguments."""
    requested, analysed = set(), loaders.analysed

    def remember(function, run, *args, **options):
        runs = run if isinstance(run, list) else [run]
        requested.add((function.__qualname__, tuple(run.path for run in runs), args, tuple(options.items())))
        return analysed(function, run, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loaders, "analysed", remember)
        work()
    return requested


def test_the_first_page_and_the_findings_of_each_sample_are_analysed_ahead(monkeypatch, open_app):
    monkeypatch.setattr(run_list, "SAMPLES", ROOT / "sample_runs")
    monkeypatch.setattr(warm_up, "PAUSE_S", 0.0)
    monkeypatch.setattr(warm_up, "analyse_other_pages", lambda run: None)  # the analyses of other pages
    interval = sys.getswitchinterval()
    ahead = analyses_of(monkeypatch, warm_up.analyse_first_page)
    page = analyses_of(monkeypatch, open_app)
    assert page and page <= ahead
    ahead = analyses_of(monkeypatch, lambda: warm_up.analyse_samples().join())
    assert sys.getswitchinterval() == pytest.approx(interval)
    assert not [thread for thread in threading.enumerate() if thread.name == "ampscope-ahead"]
    samples = [entry.path for entry in run_list.listing().values() if entry.origin == "sample"]
    for function in (overview, diagnose):
        assert {(function.__qualname__, (path,), (), ()) for path in samples} <= ahead


def test_other_pages_are_analysed_while_overview_is_read(home, monkeypatch, open_app):
    write(home.runs / "a", "healthy")
    ready, started, further = set(), [], warm_up.analyse_other_pages

    def begin(run):
        ready.update(analyses_of(monkeypatch, lambda: started.append(further(run)) or started[-1].join()))

    monkeypatch.setattr(warm_up, "analyse_other_pages", begin)
    open_app(run="run/a")
    assert {name for name, *_ in ready} >= {function.__qualname__ for function in warm_up.LOSS_SCALE_ANALYSES}
    requested = analyses_of(monkeypatch, lambda: open_app("pages/loss_scale.py", run="run/a"))
    assert {name for name, *_ in ready & requested} >= {"skip_episodes", "safe_window_over_time", "safe_window"}
    requested = analyses_of(monkeypatch, lambda: open_app("pages/number_ranges.py", run="run/a"))
    assert {name for name, *_ in ready & requested} >= {
        "exponent_shares",
        "class_shares",
        "shares_over_steps",
        "what_if",
    }


PAGES = ("loss_scale", "number_ranges", "layer_detail", "memory_use", "step_cost")


@pytest.mark.parametrize("scenario", ["overflowing", "profiled"])
def test_a_page_analysed_ahead_runs_no_slow_analysis(home, monkeypatch, open_app, scenario):
    run = load_run(write(home.runs / "a", scenario))
    ready = analyses_of(monkeypatch, lambda: warm_up.analyse_other_pages(run).join())
    requested = analyses_of(monkeypatch, lambda: [open_app(f"pages/{page}.py", run="run/a") for page in PAGES])
    overview = analyses_of(monkeypatch, lambda: open_app(run="run/a"))
    assert {name for name, *_ in requested - ready - overview} <= {"kinds_present"}


def test_a_run_that_is_deleted_during_analysis_is_not_a_server_error(home):
    path = write(home.runs / "a", "healthy")
    run = load_run(path)
    shutil.rmtree(path)
    warm_up.analyse_other_pages(run).join()  # pytest fails a test if one of its threads raised
    assert not warm_up._analysing.locked()


def test_one_run_at_a_time_is_analysed_ahead_and_no_live_run(home):
    write(home.runs / "a", "healthy")
    run = load_run(home.runs / "a")
    with warm_up._analysing:
        assert warm_up.analyse_other_pages(run) is None
    with RunWriter(home.runs / "b"):
        assert warm_up.analyse_other_pages(load_run(home.runs / "b")) is None
    empty = warm_up.analyse_other_pages(load_run(home.runs / "b"))  # without gradients
    assert empty is not None
    empty.join()
    assert not warm_up._analysing.locked()


def test_small_responses_do_not_wait_for_an_acknowledgement():
    with socket.socket(family=socket.AF_INET) as bound:  # created as in Streamlit
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        warm_up.disable_nagle()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
