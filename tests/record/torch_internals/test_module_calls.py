"""Listeners to calls of modules: what they are notified of, in which order, and what stays afterwards."""

import copy
import pickle

import pytest
import torch
from torch import nn

from amp_core.record.torch_internals import module_calls
from amp_core.record.torch_internals.module_calls import (
    Switches,
    _listened,
    _patched,
    after_call,
    before_call,
    listeners,
)


class Add(nn.Module):
    def forward(self, x, by=1):
        if by is None:
            raise ValueError("nothing to add")
        return x + by


@pytest.fixture
def notified():
    yield (notifications := [])
    assert not _listened and not _patched and torch.nn.Module._compiled_call_impl is None, "no listener stays"
    assert "_compiled_call_impl" not in vars(Add)
    assert notifications is not None


def test_listeners_receive_arguments_and_output_and_are_not_stored_in_the_module(notified):
    module, other = Add(), Add()
    before = dict(vars(module))
    handles = [
        before_call(module, lambda *call: notified.append(("second", *call))),
        before_call(module, lambda *call: notified.append(("first", *call)), first=True),
        after_call(module, lambda *call: notified.append(("after", *call))),
    ]
    assert vars(module) == before and len(listeners(module)) == 3 and listeners(other) == []
    assert module(1, by=2) == 3 and other(1) == 2
    call = (module, (1,), {"by": 2})
    assert notified == [("first", *call), ("second", *call), ("after", *call, 3)]
    for handle in (*handles, *handles):
        handle.remove()
    assert module(1) == 2 and len(notified) == 3


def test_only_listeners_with_always_are_notified_of_a_call_that_raised(notified):
    module = Add()
    handles = [
        after_call(module, lambda *call: notified.append("mostly")),
        after_call(module, lambda *call: notified.append(call[-1]), always=True),
    ]
    with pytest.raises(ValueError, match="nothing to add"):
        module(1, by=None)
    assert notified == [None]
    for handle in handles:
        handle.remove()


def test_listeners_are_notified_of_a_call_that_ctrl_c_ended(notified):
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    module = Interrupted()
    handle = after_call(module, lambda *call: notified.append(call[-1]), always=True)
    with pytest.raises(KeyboardInterrupt):
        module(1)
    assert notified == [None]
    handle.remove()


def test_a_listener_that_raises_is_dropped_and_the_call_continues(notified):
    module = Add()

    def fail(*_):
        raise ZeroDivisionError("a mistake of ours")

    handles = [
        before_call(module, fail),
        after_call(module, lambda *call: notified.append(call[-1])),
        after_call(module, fail),
    ]
    with pytest.warns(RuntimeWarning, match="a mistake of ours"):
        assert module(1) == 2
    assert module(2) == 3 and notified == [2, 3] and len(listeners(module)) == 1
    for handle in handles:
        handle.remove()


def test_a_listener_added_within_a_call_is_notified_of_its_end(notified):
    """As at the begin of a step: listeners are added during the call of the model."""
    module, handles = Add(), []

    def begin(*_):
        handles.append(before_call(module, lambda *call: notified.append("before")))
        handles.append(after_call(module, lambda *call: notified.append("after")))

    handles.append(before_call(module, begin))
    assert module(1) == 2 and notified == ["after"]
    for handle in handles:
        handle.remove()


def test_a_module_compiled_in_place_stays_compiled(notified):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    module = Add()
    handle = after_call(module, lambda *call: notified.append(call[-1]))
    module.compile(backend=backend)
    assert module(torch.ones(2)).tolist() == [2, 2] and len(graphs) == 1
    handle.remove()
    assert module._compiled_call_impl is not None and module(torch.ones(2)).tolist() == [2, 2] and len(graphs) == 1
    torch._dynamo.reset()


def test_listeners_of_a_module_that_was_compiled_in_place_are_notified_and_it_stays_compiled(notified):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    module = Add()
    module.compile(backend=backend, fullgraph=True)
    compiled = module._compiled_call_impl
    handles = [after_call(module, lambda *call: notified.append(call[-1].tolist())) for _ in range(2)]
    for _ in range(2):
        assert module(torch.ones(2)).tolist() == [2, 2]
    assert notified == [[2, 2]] * 4 and len(graphs) == 1
    for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert "_compiled_call_impl" not in vars(other) and listeners(other) == []
        assert other(torch.ones(2)).tolist() == [2, 2] and len(notified) == 4
    for handle in handles:
        handle.remove()
    assert module._compiled_call_impl is compiled
    assert module(torch.ones(2)).tolist() == [2, 2] and len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("change", ["nothing", "another listener", "compiled", "failed", "the same module twice"])
@pytest.mark.parametrize("on", [False, True], ids=["while off", "while on"])
def test_switches_turn_all_listeners_on_and_off_whatever_happens_to_a_module_in_between(notified, change, on):
    modules = [Add(), Add(), nn.Identity()]
    if change == "the same module twice":
        modules.append(modules[0])
    failing = []

    def after(place):
        def listener(module, args, kwargs, output):
            if place in failing:
                raise RuntimeError("a listener fails")
            notified.append(place)

        return listener

    switches = Switches((module, after(place)) for place, module in enumerate(modules))
    switches.on()
    if not on:
        switches.off()
    handle = None
    if change == "another listener":
        handle = after_call(modules[0], lambda *call: notified.append("other"))
    elif change == "compiled":
        modules[0].compile(backend="eager")
    elif change == "failed":
        failing.append(0)
    if not on:
        switches.on()
    if change == "failed":
        with pytest.warns(RuntimeWarning, match="no longer listens"):
            modules[0](1)
    notified.clear()
    for module in modules[:3]:
        module(torch.ones(1))
    assert [place for place in notified if place in (1, 2)] == [1, 2]
    assert (0 in notified) == (change != "failed" and not (change == "compiled" and on))
    assert ("other" in notified) == (change == "another listener")
    for _ in range(2):
        switches.off()
        notified.clear()
        for module in modules:
            module(torch.ones(1))
        assert set(notified) <= {"other"}
        switches.on()
    switches.off()
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_graph_through_a_module_does_not_break_and_notifies_nobody(hooked, notified):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    outer = nn.Sequential(Add(), Add())
    if hooked:  # in this case dynamo traces the call itself
        outer[0].register_forward_hook(lambda module, args, output: output * 2)
    compiled = torch.compile(lambda x: outer(x) + 1, backend=backend, fullgraph=True)
    eager_output = compiled(torch.ones(2)).tolist()
    handles = [after_call(module, lambda *call: notified.append(call[-1])) for module in outer.modules()]
    assert compiled(torch.ones(2)).tolist() == eager_output
    torch._dynamo.reset()
    assert compiled(torch.ones(2)).tolist() == eager_output and notified == []
    for handle in handles:
        handle.remove()
    assert compiled(torch.ones(2)).tolist() == eager_output
    assert hooked or len(graphs) == 2, "as many graphs as without listeners, before and after the reset"
    torch._dynamo.reset()


@pytest.mark.parametrize("tracing", [False, True])
def test_the_tracing_flag_of_torch_since_it_is_one_per_thread(monkeypatch, tracing):
    monkeypatch.delattr(module_calls._symbolic_trace, "_is_fx_tracing_flag", raising=False)
    monkeypatch.setattr(module_calls, "_read_fx_tracing", lambda: tracing)
    assert module_calls._is_ordinary() is not tracing
