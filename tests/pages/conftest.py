"""The app under AppTest, with an empty library in `tmp_path`.

def test_it(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app("pages/loss_scale.py", run="run/a")
    assert "No step was skipped" in words(app)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from amp_core import jobs
from pages.parts import release_memory, warm_up
from pages.parts.library import run_list, run_table
from tests.app_test import OVERVIEW, app_test

ROOT = Path(__file__).resolve().parents[2]
FURTHER = warm_up.analyse_other_pages


@dataclass(frozen=True)
class Home:
    """The folders of a library."""

    runs: Path
    samples: Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """An empty library."""
    where = Home(tmp_path / "runs", tmp_path / "samples")
    monkeypatch.setenv("AMPSCOPE_RUNS", str(where.runs))
    monkeypatch.setattr(run_list, "SAMPLES", where.samples)
    monkeypatch.setattr(jobs.queue, "SHARED_S", 0.0)  # each pass lists the jobs anew, however fast the machine
    # Rows that are read later would depend on the machine's speed.
    monkeypatch.setattr(run_table, "READING_TIMEOUT_S", 600.0)
    monkeypatch.setattr(warm_up, "analyse_other_pages", lambda run: None)  # each test analyses its own runs
    monkeypatch.setattr(release_memory, "collect_soon", lambda: None)  # it is of the whole process, once a second
    return where


@pytest.fixture
def warming(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Overview prepare other pages in the background, as it does for users."""
    monkeypatch.setattr(warm_up, "analyse_other_pages", FURTHER)
    monkeypatch.setattr(warm_up, "DRAWING_S", 0.0)


@pytest.fixture
def open_app(home: Home) -> Callable[..., AppTest]:
    """Open a page like an address: `open_app("pages/loss_scale.py", run="run/a")`."""

    def go(page: str = OVERVIEW, **address: Any) -> AppTest:
        return app_test(page, **address).run()

    return go


def words(app: AppTest) -> str:
    """All text of a page, for assertions, without Markdown's escapes."""
    kinds = ("title", "markdown", "caption", "info", "success", "warning", "error", "header")
    page_text = [element.value for kind in kinds for element in app.get(kind)]
    return "\n".join(page_text).replace("\\", "").replace("\u00a0", " ")


def run_picker(app: AppTest) -> Any:
    """The field of the bar in which a run is picked."""
    return next(field for field in app.selectbox if field.label == "Run")


def files_below(folder: Path) -> list[str]:
    """Paths of everything below a folder, which need not exist."""
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*")) if folder.exists() else []


def metric(app: AppTest, label: str) -> Any:
    """The metric card of that label."""
    return next(card for card in app.metric if card.label == label)


def titles(app: AppTest) -> list[str]:
    """Titles of the figures on the page."""
    import json

    specs = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    return [spec["layout"]["title"]["text"] for spec in specs]


@pytest.fixture
def started(monkeypatch, home):
    """The jobs that the form starts: recorded, with a folder in the queue, but without a process."""
    configs = []
    states = {}

    def start(config, runs_dir, name=None, *, resources=None):
        folder = runs_dir.absolute() / (name or f"{config.workload}-{config.size}-{config.precision}-1")
        (folder).mkdir(parents=True)
        (folder / "job.json").write_text("{}")
        configs.append(config)
        states[folder] = jobs.Job(
            folder, "cpu", len(states), "queued", "waiting", len(states) + 1, False, None, config.to_dict()
        )
        return states[folder]

    def find(folder):
        if folder.absolute() not in states:
            return real_find(folder)
        return states[folder.absolute()]

    real_find = jobs.find
    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(jobs, "find", find)
    monkeypatch.setattr(jobs, "under_way", lambda _: list(states.values()))
    return configs, states
