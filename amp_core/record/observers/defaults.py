"""The observers that `watch` attaches by default: they record what findings need beyond the tables.

    observers = default_signals(writer, model, optimizers, scaler, "standard")

They write events (`schema.EVENT_KINDS`) and facts in the head of the run. With level `full`, the outputs of all modules
are measured in every step on a GPU too, so that the first non-finite one is always reported in its own step.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amp_core.record import ranks
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import device_of
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.backward import AutocastElsewhere, AutocastKept, BackwardState, StaleCache
from amp_core.record.observers.signals.call_order import CallOrder
from amp_core.record.observers.signals.changed_gradients import ChangedGradients
from amp_core.record.observers.signals.communication import Communication
from amp_core.record.observers.signals.compiled_outputs import CompiledForwardCheck
from amp_core.record.observers.signals.converted_weights import ConvertedWeights
from amp_core.record.observers.signals.failed_in import FailedIn
from amp_core.record.observers.signals.gradient_sums import GradientSums
from amp_core.record.observers.signals.half_rates import HalfRates
from amp_core.record.observers.signals.input_steps import InputSteps
from amp_core.record.observers.signals.loss_operators import LossOperators
from amp_core.record.observers.signals.nonfinite_outputs import ForwardCheck
from amp_core.record.observers.signals.own_scale import OwnLossScale
from amp_core.record.observers.signals.restored_moments import RestoredMoments
from amp_core.record.observers.signals.risky_ops import EvaluationOperators, FirstOperators
from amp_core.record.observers.signals.scheduled_metric import ScheduledMetric
from amp_core.record.observers.signals.second_moments import SecondMoments
from amp_core.record.observers.signals.skipped_gradients import SkippedGradients
from amp_core.record.observers.signals.stale_gradients import StaleGradients
from amp_core.record.observers.signals.start import StartFacts
from amp_core.record.observers.signals.state import Branches, HalfBuffers, PositionTables, RunningStatistics
from amp_core.record.observers.signals.vanished_gradients import VanishedGradients
from amp_core.store.writer import RunWriter


def default_signals(
    writer: RunWriter,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: Any,
    level: str,
) -> Iterator[Observer]:
    """The observers for one run, created lazily, in the order in which they are notified."""
    device = device_of(model)
    yield StartFacts(writer, model, optimizers, scaler)
    yield ConvertedWeights(writer, model)
    calls = CallOrder(writer, model, optimizers, scaler)
    yield calls
    yield BackwardState(writer, device, optimizers, scaler, calls.scale_calls)
    yield InputSteps(writer, model, calls.scale_calls)
    yield ChangedGradients(writer, optimizers, scaler, calls.scale_calls)
    yield OwnLossScale(writer, optimizers, scaler)
    yield ScheduledMetric(writer, optimizers)
    yield HalfRates(writer, optimizers)
    if not is_compiled(model):
        operators = LossOperators(writer, model, device)
        yield ForwardCheck(writer, model, device, each_step=level == "full", on_unexplained=operators.arm)
        yield operators
        yield VanishedGradients(writer, model)
        yield StaleCache(writer, device, optimizers)
    elif ranks.place()[1] == 1:
        yield CompiledForwardCheck(writer, model, device)
    yield AutocastKept(writer, device)
    yield AutocastElsewhere(writer, device)
    yield FirstOperators(writer, model, device)
    yield EvaluationOperators(writer, model)
    yield RunningStatistics(writer, model)
    yield HalfBuffers(writer, model)
    yield PositionTables(writer, model)
    yield Branches(writer, model, optimizers, device)
    yield StaleGradients(writer, model, optimizers)
    yield SkippedGradients(writer, model, optimizers, scaler)
    yield Communication(writer, model)
    yield GradientSums(writer, model)
    yield SecondMoments(writer, model, optimizers)
    yield RestoredMoments(writer, model, optimizers)
    yield FailedIn(writer, model)
