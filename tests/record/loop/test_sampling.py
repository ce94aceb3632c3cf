"""Sampling with made-up costs: exact intervals."""

import pytest
import torch

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.loop.sampling import LEFT_OUT, MAX_STRETCH, REMEMBERED, Sampling


def run(sampling, steps, bare_ms, sample_ms, other_ms):
    """The sampled steps and the changes of the interval for these costs."""
    sampled, changes = [], {}
    for step in range(steps):
        assert sampling.due(step) == sampling.due(step), "a step stays sampled or not"
        watch = sample_ms if sampling.due(step) else other_ms
        sampled += [step] if sampling.due(step) else []
        changed = sampling.learn(sampling.due(step), bare_ms + watch, watch)
        if changed is not None:
            changes[step] = changed
    return sampled, changes


def share(sampled, steps, bare_ms, sample_ms, other_ms):
    watch = len(sampled) * sample_ms + (steps - len(sampled)) * other_ms
    return watch / (steps * bare_ms + watch)


def test_without_a_budget_every_nth_step_is_sampled():
    sampled, changes = run(Sampling(7), 50, 1.0, 100.0, 10.0)
    assert sampled == list(range(0, 50, 7)) and changes == {}


def test_a_budget_that_is_not_exceeded_changes_nothing():
    sampled, changes = run(Sampling(10, budget=0.03), 100, 100.0, 5.0, 0.5)
    assert sampled == list(range(0, 100, 10)) and changes == {}


@pytest.mark.parametrize("budget", [0.01, 0.03, 0.1])
def test_the_interval_is_stretched_just_enough(budget):
    costs = (100.0, 40.0, 0.5)
    sampling = Sampling(2, budget=budget)
    run(sampling, 40, *costs)
    later, changes = run_on(sampling, 40, 4000, costs)
    assert changes == {}
    assert share(later, 4000, *costs) <= budget
    twice = [s for s in range(4000) if s % (sampling.interval // 2) == 0]
    assert share(twice, 4000, *costs) > budget, "half the interval would exceed the budget"


def run_on(sampling, start, steps, costs):
    bare_ms, sample_ms, other_ms = costs
    sampled, changes = [], {}
    for step in range(start, start + steps):
        watch = sample_ms if sampling.due(step) else other_ms
        sampled += [step] if sampling.due(step) else []
        changed = sampling.learn(sampling.due(step), bare_ms + watch, watch)
        changes |= {step: changed} if changed is not None else {}
    return sampled, changes


def test_sampled_steps_lie_on_multiples_of_the_interval():
    sampling = Sampling(2, budget=0.03)
    sampled, changes = run(sampling, 400, 100.0, 40.0, 0.5)
    last_change = max(changes)
    assert all(s % sampling.interval == 0 for s in sampled if s > last_change)


def test_the_interval_shrinks_again_when_steps_become_longer():
    sampling = Sampling(2, budget=0.03)
    run(sampling, 200, 10.0, 20.0, 0.1)
    stretched = sampling.interval
    run_on(sampling, 200, 4000, (1000.0, 20.0, 0.1))
    assert sampling.interval == 2 < stretched


def test_sampling_is_as_rare_as_possible_if_even_unsampled_steps_exceed_the_budget():
    sampling = Sampling(1, budget=0.01)
    run(sampling, 40, 1.0, 5.0, 1.0)
    assert sampling.interval == MAX_STRETCH


def test_one_slow_sample_does_not_change_the_interval():
    sampling = Sampling(10, budget=0.03)
    for step in range(100):
        watch = 900.0 if step == 40 else 5.0 if sampling.due(step) else 0.1
        sampling.learn(sampling.due(step), 100.0 + watch, watch)
    assert sampling.interval == 10


def test_the_cost_of_writing_a_sample_one_step_later_counts_for_the_sample():
    """Rows of a sampled step are written as the next one begins."""
    sampling = Sampling(1, budget=0.03)
    run(sampling, 3, 100.0, 40.0, 0.5)
    for step in range(3, 400):
        due, after = sampling.due(step), step and (step - 1) % sampling.interval == 0
        watch = 20.0 if due else 20.5 if after else 0.5
        sampling.learn(due, 100.0 + watch, watch)
    assert sampling.interval == 16, "40 ms a sample, 2.6 ms a step to spend"


def test_steps_that_exceed_the_budget_leave_out_one_thing_after_another():
    """Each is left out only once the steps without the one before were seen."""
    sampling, levels = Sampling(10, budget=0.03), []
    for step in range(60):
        watch = 5.0 if sampling.due(step) else (1.0, 0.6, 0.2)[sampling.lean]
        sampling.learn(sampling.due(step), 10.0 + watch, watch)
        levels.append(sampling.lean)
    assert levels.index(1) >= REMEMBERED and levels.index(2) - levels.index(1) >= REMEMBERED
    enough = Sampling(10, budget=0.03)
    run(enough, 60, 100.0, 5.0, 0.5)
    assert enough.lean == 0 and Sampling(10).learn(False, 10.0, 9.0) is None


def test_a_budget_too_small_for_any_step_leaves_out_norms_and_says_so(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", budget=1e-6):
        for _ in range(40):
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    details = [detail for detail in run.events["detail"] if detail.endswith("to stay within the budget")]
    assert [one.removesuffix(", to stay within the budget") for one in details if not one.startswith("every")] == list(
        LEFT_OUT
    )
    norms = run.steps["grad_norm"]
    assert norms[:9].notna().all() and norms[30:].isna().all() and run.steps["loss"].notna().all()
