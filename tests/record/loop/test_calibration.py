"""The cost of watching beyond its measured time: exact numbers from made-up times, and from a loop on a fake clock."""

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.loop.calibration import FIRST, FIRST_EVERY, LATER_EVERY, MIN_DIFFERENCES, REMEMBERED, Calibration
from amp_core.record.observers.signals.nonfinite_outputs import ARMED_STEPS
from amp_core.record.step_phases import HostClock, count_calls
from amp_core.record.torch_internals.module_calls import listeners
from tests.record.test_step_phases import FakeTime


def times(forward=10.0, backward=20.0, optimizer=5.0, watch=1.0, data=3.0):
    return {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer, "watch": watch}


def calibrated(*pairs, optimizer=0):
    """A calibration that has learned from groups of one bare and two plain steps with these times."""
    calibration = Calibration()
    for plain, bare in pairs:
        for sort, of in (("plain", plain), ("bare", bare), ("plain", plain)):
            calibration.corrected(optimizer, sort, of)
    return calibration


def test_the_extra_time_of_plain_steps_over_bare_ones_counts_as_watching():
    calibration = calibrated(*[(times(forward=14.0, backward=22.0), times())] * MIN_DIFFERENCES)
    corrected = calibration.corrected(0, "plain", times(forward=15.0, backward=25.0))
    assert corrected == times(forward=11.0, backward=23.0, watch=7.0)


def test_a_bare_step_keeps_its_measured_times():
    calibration = calibrated(*[(times(forward=14.0), times())] * MIN_DIFFERENCES)
    assert calibration.corrected(0, "bare", times()) == times()


def test_nothing_is_corrected_before_there_are_enough_bare_steps():
    calibration = calibrated(*[(times(forward=14.0), times())] * (MIN_DIFFERENCES - 1))
    assert calibration.corrected(0, "plain", times(forward=14.0)) == times(forward=14.0)


def test_differences_of_both_signs_are_noise_and_no_cost():
    longer, shorter = (times(forward=18.0), times()), (times(), times(forward=18.0))
    calibration = calibrated(*[longer] * 6, *[shorter] * 4)
    assert calibration.corrected(0, "plain", times()) == times()
    assert calibrated(*[longer] * 8, *[shorter] * 2).corrected(0, "plain", times(18.0)) == times(watch=9.0)


def test_a_machine_that_becomes_slower_does_not_change_the_cost():
    calibration = Calibration()
    for k in range(
        5 * MIN_DIFFERENCES
    ):  # each step takes 1 ms longer than the one before, plain ones 4 ms more than bare ones
        sort = "bare" if k % 5 == 2 else "plain"
        calibration.corrected(0, sort, times(forward=10.0 + k + (4.0 if sort == "plain" else 0.0)))
    assert calibration.corrected(0, "plain", times(forward=50.0)) == times(forward=46.0, watch=5.0)


def test_samples_are_compared_with_the_nearest_bare_step_however_far_it_is():
    calibration = Calibration()
    for _ in range(MIN_DIFFERENCES + 1):
        calibration.corrected(0, "sampled", times(backward=50.0))
        for sort in ("plain", "plain", "bare", "plain"):
            calibration.corrected(0, sort, times())
    assert calibration.corrected(0, "sampled", times(backward=52.0)) == times(backward=22.0, watch=31.0)
    assert calibration.corrected(0, "plain", times()) == times()


def test_no_corrected_phase_is_negative():
    calibration = calibrated(*[(times(forward=14.0), times())] * MIN_DIFFERENCES)
    assert calibration.corrected(0, "plain", times(forward=1.0)) == times(forward=0.0, watch=2.0)


def test_optimizers_that_take_turns_are_calibrated_separately():
    calibration = Calibration()
    for _ in range(MIN_DIFFERENCES):
        for optimizer, forward in ((0, 14.0), (1, 100.0)):
            calibration.corrected(optimizer, "plain", times(forward=forward))
        calibration.corrected(0, "bare", times())
        calibration.corrected(1, "plain", times(forward=100.0))
        calibration.corrected(0, "plain", times(forward=14.0))
    assert calibration.corrected(0, "plain", times(forward=14.0)) == times(watch=5.0)
    assert calibration.corrected(1, "plain", times(forward=100.0)) == times(forward=100.0)


@pytest.mark.parametrize("begin", [0, 1000])
def test_bare_steps_become_rare(begin):
    calibration = Calibration()
    bare = [step - begin for step in range(begin, begin + 400) if calibration.wants_bare(step)]
    often = [FIRST + FIRST_EVERY * k for k in range(REMEMBERED)]
    assert bare[:REMEMBERED] == often
    assert bare[REMEMBERED:] == list(range(often[-1] + LATER_EVERY, 400, LATER_EVERY))
    assert {step % 2 for step in bare} == {0, 1}, "so that two optimizers that take turns both have bare steps"


HOOK_MS, MODULE_MS, MODULES = 0.25, 1.0, 60


class Slow(nn.Module):
    """Takes a millisecond of a fake clock, and half a millisecond more per hook."""

    def __init__(self, time):
        super().__init__()
        self.time = time
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.time.pass_ms(MODULE_MS + HOOK_MS * len(listeners(self)))
        return x * self.weight


def on_a_fake_clock(into, steps, **options):
    """The rows of a loop that takes 100 ms a step by itself, and the milliseconds that each of its steps took."""
    time = FakeTime()
    model = nn.Sequential(*[Slow(time) for _ in range(MODULES)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    took = []
    with watch(model, optimizer, into=into, kinds=("weight_grad",), **options) as recorder:
        phases = recorder._steps.phases
        phases.clock, phases._since = HostClock(time), time()
        count_calls(phases)
        for _ in range(steps):
            began = time.now
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            took.append((time.now - began) * 1e3)
    return load_run(into).steps, took


def test_the_dispatch_of_hooks_is_counted_as_watching(tmp_path):
    steps, took = on_a_fake_clock(tmp_path / "run", 100, every=10)
    assert steps.step_ms.tolist() == pytest.approx(took)
    bare = [9, 21, 32, 43, 54, 65, 76, 87, 98]  # 20 is sampled, so 21 is bare instead
    # Step 64, in which memory is measured, differs from all others.
    calibrated = steps[(steps.step > 54) & (steps.step != 64)]
    plain = calibrated[~calibrated.step.isin(bare) & (calibrated.step % 10 != 0)]
    assert plain.watch_ms.to_numpy() == pytest.approx(MODULES * HOOK_MS), "every module has a hook"
    assert plain.forward_ms.to_numpy() == pytest.approx(MODULES * MODULE_MS)
    assert steps[steps.step.isin(bare)].step_ms.to_numpy() == pytest.approx(MODULES * MODULE_MS)
    phases = steps[["data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"]].sum(axis=1)
    assert phases.to_numpy() == pytest.approx(steps.step_ms.to_numpy())


def test_bare_steps_have_all_of_their_columns(tmp_path):
    steps, _ = on_a_fake_clock(tmp_path / "run", 30, every=10)
    promised = ["loss", "loss_scale", "skipped", "grad_norm", "lr", "samples", "forward_ms", "backward_ms"]
    assert steps[steps.step.isin([9, 21])][promised].notna().all(axis=None)
    assert steps.step.tolist() == list(range(30))


def test_no_step_is_bare_if_every_step_is_sampled(tmp_path):
    on_a_fake_clock(tmp_path / "run", 30, every=1)
    assert load_run(tmp_path / "run").tensors(kind="weight_grad").groupby("step").size().tolist() == [MODULES] * 30


def test_a_budget_bounds_the_true_cost_of_watching(tmp_path):
    """Hooks alone take 20 % of these steps, which no clock of the recorder measures."""
    steps, took = on_a_fake_clock(tmp_path / "run", 700, every=10, budget=0.03)
    later = sum(took[300:])
    assert (later - 400 * MODULES * MODULE_MS) / later <= 0.03
    events = load_run(tmp_path / "run").events
    changed = events[events["kind"] == "phase change"]
    assert "hooks" in changed["name"].tolist()
    assert changed["step"].max() < 300, "the interval settles"
    assert len(steps) == 700


@pytest.mark.parametrize(("bad", "hooks"), [(None, 0), (9 - ARMED_STEPS, 1)])
def test_no_step_is_bare_soon_after_a_non_finite_value(tmp_path, bad, hooks):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    corrected = {}
    with watch(model, optimizer, into=tmp_path / "run") as recorder:
        model[1].register_forward_pre_hook(lambda m, args: corrected.update({recorder.step: len(listeners(m))}))
        for step in range(11):
            x = torch.full((2, 2), float("nan")) if step == bad else torch.ones(2, 2)
            model(x).sum().backward()
            for p in model.parameters():
                p.grad.nan_to_num_(0.0)  # so that the following steps are finite
            optimizer.step()
            optimizer.zero_grad()
    assert corrected[9] == hooks
