"""The page Loss scale shows ranks that disagree on the loss scale with a chart and steps, others in one line."""

from amp_core.store.writer import RunWriter
from amp_core.traces import import_traces
from tests.pages.conftest import titles, words
from tests.synthetic import write
from tests.traces.made import write as write_trace
from tests.traces.test_collectives import ddp


def diverging_ranks(folder):
    """Two ranks whose loss scales diverge at step 3, which only one of them skips."""
    scales = {0: [8.0] * 6, 1: [8.0, 8.0, 8.0, 8.0, 4.0, 4.0]}
    for rank in (1, 0):
        with RunWriter(folder, config={"scaler": True, "precision": "fp16"}, rank=rank, world_size=2) as writer:
            skipped = [step == 3 and rank == 1 for step in range(6)]
            writer.append(
                "steps", {"step": range(6), "loss_scale": scales[rank], "skipped": skipped, "loss": [1.0] * 6}
            )


def test_ranks_that_disagree_are_shown_with_their_scales(home, open_app):
    diverging_ranks(home.runs / "a")
    app = open_app("pages/loss_scale.py", run="run/a")
    assert "disagree on the loss scale or on skipping at 3 steps" in words(app)
    assert "first at step 3: rank 0 2³; rank 1 2³ (skipped)" in words(app)
    assert "Where ranks disagree" in titles(app)
    shown = next(table.value for table in app.dataframe if "rank" in table.value)
    assert shown[["step", "rank", "scale"]].values.tolist()[-2:] == [[5, 0, "2³"], [5, 1, "2²"]]


def test_ranks_that_agree_have_one_line(home, open_app):
    write(home.runs / "a", "two-ranks")
    app = open_app("pages/loss_scale.py", run="run/a")
    assert "2 ranks. All agree on loss scale and skips." in words(app)
    assert "Where ranks disagree" not in titles(app)


def test_one_recorded_rank_of_many_is_neither_slow_nor_unmeasured(home, open_app):
    steps = {"step": range(6), "loss": [1.0] * 6, "step_ms": [9.0] * 6, "forward_ms": [5.0] * 6}
    with RunWriter(home.runs / "a", config={"precision": "fp32"}, world_size=16) as writer:
        writer.append("steps", steps)
    app = open_app("pages/run_overview.py", run="run/a")
    assert "Only rank 0 was timed" in words(app) and "were not measured" not in words(app)
    assert "Where each rank's step goes" not in titles(app)


def test_step_cost_tells_who_is_waited_for_in_collectives(home, open_app, tmp_path):
    files = [
        write_trace(tmp_path / f"r{rank}.json", ddp(enters, rank=rank))
        for rank, enters in enumerate([(300, 750), (600, 850)])
    ]
    import_traces(files, home.runs / "a")
    app = open_app("pages/step_cost.py", run="run/a")
    assert "most for **rank 1**, which enters 100 % of them last" in words(app)
    assert "Gradients are reduced in float32." in words(app)
    ranks = app.dataframe[-1].value
    assert ranks["waiting_ms"].tolist() == [0.4, 0.0] and ranks["last_frac"].tolist() == [0.0, 100.0]
    app = open_app("pages/run_overview.py", run="run/a")
    assert "**The others wait for rank 1**" in words(app)


def test_step_cost_tells_all_ranks_that_are_waited_for(home, open_app, tmp_path):
    files = [
        write_trace(tmp_path / f"r{rank}.json", ddp(enters, rank=rank))
        for rank, enters in enumerate([(500, 720), (300, 900)])
    ]
    import_traces(files, home.runs / "a")
    app = open_app("pages/step_cost.py", run="run/a")
    assert "most for **rank 0**, **rank 1**, which enter 50.0 %, 50.0 % of them last" in words(app)
