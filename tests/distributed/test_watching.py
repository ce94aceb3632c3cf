"""`watch` in several processes: the rows, names and shards of every rank are correct, and no rank waits for it."""

import numpy as np
import pytest

from amp_core import diagnose
from amp_core.analysis import rank_scales, rank_table
from amp_core.analysis.numerics.layers import layer_trace
from amp_core.analysis.ranks import rank_cause, rank_spread
from amp_core.analysis.steps import attempts
from tests.distributed.worker import SPOILED, STEPS, Net

NAMES = {name: p.numel() for name, p in Net().named_parameters()}
SAMPLED = 4


@pytest.mark.parametrize("how", ["ddp", "fsdp-clip", "ddp-no_sync"])
def test_the_merged_tables_are_complete(trained, how):
    done = trained(how)
    assert done.codes == [0, 0]
    run = done.run
    run.validate(full=True)
    assert (run.status, run.head.world_size) == ("finished", 2)
    steps = run.steps
    assert steps[["step", "rank"]].to_numpy().tolist() == [[s, r] for s in range(STEPS) for r in (0, 1)]
    for rank, truth in done.truth.items():
        own_steps = steps[steps["rank"] == rank]
        assert own_steps.loss_scale.tolist() == truth["scales"]
        micro = 2 if "no_sync" in how else 1
        assert (own_steps.samples == 8 * micro).all()
        if micro == 1:
            finite = np.isfinite(truth["losses"])
            assert np.allclose(own_steps.loss[finite], np.array(truth["losses"])[finite], rtol=1e-6)
    assert steps[steps.skipped].step.tolist() == [SPOILED, SPOILED]
    tensors = run.tensors(kind="weight_grad")
    assert set(tensors.name) == set(NAMES) and len(tensors) == len(NAMES) * SAMPLED * 2
    assert len(run.tensors(kind="output_grad")) == 3 * SAMPLED * 2
    assert run.head.model["class"] == "Net" and set(run.head.model["layers"].values()) >= {"Linear"}
    assert set(run.events[run.events.kind == "skipped"]["rank"]) == {0, 1}
    assert not list(run.path.glob("*/*.arrows")) and list(run.path.glob("steps/*.r1.parquet"))


@pytest.mark.parametrize("how", ["ddp", "fsdp-clip"])
def test_watching_makes_no_collective_calls(trained, how):
    """The process group counts its collectives: there are as many with watching as without."""
    watched, bare = trained(how), trained(f"{how}-unwatched")
    for rank in (0, 1):
        assert watched.truth[rank]["collectives"] == bare.truth[rank]["collectives"] > 0
        assert watched.truth[rank]["losses"] == bare.truth[rank]["losses"]


def test_each_rank_measures_its_shards_and_they_add_up(trained):
    run = trained("fsdp-clip").run
    assert (run.head.config["parallel"], run.head.config["shards"]) == ("fsdp", 2)
    first = run.tensors(kind="weight_grad", steps=(0, 0))
    assert first.groupby("name")["numel"].sum().to_dict() == NAMES
    assert (first.groupby("name")["rank"].nunique() == 2).all()
    assert (layer_trace(run, "weight_grad", "head.weight")["numel"] == NAMES["head.weight"]).all()
    truth = np.array(trained("fsdp-clip").truth[0]["norms"])
    finite = np.isfinite(truth)
    assert np.allclose(attempts(run)["grad_norm"][finite], truth[finite], rtol=1e-5), "the norm of the whole gradient"


def test_each_replica_has_the_whole_gradient(trained):
    run = trained("ddp").run
    assert (run.head.config["parallel"], run.head.config["shards"]) == ("ddp", 1)
    first = run.tensors(kind="weight_grad", steps=(0, 0))
    assert first.groupby(["name", "rank"])["numel"].sum().to_dict() == {(n, r): NAMES[n] for n in NAMES for r in (0, 1)}


@pytest.mark.parametrize("how", ["ddp", "fsdp-clip", "ddp-no_sync"])
def test_ranks_that_share_gradients_agree_on_the_loss_scale(trained, how):
    assert rank_scales(trained(how).run).empty
    assert "rank-scale-desync" not in {f.code for f in diagnose(trained(how).run)}


def test_ranks_with_separate_gradients_have_separate_loss_scales(trained):
    separate = trained("ddp-local").run
    result = rank_scales(separate)
    assert result["step"].iloc[0] == SPOILED and result[result.step == SPOILED].skipped.tolist() == [False, True]
    desync = next(f for f in diagnose(separate) if f.code == "rank-scale-desync")
    assert (desync.severity, desync.where, desync.steps[0]) == ("error", "rank 1", SPOILED)


@pytest.mark.whole
def test_a_rank_that_fails_is_named_with_its_reason(trained):
    done = trained("ddp-raise", 4)
    assert all(done.codes), "no rank continues alone"
    cause = rank_cause(done.run)
    assert (cause.rank, cause.status, cause.reason) == (1, "failed", "ValueError: boom in the data")
    result = next(f for f in diagnose(done.run) if f.code == "rank-ended")
    assert result.where == "rank 1" and "boom" in result.title and result.steps[0] in (3, 4)
    table = rank_table(done.run)
    assert (table["steps"] >= 4).all() and table["status"].iloc[1] == "failed"


def test_a_rank_that_is_killed_is_named_too(trained):
    done = trained("ddp-kill")
    assert done.codes[1] == -9 and done.codes[0] != 0
    cause = rank_cause(done.run)
    assert (cause.rank, cause.status) == (1, "gone") and "killed" in cause.reason
    assert len(done.run.steps) >= 8, "the rows of both ranks are there"


def test_a_healthy_run_has_a_spread_and_no_cause(trained):
    run = trained("ddp").run
    assert rank_cause(run) is None
    spread = rank_spread(run)
    assert spread.slowest in (0, 1) and spread.frac >= 0 and set(spread.phases) == {"data", "forward", "optimizer"}


@pytest.mark.whole
def test_each_of_four_processes_has_all_of_its_rows(trained):
    done = trained("ddp", 4)
    assert len(done.truth) == 4
    assert done.run.steps.groupby("step")["rank"].apply(list).tolist() == [[0, 1, 2, 3]] * STEPS
    assert len(done.run.tensors(kind="weight_grad")) == len(NAMES) * SAMPLED * 4
