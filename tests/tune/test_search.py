"""`tune` picks the right recipe for workloads whose best recipe is known, and gives the reason.

The trainings, their losses and the choice are real; the step times of the device are made up, see `workloads`.
"""

import subprocess
import sys

import pytest

from amp_core import load_run
from amp_core.analysis import compare
from amp_core.hardware.host import this_process
from amp_core.schema import RunError
from amp_core.train.turns.interleave import Member
from amp_core.tune.race import Race, ranked
from amp_core.tune.result import Tuned, load_tuned
from amp_core.tune.search import Ended, tune
from tests.tune.workloads import Stopwatch, config

FAST_GPU = {"fp32": 10.0, "bf16": 4.0, "fp16": 4.0, "fp16-islands": 4.5}
FAST_FP16 = {"fp32": 10.0, "bf16": 14.0, "fp16": 4.0, "fp16-islands": 5.0}
"""As where BF16 is emulated."""
FASTEST_FP16 = {"fp32": 10.0, "bf16": 6.0, "fp16": 4.0, "fp16-islands": 8.0}
SLOW_CPU = {"fp32": 1.0, "bf16": 3.0, "fp16": 20.0, "fp16-islands": 15.0}


def search(tmp_path, name, speeds, **more):
    """Search with controlled speeds, in the shortest possible races."""
    load = {name: more.pop(name) for name in ("load", "start_s") if name in more}
    watch = Stopwatch(speeds, until_s=more.get("budget_s", 600.0), **load)
    reported = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_core.tune.race.RACE_STEPS", (60, 60))
        patch.setattr("amp_core.tune.search.RIVALS_STEPS", 60)
        result = tune(
            config(name, **more.pop("settings", {})),
            tmp_path / "tune",
            **({"budget_s": 600.0} | more),
            on_progress=reported.append,
            trainer=watch,
            clock=watch.clock,
        )
    return result, watch, reported


def rows(result, stage):
    return {row.name: row for row in result.tried if row.stage == stage}


@pytest.fixture(scope="module")
def on_fast_gpu(tmp_path_factory):
    """The search of a healthy workload, its folder, and its output."""
    folder = tmp_path_factory.mktemp("fast-gpu")
    result, _, reported = search(folder, "healthy", FAST_GPU)
    return result, folder / "tune", reported


def test_a_healthy_workload_gets_the_simplest_of_the_fastest_recipes(on_fast_gpu):
    result, _, _ = on_fast_gpu
    assert result.chosen == "bf16" and result.config["precision"] == "bf16"
    row = rows(result, "confirm")["bf16"]
    assert row.parity.startswith(("within noise", "better")) and not row.out
    assert row.speed_ratio == pytest.approx(2.5, rel=0.02) and len(row.runs) >= 3
    assert result.answer.startswith("BF16: 2.") and "same loss within noise" in result.answer


def test_tiny_gradients_get_a_loss_scale_that_keeps_them(tmp_path):
    result, _, _ = search(tmp_path, "tiny_gradients", FAST_FP16)
    assert result.chosen == "fp16"
    assert result.config["init_scale"] > 2.0**16  # PyTorch's default is barely large enough for these
    assert "loss scale from" in rows(result, "race")["fp16"].note


def test_tiny_gradients_are_lost_without_a_scale(tmp_path):
    """This shows that the test above needs the loss scale."""
    runs = []
    for name in ("fp32", "fp16-unscaled"):
        member = Member(config("tiny_gradients", precision=name), tmp_path / name)
        Stopwatch({name: 1.0})([member], 5, lambda done: None)
        runs.append(load_run(member.folder))
    assert compare(runs).recipes["parity"].iloc[1].startswith("worse")


def test_large_activations_get_bf16_though_fp16_is_faster(tmp_path):
    result, _, _ = search(tmp_path, "large_activations", FASTEST_FP16)
    assert result.chosen == "bf16"
    assert "not finite" in rows(result, "race")["fp16"].out
    islands = rows(result, "race")["fp16-islands"]
    assert "loud" in islands.note and "activations too large for FP16" in islands.note


def test_if_the_fastest_fails_parity_the_next_is_confirmed_with_the_same_fp32_seeds(tmp_path):
    requested = {"init_scale": 1.0}  # at which fp16 loses nearly all of these gradients
    result, watch, _ = search(tmp_path, "tiny_gradients", FASTEST_FP16, settings=requested)
    assert result.chosen == "bf16" and result.confirmed
    requested = rows(result, "confirm")
    assert requested["fp16"].out.startswith("worse") and not requested["bf16"].out
    assert requested["bf16"].speed_ratio == pytest.approx(
        10 / 6, rel=0.02
    )  # from the race, in which it took turns with FP32
    seeds = {name: [run.rpartition("seed")[2] for run in row.runs] for name, row in requested.items()}
    assert seeds["fp16"] == seeds["bf16"] == seeds["fp32"]
    assert sum(name.startswith("fp32-seed") for name in watch.trained) == len(seeds["fp32"])  # each seed once


def test_fp32_islands_let_fp16_train_a_model_that_overflows(tmp_path):
    result, _, _ = search(tmp_path, "large_activations", FAST_FP16)
    assert result.chosen == "fp16-islands"
    assert "loud" in result.config["islands"] and "last" not in result.config["islands"]


def test_if_16_bits_are_slower_fp32_stays_and_nothing_is_confirmed(tmp_path):
    result, watch, _ = search(tmp_path, "healthy", SLOW_CPU)
    assert result.chosen == "fp32" and result.answer == "Stay with FP32"
    race = rows(result, "race")
    assert race["fp16"].out.startswith("slower than fp32") and not rows(result, "confirm")
    assert not [name for name in watch.trained if "seed" in name]


def test_a_race_ends_once_its_order_is_decided(on_fast_gpu):
    _, folder, _ = on_fast_gpu

    def goes_on(*names):
        return Race(names, [folder / "race" / name for name in names], over=lambda: False).keep(60)

    assert goes_on("fp32", "bf16", "fp16") == set()  # FP32 is slower, the other two are equally fast
    assert goes_on("fp32") == set()  # nothing to compare with
    runs = [load_run(folder / "race" / name) for name in ("fp32", "bf16")]
    assert goes_on("fp32", "nobody") == set()
    assert ranked([[run] for run in runs]) == [1, 0]


def test_only_options_that_are_faster_are_chosen(tmp_path):
    result, _, _ = search(tmp_path, "healthy", FAST_GPU | {"+fused": 0.8, "+compile": 1.2})
    assert result.chosen == "bf16+fused"
    assert result.config["fused"] and not result.config["compile"]
    assert rows(result, "options")["bf16+fused"].speed_ratio == pytest.approx(1.25, rel=0.02)


def test_recipes_that_cannot_work_here_are_omitted_with_the_reason(on_fast_gpu):
    result, _, _ = on_fast_gpu
    why = dict(result.left_out)
    assert "compute capability 8.0" in why["tf32"] and "compute capability 8.9" in why["fp8"]
    assert why["fp16 with FP32 islands"].startswith("every activation fits FP16")
    assert why["channels_last"] == "the model has no convolution over images"
    assert "tensor cores" in why["padding"]


SLOW = {name: 50 * ms for name, ms in FAST_GPU.items()}


def test_too_small_a_budget_gives_the_best_so_far_and_names_a_sufficient_budget(tmp_path):
    result, _, reported = search(tmp_path, "healthy", SLOW, budget_s=60.0)
    assert result.chosen == "bf16" and not result.confirmed  # the best so far, labelled as unconfirmed
    assert result.answer.startswith("BF16 looks fastest, 2.5")
    assert result.answer.endswith(
        f" × FP32's speed, but its convergence parity is undecided: run with --budget {result.needs_s:.0f}"
    )
    assert "was not trained alongside FP32 for any seed" in result.why and reported[-1] == result.answer
    assert result.seconds < 2 * result.budget_s
    again, _, _ = search(tmp_path / "again", "healthy", SLOW, budget_s=result.needs_s)
    assert again.chosen == "bf16" and again.confirmed and again.seconds <= again.budget_s
    assert "compile" in dict(again.left_out)


def test_a_race_cut_short_by_the_budget_is_unconfirmed(tmp_path):
    result, _, _ = search(tmp_path, "healthy", SLOW, budget_s=24.0)
    assert result.chosen in ("bf16", "fp16") and not result.confirmed
    assert "its speed and convergence parity are undecided" in result.answer
    again, _, _ = search(tmp_path / "again", "healthy", SLOW, budget_s=result.needs_s)
    assert again.confirmed and again.config["precision"] == "bf16"


BUSY = {"load": 1.0, "start_s": 20.0}
"""Other work slows single steps by factors between a third and three, and starts take half a minute."""


def test_a_race_that_load_leaves_undecided_goes_on_to_seeds_and_never_ends_with_fp32(tmp_path):
    speeds = {"fp32": 10.0, "bf16": 8.5, "fp16": 12.0, "fp16-islands": 12.0}
    result, _, _ = search(tmp_path, "healthy", speeds, **BUSY)
    raced = rows(result, "race")["bf16"]
    assert raced.speed_verdict.startswith("cannot tell") and raced.speed_ratio > 1  # so the case is the one meant
    assert result.chosen == "bf16"
    assert rows(result, "confirm")["bf16"].runs


def test_the_search_can_be_read_during_and_after_it(on_fast_gpu):
    result, folder, reported = on_fast_gpu
    again = load_tuned(folder)
    assert again.to_json() == result.to_json() and again.status == "finished"
    assert all((folder / run / "run.json").exists() for row in result.tried for run in row.runs)
    assert any(line.startswith("  bf16: 2.") for line in reported)


@pytest.mark.parametrize("budget", [0, -1, "long", float("nan"), True])
def test_an_invalid_budget_is_refused(tmp_path, budget):
    with pytest.raises(RunError, match="budget="):
        tune(config("healthy"), tmp_path / "tune", budget, on_progress=print)
    assert not (tmp_path / "tune").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is in use"):
        tune(config("healthy"), tmp_path, 60, on_progress=print)


def test_a_stopped_search_has_status_stopped(tmp_path):
    def stopped(members, block_steps, reported, keep=None):
        return [130]

    with pytest.raises(Ended) as ended:
        tune(config("healthy"), tmp_path / "tune", 60, on_progress=print, trainer=stopped)
    assert ended.value.code == 130 and load_tuned(tmp_path / "tune").status == "stopped"


def test_a_search_whose_process_died_is_lost(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    process = this_process() | {"pid": ended.pid}
    ended.wait()
    for pid, message in ((process, "lost"), (this_process(), "running")):
        Tuned("running", "text-gpt", "tiny", "cpu", 60.0, 1.0, process=pid).save(tmp_path)
        assert load_tuned(tmp_path).present_status == message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 9, "tried": []}', '{"schema": "x"}'])
def test_a_file_that_is_not_a_search_is_refused(tmp_path, text):
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(RunError, match=r"tune\.json"):
        load_tuned(tmp_path)
