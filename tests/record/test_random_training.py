"""Watching is harmless, and its recording correct: random trainings are compared with their unwatched twins.

A failure names the broken promise and prints the case, which `random_training.faults` runs again. For hours instead of
seconds: `python -m tests.record.random_training --examples 20000 --seed 7`.
"""

import functools

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.record.random_acts import ACTS
from tests.record.random_models import PIECES
from tests.record.random_training import Act, Case, Loop, Model, Watching, cases, faults, signature, smallest


def assert_no_faults(case: Case, thorough: bool = False) -> None:
    """Fail with the text of `case` and all its faults, if it has any."""
    fault_lines = faults(case, thorough=thorough)
    assert not fault_lines, "\n".join([str(case), *fault_lines])


@pytest.mark.parametrize("piece", sorted(PIECES))
def test_every_piece_of_a_model_trains_as_if_unwatched(piece):
    assert_no_faults(Case(Model((piece,)), Loop(steps=4), watching=Watching(kinds="all", every=1)))


@pytest.mark.parametrize("act", sorted(ACTS))
def test_every_act_between_steps_has_the_same_result_as_unwatched(act):
    assert_no_faults(Case(Model(("linear",)), Loop(steps=4, precision="fp16"), (Act(2, act),), Watching(every=1)))


@pytest.mark.parametrize("act", sorted(ACTS))
def test_every_act_after_backward_has_the_same_result_as_unwatched(act):
    assert_no_faults(
        Case(Model(("linear",)), Loop(steps=4, precision="fp16"), (Act(2, act, inside=True),), Watching(every=1))
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(loop=Loop(precision="fp16", overflow=1)),
        Case(loop=Loop(optimizer="lbfgs"), watching=Watching(trace_ops=1)),
        Case(loop=Loop(root="autograd.grad")),
        Case(loop=Loop(root="two roots")),
        Case(loop=Loop(root="vector")),
        Case(loop=Loop(precision="fp16_scaler_each_step")),
        Case(loop=Loop(precision="fp16_two_scalers", optimizers="both")),
        Case(loop=Loop(precision="fp16"), acts=(Act(2, "swap_tensors", inside=True),), watching=Watching(trace_ops=1)),
        Case(Model(("lstm_time_first", "shared"), returns="dict"), watching=Watching(level="full", scaler="unseen")),
        Case(Model(tiny=1000), Loop(optimizer="adam_foreach", steps=3), watching=Watching(every=3)),
    ],
    ids=str,
)
def test_the_recording_is_correct_and_the_model_is_freed(case):
    assert_no_faults(case, thorough=True)


def seconds(examples: int) -> settings:
    """A few random cases, the same each time. `smaller` shrinks them, because hypothesis would take minutes."""
    every = list(HealthCheck)
    phases = [Phase.explicit, Phase.generate]
    return settings(
        max_examples=examples,
        phases=phases,
        derandomize=True,
        deadline=None,
        suppress_health_check=every,
        database=None,
    )


@functools.cache
def smaller(case: Case, thorough: bool) -> Case:
    """A simpler case that shows a fault of the same kind."""
    kinds = set(map(signature, faults(case, thorough=thorough)))
    return smallest(case, lambda c: not kinds.isdisjoint(map(signature, faults(c, thorough=thorough))), most=20)


def assert_no_faults_in_random(case: Case) -> None:
    """Fail with the faults of a simpler case that shows the same fault as `case`."""
    thorough = case.seed % 8 == 0
    if fault_lines := faults(case, thorough=thorough):
        assert_no_faults(smaller(case, thorough), thorough)
        pytest.fail(f"shown once, but not again: {fault_lines} by {case}")


@given(cases(rare=False))
@seconds(12)
def test_random_trainings_are_the_same_as_unwatched(case):
    assert_no_faults_in_random(case)


@pytest.mark.whole
@given(cases(rare=False))
@seconds(40)
def test_more_random_trainings_are_the_same_as_unwatched(case):
    assert_no_faults_in_random(case)


@given(cases(rare=False))
@seconds(8)
def test_an_unwatched_training_is_repeatable(case):
    """Otherwise the other tests would compare random differences."""
    assert faults(case, watched=False, thorough=False) == []
